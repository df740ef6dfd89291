"""ModelConfig: the shape of a model, and readers of the parts that families have in common."""

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
    """Shape of one decoder layer over the whole model."""

    mixer: MixerConfig
    mlp: MLPConfig
    cache_layer: int | None = None
    """Number of the earlier layer whose cache its mixer is given; None for one of its own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of the norms around mixers and MLPs and of the final one."""
    embedding_scale: float = 1.0
    """Factor on the embeddings of tokens, rounded to their dtype."""
    residual_scale: float = 1.0
    """Factor on what a mixer or an MLP adds to the hidden states."""
    logits_divisor: float = 1.0
    """Divisor of the hidden states in front of the output head."""
    logits_cap: float | None = None
    """Bound that logits approach by a tanh; None for none."""
    layer_inputs: Any = None
    """Per-layer embeddings of families that have them, such as ``PerLayerEmbeddingConfig``; None for none."""
    max_position: int
    tied_embeddings: bool
    notes: tuple[str, ...] = ()
    """Warnings for the user about the checkpoint, a line each."""
    has_head: bool = True
    """Whether the checkpoint has an output head. Without one, the embedding stands in its place and is never asked."""
    is_causal: bool = True
    """Whether a token attends to itself and earlier ones only; otherwise to all tokens of its prompt, which are run in one step."""
    pooling: PoolingConfig = PoolingConfig()
    """The vectors that the checkpoint's files say its embeddings are."""
    layers: tuple[LayerConfig, ...]
    mtp: LayerConfig | None = None
    """The decoder layer inside the first MTP layer, where the checkpoint has one and it is to draft."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    formats: Formats = field(default_factory=plain_formats)
    """Formats in which the checkpoint stores matrices."""

    @property
    def no_generation(self) -> str:
        """Reason why no tokens can be generated, as the predicate of a sentence about the model; empty where they can."""
        if not self.has_head:
            return "has no output head (lm_head)"
        return "" if self.is_causal else "attends to later tokens as well (its files say is_causal: false)"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dynamic_rope_from(self) -> int:
        """Tokens of a prompt from which its length decides how it is rotated; 0 where no layer has ``dynamic`` rope."""
        ropes = [rope for layer in self.layers if (rope := getattr(layer.mixer, "rope", None)) is not None]
        return min((rope.dynamic_from for rope in ropes if rope.dynamic_from), default=0)

    @property
    def last_cut(self) -> int:
        """The last layer with which a stage may begin: the first whose cache later ones read is on one stage with them."""
        return min(
            (layer.cache_layer for layer in self.layers if layer.cache_layer is not None), default=self.num_layers
        )

    @property
    def activation_size(self) -> int:
        """Numbers that a stage sends the next one for each token: hidden states, and what its layers' inputs are made of."""
        return self.hidden_size * (1 if self.layer_inputs is None else 2)


def read_model(file: ConfigFile, layers: Sequence[LayerConfig], **changes: Any) -> ModelConfig:
    """The fields that families have in common; ``changes`` override them.

    Raises:
        UserError: a key is missing or makes no sense.
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
    """``is_causal``, the mask of every layer.

    Raises:
        UserError: it is neither true nor false, or false in a model whose layers have other mixers than full attention.
    """
    is_causal = file.values.get("is_causal", True)
    file.require(isinstance(is_causal, bool), f"is_causal should be true or false, not {show_value(is_causal)}")
    is_full = all(isinstance(layer.mixer, AttentionConfig) and not layer.mixer.window for layer in layers)
    file.require(
        is_causal or is_full,
        "is_causal false is supported only where every layer has full attention, not with sliding windows, latent attention or "
        "linear attention",
    )
    return is_causal


def require_plain_layers(file: ConfigFile) -> None:
    """Refuse chunked attention, and layers with values of their own, that no family here computes.

    Raises:
        UserError: the context is to be cut into chunks, or ``per_layer_config`` is left over by the family that reads it.
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
    """Refuse a sliding window in a family whose layers see the whole context.

    Args:
        known: types of layers that the family has.

    Raises:
        UserError: ``sliding_window`` is set and not switched off, or ``layer_types`` has a type that is not ``known``.
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
    """Refuse ``layer_types`` that name other layers than those with this window, 0 for none, in a family whose layers are all alike.

    Raises:
        UserError: ``layer_types`` is no list of one type, or not of this one.
    """
    types, expected = file.values.get("layer_types"), SLIDING if window else FULL
    file.require(
        types is None or (isinstance(types, list) and set(map(str, types)) <= {expected}),
        f"layer_types {show_value(types)} is not supported: by its other keys all layers have {expected}",
    )


def read_attention(file: ConfigFile, **changes: Any) -> AttentionConfig:
    """Grouped-query attention as most families spell it; ``changes`` override its fields. Without a ``window`` among them the family
    has none, and configs that ask for one are refused.

    Raises:
        UserError: a key is missing or makes no sense.
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
    """The gated MLP as most families spell it.

    Args:
        key: names its columns.

    Raises:
        UserError: a key is missing or makes no sense.
    """
    file.require(
        file.get("hidden_act", str, "silu") == "silu",
        f"hidden_act {file.values.get('hidden_act')!r} is not supported; only silu is",
    )
    return GatedMLPConfig(intermediate_size=file.size(key), bias=file.get("mlp_bias", bool, False))


def _read_context(file: ConfigFile, layers: Sequence[LayerConfig]) -> int:
    """Tokens of a context at most: the positions that the checkpoint was made for, times the factor of ``dynamic`` rope."""
    ropes = [rope for layer in layers if (rope := getattr(layer.mixer, "rope", None)) is not None and rope.dynamic_from]
    stretched = [rope.max_position * rope.parameters["factor"] for rope in ropes]
    return int(min(MOST[""], max(file.max_position, *stretched, 0)))


def read_windows(file: ConfigFile, window: int, default: Callable[[int], str]) -> tuple[int, ...]:
    """The window of each layer, 0 for those that see everything.

    Args:
        window: of the layers that ``layer_types`` calls ``sliding_attention``.
        default: the type of layer n where ``layer_types`` is missing.

    Raises:
        UserError: ``layer_types`` does not name one of the two types for each layer, or there is no window.
    """
    types = read_layer_types(file, (FULL, SLIDING), default)
    file.require(
        window > 0 or SLIDING not in types,
        f"layer_types has {SLIDING}, but no window: set use_sliding_window to true and sliding_window to its size",
    )
    return tuple(window if kind == SLIDING else 0 for kind in types)


def read_layer_types(file: ConfigFile, known: Sequence[str], default: Callable[[int], str]) -> list[str]:
    """The type of each layer.

    Args:
        known: types that the family has.
        default: the type of layer n where ``layer_types`` is missing.

    Raises:
        UserError: ``layer_types`` does not name one of these for each layer.
    """
    num_layers = file.size("num_hidden_layers")
    types = file.values.get("layer_types")
    if types is None:
        types = [default(layer) for layer in range(num_layers)]
    file.require(
        isinstance(types, list) and len(types) == num_layers and all(kind in known for kind in types),
        f"layer_types should be a list of {num_layers} times {' or '.join(known)}, not {types!r:.80}",
    )
    return types
