"""CheckpointNames: mapping from the model's parameter names to a family's names in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

DRAFT_PARTS = ("enorm", "hnorm", "eh_proj")
"""Modules that only MTP layers as in DeepSeek's models have: two norms, and the projection of their concatenated outputs."""


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Differences between a family's tensor names and the module paths of the model, which are Llama's names."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Path components in the model → path components in the checkpoint, replaced anywhere in a name, such as ``{"self_attn.q_norm":
    "self_attn.query_layernorm", "model": "model.language_model"}``."""
    fused: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Projections whose rows the checkpoint stores one after another in one matrix → name of the matrix, such as ``{("gate_proj",
    "up_proj"): "gate_up_proj"}``. ``renamed`` is applied later."""
    ignored: tuple[str, ...] = ()
    """Name prefixes of tensors that are not loaded, such as ``model.visual.``."""
    roots: tuple[str, ...] = ()
    """Possible names of the first component ``model`` in checkpoints of this family, best first. The LM head is next to it: for
    ``language_model.model`` it is ``language_model.lm_head``."""
    root: str = "model"
    """First component of the checkpoint's tensor names, set by ``resolve``; empty if names begin with ``layers.`` or ``embed_tokens.``."""
    has_draft_layers: bool = False
    """Whether MTP layers may follow the model's own layers (``model.layers.N`` …). Like ``ignored`` tensors, they are not loaded."""

    def resolve(self, tensors: Collection[str]) -> CheckpointNames:
        """Copy whose ``root`` is that of a checkpoint with the tensor names ``tensors``.

        Checkpoints of base models, such as ``Qwen3Model``, have no first component ``model``.
        """
        for root in (*self.roots, "model"):
            if any(name.startswith(f"{root}.") for name in tensors):
                return self._rooted(root)
        without_model = tuple(part.removeprefix("model.") for part in self.ignored)
        for root in ("language_model", ""):
            embedding = f"{root}.embed_tokens.".removeprefix(".")
            if any(name.startswith(embedding) for name in tensors):
                return replace(self._rooted(root), ignored=(*self.ignored, *without_model))
        return self

    def spellings(self, name: str) -> set[str]:
        """Names that a path in the model may have in checkpoints of the family, over all roots."""
        return {self.stored(name), *(self._rooted(root).stored(name) for root in self.roots)}

    def with_mtp(self, num_layers: int) -> CheckpointNames:
        """Copy that maps the first MTP layer's names, so that this layer is loaded.

        Args:
            num_layers: number of the model's layers, without MTP layers.
        """
        if not self.has_draft_layers:
            return self  # MTP layers are already under mtp., whose unused tensors are not loaded
        first = f"model.layers.{num_layers}"
        parts = {
            "mtp.pre_fc_norm_embedding": f"{first}.enorm",
            "mtp.pre_fc_norm_hidden": f"{first}.hnorm",
            "mtp.fc": f"{first}.eh_proj",
            "mtp.norm": f"{first}.shared_head.norm",
            "mtp.layers.0": first,
        }
        return replace(self, renamed={**self.renamed, **parts})

    def _rooted(self, root: str) -> CheckpointNames:
        if root == "model":
            return replace(self, roots=())
        own = {"model": root}
        if root.endswith(".model"):
            own["lm_head"] = f"{root.removesuffix('model')}lm_head"
        return replace(self, renamed={**self.renamed, **own}, roots=(), root=root)

    def ignored_parts(self, num_layers: int, tensors: Collection[str]) -> tuple[str, ...]:
        """Name prefixes of tensors that are not loaded: ``ignored``, and MTP layers after the model's last layer.

        Args:
            num_layers: layers of the model, without MTP layers.
            tensors: names of the checkpoint's tensors. A layer with one of ``DRAFT_PARTS`` is an MTP layer.
        """
        if not self.has_draft_layers:
            return self.ignored
        root = re.escape(f"{self.root}.".lstrip("."))
        part = re.compile(rf"({root}layers\.(\d+)\.)(?:{'|'.join(DRAFT_PARTS)})\.")
        layers = {match[1] for match in map(part.match, tensors) if match and int(match[2]) >= num_layers}
        return (*self.ignored, *sorted(layers))

    def stored(self, name: str) -> str:
        """Checkpoint name of a path in the model."""
        if not self.renamed:
            return name
        longest_first = "|".join(re.escape(run) for run in sorted(self.renamed, key=len, reverse=True))
        stored = re.sub(rf"(?<![^.])(?:{longest_first})(?![^.])", lambda match: self.renamed[match[0]], name)
        return stored.removeprefix(".")  # an empty root leaves a leading dot
