"""Fingerprint: one digest of all that a model's answers depend on, in named parts, so that a difference can be named. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.base.option_fields import flag_name
from labinfer.base.plugins import PLUGINS, PROCESSOR
from labinfer.base.registry import REGISTRY
from labinfer.base.sampling_params import SamplingParams
from labinfer.weights.identity import Identity, combined_digest

if TYPE_CHECKING:
    from labinfer.comm.group.rank_group import RankGroup
    from labinfer.launch.layout.layout import Layout

ANSWER_OPTIONS = {
    "model": (
        "dtype",
        "quantization",
        "quantization_group_size",
        "max_model_len",
        "sliding_window",
        "reranker",
    ),
    "cache": ("kv_cache_dtype",),
    "scheduler": ("context_shift", "keep"),
}
"""Names of the engine options that affect answers, by section. The layout is not among them, as it changes no answer in
float32, and none at all with ``--reproducible``."""
RESOLVED = ("dtype", "quantization", "kv_cache_dtype")
"""Options in ``ANSWER_OPTIONS`` whose resolved values, as layers have them, are in a fingerprint rather than the values of the flags."""
DEFAULTS = "sampling defaults"
KERNELS, VERSION = "kernels", "LABInfer version"
SEPARATOR = "; "
"""Separator of the names in the part ``KERNELS``."""
PREFIX = "fp_"
DIGEST_LENGTH = 32
"""Length of a digest in hexadecimal digits."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
TEMPLATE_LABELS = ("chat_template.json", "--chat-template", "--response-template")
TOKENIZER_LABELS = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "--tokenizer")


class Fingerprint(msgspec.Struct, frozen=True, dict=True):
    """Model files, dtypes, kernels and settings on which the answers of a loaded model depend."""

    parts: dict[str, str]
    """Values by part, such as "model weights" (a digest) or "dtype" (a name)."""
    reproducible: bool
    """Whether equal fingerprints promise equal bits on every layout and in every batch (``--reproducible``)."""

    @cached_property
    def digest(self) -> str:
        """Digest of all parts, in the form of OpenAI's ``system_fingerprint``."""
        text = msgspec.json.encode((sorted(self.parts.items()), self.reproducible))
        return PREFIX + hashlib.sha256(text).hexdigest()[:DIGEST_LENGTH]

    def with_defaults(self, sampling: Mapping[str, Any]) -> Fingerprint:
        """Copy with the default sampling parameters of requests.

        Args:
            sampling: values by field of ``SamplingParams``; the others have their own defaults.
        """
        own, given = (msgspec.json.decode(msgspec.json.encode(values)) for values in (SamplingParams(), sampling))
        changed = {name: value for name, value in sorted(given.items()) if name != "speculate" and value != own[name]}
        text = ", ".join(f"{name} {value}" for name, value in changed.items()) or "LABInfer's"
        return msgspec.structs.replace(self, parts=self.parts | {DEFAULTS: text})

    def differences(self, now: Fingerprint) -> dict[str, tuple[str, str]]:
        """Parts that differ, each with its values in this fingerprint and in ``now``; the value of a missing part is "none"."""
        names = dict.fromkeys([*self.parts, *now.parts])
        values = {name: (self.parts.get(name, "none"), now.parts.get(name, "none")) for name in names}
        return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def take_fingerprint(
    group: RankGroup, options: EngineOptions, identity: Identity, layout: Layout | None, kernels: Iterable[str]
) -> Fingerprint:
    """Fingerprint of a loaded model, without sampling defaults; equal on all ranks that have a part of the model. Collective.

    Args:
        identity: identity of the model's files.
        layout: layout of the model; None on a spare rank, which gets a fingerprint without the parts of the layout.
        kernels: names of this rank's kernels, with their versions.
    """
    gathered = group.gather_bytes(msgspec.msgpack.encode(sorted(kernels)))
    names = {name for data in gathered.values() for name in msgspec.msgpack.decode(data, type=list[str])}
    reproducible = options.model.is_reproducible
    parts = _file_parts(identity, with_draft=not reproducible)
    if layout is not None:
        parts |= _layer_parts(layout)
        if not reproducible:
            parts["layout"] = _describe_layout(layout)
    chosen = {
        name: getattr(getattr(options, section), name) for section, names in ANSWER_OPTIONS.items() for name in names
    }
    settings = {flag_name(name): value for name, value in chosen.items() if name not in RESOLVED}
    parts["settings"] = ", ".join(f"{flag} {value}" for flag, value in settings.items())
    parts[KERNELS] = SEPARATOR.join(sorted(names))
    if plugins := _answering_plugins():
        parts["plugins"] = ", ".join(plugins)
    parts[VERSION] = labinfer.__version__
    return Fingerprint(parts, reproducible)


def file_part(label: str) -> str:
    """Part of the fingerprint to which a model file belongs.

    Args:
        label: label of the file in an ``Identity``.
    """
    if label.startswith("draft model "):
        return "draft model"
    if label.endswith(WEIGHT_SUFFIXES):
        return "model weights"
    if label.startswith(TEMPLATE_LABELS) or label.endswith(".jinja"):
        return "chat template"
    if label.startswith(TOKENIZER_LABELS) or label.endswith(".model"):
        return "tokenizer"
    return "model config"


def _file_parts(identity: Identity, with_draft: bool) -> dict[str, str]:
    """Digest of the files of each part. ``with_draft`` False leaves out a draft model, as drafts do not change reproducible tokens."""
    labels: dict[str, list[str]] = {}
    for label in identity:
        labels.setdefault(file_part(label), []).append(label)
    if not with_draft:
        labels.pop("draft model", None)
    return {part: combined_digest({label: identity[label] for label in own}) for part, own in sorted(labels.items())}


def _layer_parts(layout: Layout) -> dict[str, str]:
    """Dtypes, quantization and cut of experts of the layers, which do not depend on how the layers are split into stages."""
    stages = [layout.topology.stage_ranks(stage)[0] for stage in range(layout.topology.num_stages)]
    places = [layout.topology.place(rank) for rank in stages]
    values = {
        "dtype": [_name(layout.dtype(place)) for place in places],
        "weight quantization": [layout.quantization_name(place) for place in places],
        "KV cache dtype": [_name(layout.kv_dtype(place)) for place in places],
    }
    if any(layer.mlp.has_experts for layer in layout.config.layers):
        # Experts that are cut by columns are added in another order than whole ones.
        values["experts"] = list(layout.experts)
    return {part: _by_layer(layout.topology.layers, of_stage) for part, of_stage in values.items()}


def _by_layer(layers: Iterable[tuple[int, int]], values: list[str]) -> str:
    """Text of ``values``: one value if all stages have it, else a value for each range of layers, such as "layers 0-11 bfloat16, layers 12-23 float16".

    Args:
        layers: (begin, end) layer indices of each stage.
        values: value of each stage.
    """
    if len(set(values)) == 1:
        return values[0]
    spans = []
    for value, stages in groupby(zip(layers, values, strict=True), key=lambda stage: stage[1]):
        ranges = [layer_range for layer_range, _ in stages]
        spans.append(f"layers {ranges[0][0]}-{ranges[-1][1] - 1} {value}")
    return ", ".join(spans)


def _answering_plugins() -> list[str]:
    """Plugins that decide what layers compute or change logits; not plugins that only schedule, print or record."""
    changing = {entry.origin for entry in REGISTRY.plugged_in(PROCESSOR).values()}
    processors = {f"{source.name}@{source.digest}" for source in PLUGINS.loaded if source.name in changing}
    return sorted(processors | {*PLUGINS.computing_code()})


def _describe_layout(layout: Layout) -> str:
    stages = zip(layout.topology.layers, layout.topology.tp_sizes, strict=True)
    return ", ".join(f"layers {begin}-{end - 1} on {size} ranks" for (begin, end), size in stages)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
