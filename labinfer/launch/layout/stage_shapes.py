"""``StageShapes``: a rank's part of the model on the meta device, for sizes of weights and cache."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import torch

from labinfer.functions.calls import FunctionCall, collect_calls
from labinfer.models.config import ModelConfig
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.experts import RoutedExperts
from labinfer.models.layers.cache_spec import CacheSpec
from labinfer.models.layers.context import StageContext
from labinfer.models.registry import model_class
from labinfer.weights.loader import pack_weights, weight_bytes


class StageShapes:
    """Decoder built on torch's meta device from the same classes as the stage that runs.

    Args:
        context: stage context of the rank, with functions that run on any device.
        kv_dtype: dtype of the rank's KV cache.
    """

    def __init__(self, config: ModelConfig, context: StageContext, kv_dtype: torch.dtype):
        self._config, self._context, self._kv_dtype = config, context, kv_dtype
        self.model = self._build()

    def _build(self) -> Decoder:
        with torch.device("meta"):
            return model_class(self._config)(self._config, self._context)

    @cached_property
    def _packed(self) -> Decoder:
        packed = self._build()
        pack_weights(packed)
        return packed

    @property
    def weight_bytes(self) -> int:
        """Bytes of the rank's weights, packed as in memory."""
        return weight_bytes(self._packed)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the rank's part of the model. Wrong if the stage context quantizes weights."""
        shared = sum(parameter.numel() for parameter in self.model.parameters())
        experts = [module for module in self.model.modules() if isinstance(module, RoutedExperts)]
        loaded_at_once = sum(module.gate_up.numel() + module.down.numel() for module in experts)
        return shared - loaded_at_once + sum(module.num_parameters for module in experts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the rank's weights that belong to MoE experts."""
        return sum(module.num_bytes for module in self._packed.modules() if isinstance(module, RoutedExperts))

    @property
    def mtp_bytes(self) -> int:
        """Bytes of the rank's weights that belong to an MTP layer, with an embedding that only the MTP layer uses."""
        parts = (getattr(self._packed, name, None) for name in ("mtp", "mtp_embedding"))
        return sum(weight_bytes(part) for part in parts if part is not None)

    @property
    def mtp_bytes_per_token(self) -> int:
        """Bytes of a token in the KV blocks of the MTP layer."""
        mtp = getattr(self.model, "mtp", None)
        return 0 if mtp is None else mtp.layer.self_attn.cache_spec().bytes_per_token(self._kv_dtype)

    @cached_property
    def _cache_specs(self) -> list[CacheSpec]:
        return self.model.cache_specs()

    @cached_property
    def calls(self) -> Counter[FunctionCall]:
        """Function calls that the rank makes for every batch, with their counts."""
        return collect_calls(self.model)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the rank's KV blocks."""
        return sum(spec.bytes_per_token(self._kv_dtype) for spec in self._cache_specs)

    @property
    def window_bytes_per_token(self) -> int:
        """Bytes of a token in the KV blocks of the rank's sliding-window layers."""
        return sum(spec.bytes_per_token(self._kv_dtype) for spec in self._cache_specs if spec.window)

    @property
    def window(self) -> int:
        """Largest sliding window of the rank's layers; 0 if none has one."""
        return max((spec.window for spec in self._cache_specs), default=0)

    @property
    def is_cache_replicated(self) -> bool:
        """Whether every TP rank holds the whole KV cache of its layers (replicated), not only that of its own heads."""
        return all(spec.is_replicated for spec in self._cache_specs)

    @property
    def can_shift(self) -> bool:
        """Whether all layers support context shift (removing tokens from the context)."""
        return all(spec.can_shift for spec in self._cache_specs)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of recurrent state of a sequence on the rank, independent of its length."""
        return sum(spec.bytes_per_sequence for spec in self._cache_specs)
