"""A checkpoint's ``config.json``, read into frozen dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labinfer.errors import UserError
from labinfer.layers.attention import AttentionConfig
from labinfer.layers.layer_inputs import LayerInputsConfig
from labinfer.layers.mixer import MixerConfig, MLPConfig
from labinfer.layers.mlp import GatedMLPConfig
from labinfer.layers.rope import RopeConfig, check_rope
from labinfer.layers.router import RouterConfig
from labinfer.models.architectures import BASE_MODELS
from labinfer.pooling import PoolingConfig
from labinfer.weights.end_tokens import read_end_ids
from labinfer.weights.formats.format import Formats
from labinfer.weights.formats.registry import plain_formats
from labinfer.weights.model_files import config_path, read_config

MOST = {
    "layers": 1 << 10,
    "heads": 1 << 12,
    "experts": 1 << 12,
    "_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 24,
    "": 1 << 31,
}
"""Bounds of sizes, by what their keys contain: a config is worked through before anybody sees that there are no such weights."""
FULL, SLIDING = "full_attention", "sliding_attention"


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
    layer_inputs: LayerInputsConfig | None = None
    layer_scalar: bool = False
    """Whether each layer has a number that its hidden states are multiplied with at its end."""
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


class ConfigFile:
    """``config.json``, or what a GGUF file says in its place, with typed access; every error names the file and the key."""

    def __init__(self, directory: Path):
        self._model, self.path = directory, config_path(directory)
        self.values = read_config(directory)

    def with_defaults(self, **defaults: Any) -> ConfigFile:
        """The same file, with a family's own values for keys that it leaves out; a null stays."""
        return self.with_values(defaults | self.values)

    def with_aliases(self, **names: str) -> ConfigFile:
        """The same file with Transformers' other names of keys: where a config has both, the value of the alias holds, as there.

        Args:
            names: key by alias.
        """
        given = {key: self.values[alias] for alias, key in names.items() if self.values.get(alias) is not None}
        return self.with_values(self.values | given)

    def without(self, *keys: str) -> ConfigFile:
        """The same file as if it left these keys out."""
        return self.with_values({key: value for key, value in self.values.items() if key not in keys})

    def with_values(self, values: dict[str, Any]) -> ConfigFile:
        """Other values under the same path."""
        file = copy(self)
        file.values = values
        return file

    def text_part(self) -> ConfigFile:
        """The text model of one that takes pictures as well: ``text_config``, but for its nulls, over the file's own values.

        Raises:
            UserError: it is not an object.
        """
        text = {key: value for key, value in self.get("text_config", dict, {}).items() if value is not None}
        outer = ("architectures", "tie_word_embeddings")
        return self.with_values(self.values | text | {key: self.values[key] for key in outer if key in self.values})

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``, or ``default``; a boolean that is null is false.

        Raises:
            UserError: the key is missing and has no default, or its value has another type.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.path} has no {key!r}; is the checkpoint complete?")
            return False if kind is bool and key in self.values else default  # a null is false in Transformers
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.path}: {key} should be {kind.__name__}, not {_show(value)}")
        if kind is float and not abs(value) <= sys.float_info.max:
            raise UserError(f"{self.path}: {key} should be a finite number, not {_show(value)}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number that some model could have."""
        value = self.get(key, int, default)
        most = next(bound for part, bound in MOST.items() if part in key)
        if not 1 <= value <= most:
            raise UserError(f"{self.path}: {key} must be from 1 to {most}, not {_show(value)}")
        return value

    def require(self, holds: bool, complaint: str) -> None:
        """Refuse the checkpoint unless ``holds``."""
        if not holds:
            raise UserError(f"{self.path}: {complaint}")

    def end_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer; see ``read_end_ids``."""
        return read_end_ids(self._model, self.values)

    @property
    def architecture(self) -> str:
        """The class in ``MODULES`` that runs the model."""
        names = self.get("architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise UserError(f"{self.path}: architectures should name one class, not {_show(names)}")
        return BASE_MODELS.get(names[0], names[0])

    @property
    def is_base_model(self) -> bool:
        """Whether ``architectures`` names a class without an output head."""
        return self.get("architectures", list)[0] in BASE_MODELS


def _show(value: Any) -> str:
    """A value as an error has it."""
    return f"{value!r:.60}"


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
    file.require(isinstance(is_causal, bool), f"is_causal should be true or false, not {_show(is_causal)}")
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
        f"attention_chunk_size {_show(file.values.get('attention_chunk_size'))} is not supported: no attention is cut into chunks",
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
        f"sliding_window {_show(window)} is not supported for this architecture; --sliding-window gives every layer one",
    )
    types = file.values.get("layer_types")
    file.require(
        types is None or (isinstance(types, list) and set(map(str, types)) <= {*known}),
        f"layer_types {_show(types)} is not supported for this architecture; only {' and '.join(known)} are",
    )


def require_one_type(file: ConfigFile, window: int) -> None:
    """Refuse ``layer_types`` that name other layers than those with this window, 0 for none, in a family whose layers are all alike.

    Raises:
        UserError: ``layer_types`` is no list of one type, or not of this one.
    """
    types, expected = file.values.get("layer_types"), SLIDING if window else FULL
    file.require(
        types is None or (isinstance(types, list) and set(map(str, types)) <= {expected}),
        f"layer_types {_show(types)} is not supported: by its other keys all layers have {expected}",
    )


def read_mtp(file: ConfigFile, layer: LayerConfig, key: str, default: int = 0) -> LayerConfig | None:
    """``layer``, if the checkpoint has MTP layers.

    Args:
        key: names their number.
        default: their number where the config does not say.
    """
    return layer if file.get(key, int, default) > 0 else None


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
        "head_size": read_head_size(file),
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


def read_router(file: ConfigFile, num_experts: int, num_chosen: int, **fields: Any) -> RouterConfig:
    """A router over so many experts; ``fields`` are those that this family has otherwise.

    Raises:
        UserError: more experts are to be chosen than there are, or groups that are not equal.
    """
    router = RouterConfig(num_experts=num_experts, num_chosen=num_chosen, **fields)
    groups, chosen_groups = router.num_groups, router.num_chosen_groups
    file.require(
        num_experts % groups == 0 and chosen_groups <= groups,
        f"{num_experts} experts cannot be chosen from {chosen_groups} of {groups} equal groups",
    )
    file.require(
        num_chosen <= num_experts // groups * chosen_groups,
        f"{num_chosen} experts are to be chosen for each token, of {num_experts // groups * chosen_groups}",
    )
    return router


def read_head_size(file: ConfigFile) -> int:
    """``head_dim``, or the hidden size over the heads where it is not given."""
    return file.size("head_dim", file.size("hidden_size") // file.size("num_attention_heads"))


def read_max_position(file: ConfigFile) -> int:
    """Positions that the checkpoint was made for."""
    return file.size("max_position_embeddings", 2048)


def _read_context(file: ConfigFile, layers: Sequence[LayerConfig]) -> int:
    """Tokens of a context at most: the positions that the checkpoint was made for, times the factor of ``dynamic`` rope."""
    ropes = [rope for layer in layers if (rope := getattr(layer.mixer, "rope", None)) is not None and rope.dynamic_from]
    stretched = [rope.max_position * rope.parameters["factor"] for rope in ropes]
    return int(min(MOST[""], max(read_max_position(file), *stretched, 0)))


def read_rope(
    file: ConfigFile, layer_type: str = "", *, partial: bool = False, fixed_stretch: bool = False, **changes: Any
) -> RopeConfig:
    """A rotary table from either spelling: ``rope_parameters`` (Transformers 5) or ``rope_theta`` with ``rope_scaling``, which
    Transformers prefers where a config has both.

    Args:
        layer_type: layer type whose entry of ``rope_parameters`` is read, if it has one per type.
        partial: whether the family may rotate a part of each head.
        fixed_stretch: whether ``alpha`` makes ``dynamic`` rope a fixed stretch; other families do not read it.
        changes: fields of the result that this family has otherwise.

    Raises:
        UserError: a kind of scaling that is not offered, or a parameter that makes no sense.
    """
    given = file.values.get("rope_scaling") or file.values.get("rope_parameters") or {}
    is_typed = isinstance(given, dict) and isinstance(given.get(layer_type), dict)
    if is_typed:
        given = given[layer_type]
        file.require(
            given.get("truncate", True) is True,
            f"truncate {_show(given.get('truncate'))} of rope parameters by type of layers is not supported; Transformers ignores it",
        )
    file.require(isinstance(given, dict), f"rope parameters should be an object, not {given!r:.60}")
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    file.require(not nested, f"rope parameters for {', '.join(nested)} are not known in this family")
    parameters = dict(given)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = parameters["rope_type"] = "longrope" if kind == "su" else kind  # as early configs call it
    if not fixed_stretch:
        parameters.pop("alpha", None)
    if parameters.get("rope_theta") is None:
        theta = file.values.get("rope_theta")
        parameters["rope_theta"] = 10000.0 if theta is None else theta
    theta = parameters["rope_theta"]
    file.require(
        isinstance(theta, (int, float)) and 0 < theta <= sys.float_info.max,
        f"rope_theta should be above 0, not {_show(theta)}",
    )
    if not is_typed and file.values.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = file.size("original_max_position_embeddings")
    needs_length = (
        kind == "longrope"
        or (kind == "dynamic" and not parameters.get("alpha"))
        or (kind == "yarn" and parameters.get("original_max_position_embeddings") is None)
    )
    file.require(
        not needs_length or file.values.get("max_position_embeddings") is not None,
        f"rope of type {kind} needs max_position_embeddings, which is missing",
    )
    fraction = parameters.get("partial_rotary_factor")
    if fraction is None:
        fraction = file.get("partial_rotary_factor", float, 1.0)
    file.require(
        isinstance(fraction, (int, float)) and 0 < fraction <= 1,
        f"partial_rotary_factor should be above 0 and at most 1, not {fraction!r:.60}",
    )
    file.require(
        partial or fraction == 1 or kind == "proportional",
        f"partial_rotary_factor {fraction} is not supported for this architecture; only 1 is",
    )
    dim = read_head_size(file)
    if kind != "proportional":
        dim = int(dim * fraction)
    file.require(dim % 2 == 0, f"{dim} dimensions of a head are to be rotated, which is not an even number")
    rope = RopeConfig(**{"dim": dim, "parameters": parameters, "max_position": read_max_position(file)} | changes)
    check_rope(rope)  # before anything is loaded
    return rope


def require_ropes_by_type(file: ConfigFile) -> None:
    """Require one entry of ``rope_parameters`` per layer type, and refuse ``rope_scaling`` beside them: which entry it scales is ambiguous.

    Raises:
        UserError: an entry is missing, the config has both, or ``rope_scaling`` names its type as ``type`` alone, which Transformers
            does not read in these families.
    """
    given, scaling = file.values.get("rope_parameters"), file.values.get("rope_scaling")
    file.require(
        given is None
        or (isinstance(given, dict) and all(isinstance(given.get(kind), dict) for kind in (FULL, SLIDING))),
        f"rope_parameters should have an entry for {FULL} and for {SLIDING}, not {given!r:.80}",
    )
    file.require(
        not (given and scaling),
        "has both rope_parameters and rope_scaling; leave rope_scaling out",
    )
    file.require(
        not (isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling),
        "rope_scaling has a type but no rope_type, and Transformers ignores it in this family; name it rope_type, or leave it out",
    )


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
