"""GgufFamily: what a model architecture calls its tensors and sizes in GGUF files, and how its tensors differ from Hugging Face
checkpoints. Does not import torch.

Source: ggml-org/llama.cpp, gguf-py/gguf/constants.py (names) and conversion/ (changes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import OUTER

Order = Literal["rotated pairs", "tiled heads", "tiled values", "tiled values behind keys"]
"""Row orders of GGUF files, see ``orders.py``. In the order of the names: Llama's query and key heads; Gated DeltaNet's value heads
of one row each; its value heads of several rows; its value heads after queries and keys."""
Join = Literal["interleaved", "heads"]
"""How to make one tensor from two that a GGUF file stores. "interleaved": columns of the two alternate (gate and up of gpt-oss).
"heads": each head has its key rows from the first and then its value rows from the second (DeepSeek's ``kv_b_proj``). See ``joins.py``."""
Change = Literal["less one", "log of negated"]
"""Functions that are applied to a tensor's values on loading: ``x - 1``, and ``log(-x)``."""


@dataclass(frozen=True)
class Halves:
    """Two tensors that a GGUF file may store as one, whose first and second half alternate. The names are those of GGUF files."""

    fused: str
    first: str
    second: str
    count: str = ""
    """Key of ``config.json`` with the number of pieces that are halved; empty for the first dimension of the tensor (experts)."""


FUSED_EXPERTS = Halves("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps")
"""Gate and up projections of experts, fused by ``--fuse-gate-up-exps`` of the converter."""


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """Model architecture in GGUF files: names of its modules and metadata keys, and differences from Hugging Face
    checkpoints."""

    architecture: str
    """Class name of the model in ``config.json``."""
    parts: Mapping[str, str]
    """Modules of a layer: name in checkpoints → name in GGUF files. An entry with a suffix other than ``.weight`` and ``.bias`` is the
    whole name of a tensor."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    """Modules outside the layers: name in checkpoints → name in GGUF files."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Integer keys of ``config.json``, beyond those of all families → metadata keys without the architecture prefix."""
    sizes_by_layer: tuple[str, ...] = ()
    """Keys of ``config.json`` whose metadata may have a value per layer in this architecture, and one value in others. ``read_config``
    reads these keys."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``config.json`` whose values llama.cpp hard-codes → the values."""
    orders: Mapping[str, Order] = field(default_factory=dict)
    """Modules whose rows are in another order in GGUF files → name of the order."""
    column_orders: Mapping[str, Order] = field(default_factory=dict)
    """Modules whose columns are in another order in GGUF files → name of the order."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Modules whose values are changed on loading → name of the change."""
    halves: tuple[Halves, ...] = (FUSED_EXPERTS,)
    """Pairs of modules of a layer that GGUF files may store as one."""
    joins: Mapping[str, tuple[Join, str, str]] = field(default_factory=dict)
    """Tensors of a layer that GGUF files store as two tensors each → (``Join``, name of the first, name of the second). The two names are
    keys of ``parts`` with a suffix such as ``.weight``."""
    read_config: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] | None = None
    """Returns further keys of ``config.json``, given the GGUF file and the keys that all families have."""

    @property
    def has_draft_layers(self) -> bool:
        """Whether MTP layers have the names of the model's layers (DeepSeek's form of MTP)."""
        return "eh_proj" in self.parts

    def name(self, stored: str, num_layers: int) -> str:
        """Hugging Face name of a tensor, such as ``model.layers.0.mlp.up_proj.weight`` for ``blk.0.ffn_up.weight``.

        MTP layers, which follow the model's own layers, get the prefix ``mtp`` unless the family has names for them. Unknown names are
        unchanged.
        """
        match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", stored)
        if match is not None and int(match[1]) >= num_layers and not self.has_draft_layers:
            return f"mtp.{stored}"
        prefix, table, rest = (f"model.layers.{match[1]}.", self.parts, match[2]) if match else ("", self.outer, stored)
        module, _, suffix = rest.rpartition(".")
        for name, other in table.items():
            if rest == other:
                return f"{prefix}{name}"
            if module == other and suffix in ("weight", "bias"):
                return f"{prefix}{name}.{suffix}"
        return stored
