"""ModelConfig: the shape of a model, and readers of config keys that families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labinfer.base.pooling import PoolingConfig
from labinfer.models.config_file import FULL, MOST, SLIDING, ConfigFile, show_value
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.layers.mixer import MixerConfig, MLPConfig
from labinfer.models.layers.mlp import GatedMLPConfig
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.formats.format import Formats
from labinfer.weights.formats.plain import plain_formats


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Unsharded shape of one decoder layer."""

    mixer: MixerConfig
    mlp: MLPConfig
    cache_layer: int | None = None
    """Index of the earlier layer whose KV cache this layer's attention uses (KV sharing); None if it has its own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Unsharded shape of a decoder-only transformer. Sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    norm_offset: float = 0.0
    """Number added to the checkpoint's weights of the norms around attention and MLP, and of the final norm."""
    embedding_scale: float = 1.0
    """Factor on the token embeddings, rounded to their dtype."""
    residual_scale: float = 1.0
    """Factor on the output of a layer's attention or MLP before the residual addition."""
    logits_divisor: float = 1.0
    """Divisor of the hidden states before the LM head."""
    logits_cap: float | None = None
    """Soft cap of the logits, ``cap * tanh(logits / cap)``; None for no cap."""
    layer_inputs: Any = None
    """Config of per-layer embeddings, such as ``PerLayerEmbeddingConfig`` (Gemma 4); None if the model has none."""
    max_position: int
    exact_context: int = 0
    """Context length up to which results are the reference's, and default of ``--max-model-len``; 0 for ``max_position``."""
    tied_embeddings: bool
    notes: tuple[str, ...] = ()
    """Warnings for the user about the checkpoint, a line each."""
    has_head: bool = True
    """Whether the checkpoint has an LM head. Without one, the embedding takes its place and is never used for logits."""
    is_causal: bool = True
    """Whether attention is causal. If False, a token attends to all tokens of its prompt, which runs in a single step."""
    pooling: PoolingConfig = PoolingConfig()
    """Pooling of embeddings that the checkpoint's files specify."""
    score_head: Any = None
    """Config of the head of a classifier or reranker, a ``ScoreHeadConfig``; None if the model has none."""
    layers: tuple[LayerConfig, ...]
    mtp: LayerConfig | None = None
    """Decoder layer inside the first MTP layer; None if the checkpoint has no MTP layer, or if MTP layers are not used for drafting."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    formats: Formats = field(default_factory=plain_formats)
    """Formats in which the checkpoint stores matrices."""

    @property
    def no_generation(self) -> str:
        """Reason why the model cannot generate tokens, as the predicate of a sentence; empty if it can."""
        if not self.has_head:
            return "has no output head (lm_head)"
        return "" if self.is_causal else "is bidirectional (is_causal: false)"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dynamic_rope_from(self) -> int:
        """Prompt length beyond which ``dynamic`` rope depends on the length; 0 if no layer has it."""
        ropes = [rope for layer in self.layers if (rope := getattr(layer.mixer, "rope", None)) is not None]
        return min((rope.dynamic_from for rope in ropes if rope.dynamic_from), default=0)

    @property
    def last_cut(self) -> int:
        """Largest layer index at which a stage may begin: layers that share a KV cache must be in one stage."""
        return min(
            (layer.cache_layer for layer in self.layers if layer.cache_layer is not None), default=self.num_layers
        )

    @property
    def activation_size(self) -> int:
        """Elements per token that a stage sends to the next one: hidden states, and token embeddings if the model has
        per-layer embeddings."""
        return self.hidden_size * (1 if self.layer_inputs is None else 2)


def read_model(file: ConfigFile, layers: Sequence[LayerConfig], **changes: Any) -> ModelConfig:
    """Read the config keys that all families share; ``changes`` override fields of the result.

    Raises:
        UserError: a key is missing or invalid.
    """
    require_plain_layers(file)
    fields = {
        "architecture": file.architecture,
        "vocab_size": file.size("vocab_size"),
        "hidden_size": file.size("hidden_size"),
        "norm_eps": file.get("rms_norm_eps", float, 1e-6),
        "max_position": _read_context(file, layers),
        "tied_embeddings": file.get("tie_word_embeddings", bool, False),
        "dtype": file.get("dtype", str, file.get("torch_dtype", str, "float32")),
        "eos_token_ids": file.end_ids(),
        "is_causal": _read_causal(file, layers),
    }
    return ModelConfig(layers=tuple(layers), **fields | changes)


def _read_causal(file: ConfigFile, layers: Sequence[LayerConfig]) -> bool:
    """Whether attention is causal, in all layers: the config's ``is_causal``, or true if that is missing.

    Raises:
        UserError: it is not a boolean, or it is false although some layers have no full attention.
    """
    is_causal = file.values.get("is_causal", True)
    file.require(isinstance(is_causal, bool), f"is_causal should be true or false, not {show_value(is_causal)}")
    is_full = all(isinstance(layer.mixer, AttentionConfig) and not layer.mixer.window for layer in layers)
    file.require(
        is_causal or is_full,
        "is_causal false needs full attention in every layer (no sliding windows, latent attention or linear "
        "attention)",
    )
    return is_causal


def require_plain_layers(file: ConfigFile) -> None:
    """Reject a config with chunked attention, or with values per layer (``per_layer_config``) that the family does not read.

    Raises:
        UserError: ``attention_chunk_size`` is set, or ``per_layer_config`` is set and the family does not read it.
    """
    file.require(
        not file.values.get("per_layer_config"),
        "per_layer_config is not supported for this architecture: its layers have the config's values",
    )
    file.require(
        file.values.get("attention_chunk_size") is None,
        f"attention_chunk_size {show_value(file.values.get('attention_chunk_size'))} is not supported: no attention is cut into chunks",
    )


def require_no_window(file: ConfigFile, known: Sequence[str] = (FULL,)) -> None:
    """Reject a sliding window in a family with full attention only.

    Args:
        known: layer types that the family supports.

    Raises:
        UserError: ``sliding_window`` is set and not disabled, or ``layer_types`` has a type that is not in ``known``.
    """
    window = file.values.get("sliding_window")
    file.require(
        window is None or file.values.get("use_sliding_window") is False,
        f"sliding_window {show_value(window)} is not supported for this architecture; --sliding-window gives every layer one",
    )
    types = file.values.get("layer_types")
    file.require(
        types is None or (isinstance(types, list) and set(map(str, types)) <= {*known}),
        f"layer_types {show_value(types)} is not supported for this architecture; only {' and '.join(known)} are",
    )


def require_one_type(file: ConfigFile, window: int) -> None:
    """Reject ``layer_types`` that contradict ``window`` in a family whose layers are all alike.

    Args:
        window: sliding-window size in tokens; 0 for full attention.

    Raises:
        UserError: ``layer_types`` is not a list of the one type that ``window`` implies.
    """
    types, expected = file.values.get("layer_types"), SLIDING if window else FULL
    file.require(
        types is None or (isinstance(types, list) and set(map(str, types)) <= {expected}),
        f"layer_types {show_value(types)} is not supported: by its other keys all layers have {expected}",
    )


def read_attention(file: ConfigFile, **changes: Any) -> AttentionConfig:
    """Read grouped-query attention from the config keys that most families have; ``changes`` override its fields. Unless ``changes`` has a
    ``window``, configs with a sliding window are rejected.

    Raises:
        UserError: a key is missing or invalid.
    """
    if "window" not in changes:
        require_no_window(file)
    num_heads = file.size("num_attention_heads")
    num_kv_heads = file.size("num_key_value_heads", num_heads)
    file.require(
        num_heads % num_kv_heads == 0,
        f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
    )
    bias = file.get("attention_bias", bool, False)
    fields = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": file.head_size,
        "rope": changes["rope"] if "rope" in changes else read_rope(file),
        "qkv_bias": bias,
        "out_bias": bias,
    }
    return AttentionConfig(**fields | changes)


def read_gated_mlp(file: ConfigFile, key: str = "intermediate_size") -> GatedMLPConfig:
    """Read a gated MLP from the config keys that most families have.

    Args:
        key: config key of the number of columns.

    Raises:
        UserError: a key is missing or invalid.
    """
    file.require(
        file.get("hidden_act", str, "silu") == "silu",
        f"hidden_act {file.values.get('hidden_act')!r} is not supported; only silu is",
    )
    return GatedMLPConfig(intermediate_size=file.size(key), bias=file.get("mlp_bias", bool, False))


def _read_context(file: ConfigFile, layers: Sequence[LayerConfig]) -> int:
    """Maximum context length: the checkpoint's, or the one that ``dynamic`` rope extends it to."""
    ropes = [rope for layer in layers if (rope := getattr(layer.mixer, "rope", None)) is not None and rope.dynamic_from]
    stretched = [rope.max_position * rope.parameters["factor"] for rope in ropes]
    return int(min(MOST[""], max(file.max_position, *stretched, 0)))


def read_windows(file: ConfigFile, window: int, default: Callable[[int], str]) -> tuple[int, ...]:
    """Sliding-window size of each layer, 0 for full attention.

    Args:
        window: size in layers of type ``sliding_attention``.
        default: type of layer n if ``layer_types`` is missing.

    Raises:
        UserError: ``layer_types`` does not name a type (full or sliding attention) for each layer, or has sliding layers while ``window`` is 0.
    """
    types = read_layer_types(file, (FULL, SLIDING), default)
    file.require(
        window > 0 or SLIDING not in types,
        f"layer_types has {SLIDING}, but no window: set use_sliding_window to true and sliding_window to its size",
    )
    return tuple(window if kind == SLIDING else 0 for kind in types)


def read_layer_types(
    file: ConfigFile, known: Sequence[str], default: Callable[[int], str], key: str = "layer_types"
) -> list[str]:
    """Type of each layer, a list under ``key``.

    Args:
        known: layer types that the family supports.
        default: type of layer n if the list is missing.

    Raises:
        UserError: the list does not name a type in ``known`` for each layer.
    """
    num_layers = file.size("num_hidden_layers")
    types = file.values.get(key)
    if types is None:
        types = [default(layer) for layer in range(num_layers)]
    file.require(
        isinstance(types, list) and len(types) == num_layers and all(kind in known for kind in types),
        f"{key} should be a list of {num_layers} times {' or '.join(known)}, not {types!r:.80}",
    )
    return types
