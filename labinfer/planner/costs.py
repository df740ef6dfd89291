"""HostCosts: seconds and bytes that a model takes on one kind of host, as they were measured there."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

import msgspec

from labinfer.base.errors import UserError
from labinfer.planner.overheads import Overheads
from labinfer.planner.step_shape import StepShape, tokens_seen

LEAST_FRACTION = 0.01
"""Part of the seconds of fewer rows that more rows take at least. On machines with ten times as much work as cores, a step of a
small model was seen to take a fiftieth of the time of a smaller one."""
MIXER_SUMS = 1
"""Sums over the tensor-parallel ranks in a layer's mixer; those of its MLP differ."""


class Points(msgspec.Struct, frozen=True):
    """Seconds measured at some sizes, with straight lines between.

    Where another implementation takes over there is a point on either side, so that the line between them is the jump.
    """

    sizes: list[float]
    """Ascending."""
    seconds: list[float]

    def at(self, size: float) -> float:
        """Seconds at a size: those of the first point below it, the last slope beyond the last one; 0 without points."""
        sizes, seconds = self.sizes, self.seconds
        if not sizes:
            return 0.0
        if size <= sizes[0]:
            return seconds[0]
        right = min(bisect.bisect_left(sizes, size), len(sizes) - 1)
        if right == 0:
            return seconds[0]
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        if size > sizes[right]:  # noise must not make more work take less
            return seconds[right] + max(0.0, slope) * (size - sizes[right])
        return seconds[right - 1] + slope * (size - sizes[right - 1])

    def check_possible(self, name: str) -> None:
        """Check seconds of a computation, which takes some time at every size, and hardly less at larger ones.

        Raises:
            UserError: no machine takes these times.
        """
        most = 0.0
        for size, seconds in zip(self.sizes, self.seconds, strict=True):
            if seconds <= LEAST_FRACTION * most or seconds <= 0:
                raise UserError(f"{name} has {seconds:g} s at {size:g}, and {most:g} s at fewer; measure again")
            most = max(most, seconds)

    def check(self, name: str) -> None:
        """Raises:
        UserError: sizes and seconds do not match, sizes do not ascend, or a number is negative or not finite.
        """
        if len(self.sizes) != len(self.seconds):
            raise UserError(
                f"{name} has {len(self.sizes)} sizes for {len(self.seconds)} times; give a time for each size"
            )
        if any(left >= right for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise UserError(f"sizes of {name} do not ascend; give each once, the smallest first")
        for number in (*self.sizes, *self.seconds):
            _check_number(number, name)


class LayerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one layer of a kind; see ``HostCosts.layer_kinds``."""

    linear: Points
    """Products with its matrices, experts included, by rows."""
    small: Points
    """Everything else that depends on rows alone: norms, activation, rotation."""
    decode: tuple[float, float, float]
    """Attention of decodes: a0 + a1 * sequences + a2 * tokens that they see."""
    chunk: tuple[float, float, float]
    """Attention of a chunk of q tokens with some before it: b0 + b1 * q + b2 * q * (before + q / 2)."""
    window: int = 0
    """Tokens that a token sees at most, itself included; 0 for all."""
    num_sums: int = MIXER_SUMS + 1
    """Sums over tensor-parallel ranks."""

    def seconds(self, shape: StepShape) -> float:
        """Seconds of a step, without sums over tensor-parallel ranks."""
        rows = shape.rows
        total = self.linear.at(rows) + self.small.at(rows) if rows else 0.0
        if shape.num_decodes:
            a0, a1, a2 = self.decode
            total += a0 + a1 * shape.num_decodes + a2 * shape.seen_by_decodes(self.window)
        b0, b1, b2 = self.chunk
        for tokens, before in shape.chunks:
            total += b0 + b1 * tokens + b2 * tokens_seen(tokens, before, self.window)
        return total

    def context_seconds(self, shape: StepShape) -> float:
        """The part of them in which chunks see what is before them."""
        window = self.window
        pairs = [
            tokens_seen(tokens, before, window) - tokens_seen(tokens, 0, window) for tokens, before in shape.chunks
        ]
        return self.chunk[2] * sum(pairs)

    def check(self, name: str) -> None:
        """Raises:
        UserError: as ``Points.check``.
        """
        self.linear.check(f"linear of {name}")
        self.small.check(f"small of {name}")
        if not self.linear.sizes:
            raise UserError(f"linear of {name} has no points; give seconds for at least one number of rows")
        _check_number(self.window, f"window of {name}")
        _check_number(self.num_sums, f"num_sums of {name}")
        for number in self.decode:
            _check_number(number, f"decode of {name}")
        for number in self.chunk:
            _check_number(number, f"chunk of {name}")


class DraftBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on a rank of what drafts with weights, beside its share of the model; none of a draft model that is not there."""

    first: int = 0
    """Weights and captured steps of a draft model, which rank 0 holds on the first stage."""
    first_kv: int = 0
    """KV cache of a token in it."""
    first_state: int = 0
    """State of a sequence in it."""
    last: int = 0
    """Weights of an MTP layer, on the last stage, without the embedding."""
    last_kv: int = 0
    """KV cache of a token in it."""


class MeanBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of tensor-parallel ranks on average, rounded up, which in one memory count together; for the fields see ``HostCosts``."""

    layer_bytes: dict[str, int]
    kv_bytes: dict[str, int]
    state_bytes: dict[str, int]
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one stage of a model on one kind of host: tp_size ranks, in one dtype and quantization.

    Seconds are those of the slowest of these ranks, with all ranks of the machine at work; bytes are those of the rank that
    has the most.
    """

    name: str
    """Name of the kind of host, for people."""
    hardware: str = ""
    """Description of processor or device and threads, for people."""
    model: str
    """Digest of the model's shapes; hosts can only work together on the same."""
    dtype: str
    quantization: str = "none"
    tp_size: int = 1
    memory: int
    """Bytes that are free for each rank before it loads anything, less what it takes beside weights and cache: for captured steps, for
    sequences that are swapped out, and to start."""
    sharing: int = 1
    """Ranks of the machine whose ``memory`` are parts of the same; 1 where each has its own."""
    layers: list[str]
    """Kind of each layer of the whole model, in order."""
    last_cut: int | None = None
    """The last layer with which a stage may begin; None for any."""
    layer_kinds: dict[str, LayerCosts]
    layer_bytes: dict[str, int]
    """Weights of a layer of each kind."""
    kv_bytes: dict[str, int]
    """KV cache of a token in a layer of each kind."""
    state_bytes: dict[str, int] = {}
    """State of a sequence in a layer of each kind; nothing for those that are left out."""
    hidden_bytes: int
    """Activations of a token, as they travel between stages and are summed over tensor-parallel ranks."""
    embedded_bytes: int = 0
    """Bytes of a token that travel between stages beside these."""
    embedding_bytes: int
    head_bytes: int
    """Weights of the head, on the last stage."""
    shared_bytes: int = 0
    """Part of them that a rank with both ends of the model holds as its embedding."""
    head: Points
    """Logits and sampling, by sampled rows."""
    embed: Points
    """The embedding, by rows."""
    fixed: float
    """Seconds of every step, however small, on any stage."""
    all_reduce: Points = Points([], [])
    """A sum over the tensor-parallel ranks, by bytes; no points where ``linear`` has it."""
    skipped: Points = Points([], [])
    """Seconds that the model's last layer saves in a step with chunks, by rows of which no token is sampled: it computes them no
    further than their keys and values."""
    mean: MeanBytes | None = None
    """None where ranks have equal parts, or theirs are not known."""
    overheads: Overheads = Overheads()
    drafting: DraftBytes = DraftBytes()
    measured: bool = True
    """Whether all of this was measured, not estimated; of the overheads it says nothing."""

    @property
    def on_average(self) -> HostCosts:
        """The same with the bytes of a rank on average."""
        return (
            self if self.mean is None else msgspec.structs.replace(self, mean=None, **msgspec.structs.asdict(self.mean))
        )

    def step_seconds(self, shape: StepShape, layers: Mapping[str, int], *, is_first: bool, is_last: bool) -> float:
        """Seconds of a step.

        Args:
            layers: number of layers of each kind; see ``count_layers``.
        """
        total = self.fixed + sum(count * self.layer_seconds(kind, shape) for kind, count in layers.items())
        if is_first:
            total += self.embed.at(shape.rows)
        return total + self.last_seconds(shape) if is_last else total

    def stage_seconds(self, shape: StepShape, layers: Mapping[str, int], *, is_first: bool, is_last: bool) -> float:
        """Seconds for which a step keeps a stage: the step, and what lies between steps; on the first stage, where rank 0 is, also its
        scheduling. For the arguments see ``step_seconds``."""
        total = self.step_seconds(shape, layers, is_first=is_first, is_last=is_last) + self.between_seconds(shape)
        return total + self.overheads.plan_seconds(shape.num_sequences) if is_first else total

    def between_seconds(self, shape: StepShape) -> float:
        """Seconds from one step to the next, and of inputs beyond those of one sequence."""
        return self.overheads.lead + self.overheads.prepare_seconds(shape.num_sequences)

    def head_seconds(self, shape: StepShape) -> float:
        """Seconds of logits and sampling."""
        return self.head.at(shape.num_samples) if shape.num_samples else 0.0

    def last_seconds(self, shape: StepShape) -> float:
        """Seconds by which a step takes longer on the last stage: its head, less what its last layer need not compute."""
        rows = shape.rows - shape.num_samples
        if not (self.skipped.sizes and shape.chunks and rows > 0):
            return self.head_seconds(shape)
        skipped = self.skipped.at(rows) + self.layer_kinds[self.layers[-1]].context_seconds(shape)
        return self.head_seconds(shape) - skipped

    def layer_seconds(self, kind: str, shape: StepShape) -> float:
        """Seconds of one layer, sums over tensor-parallel ranks included."""
        costs = self.layer_kinds[kind]
        sums = costs.num_sums * self.all_reduce.at(shape.rows * self.hidden_bytes) if self.tp_size > 1 else 0.0
        return costs.seconds(shape) + sums

    def count_layers(self, begin: int, end: int) -> dict[str, int]:
        """Layers of each kind among those from ``begin`` up to before ``end``."""
        counts: dict[str, int] = {}
        for kind in self.layers[begin:end]:
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def sent_bytes(self, rows: float, receiver: HostCosts) -> float:
        """Bytes of so many tokens' activations on their way to the next stage, each of whose ranks is sent all of them."""
        return rows * (self.hidden_bytes + self.embedded_bytes) * receiver.tp_size

    def weight_bytes(self, layers: Mapping[str, float], *, is_first: bool, is_last: bool) -> float:
        """Bytes of a stage's weights on a rank; for ``layers`` see ``step_seconds``."""
        total = sum(count * self.layer_bytes[kind] for kind, count in layers.items())
        total += (self.embedding_bytes + self.drafting.first) * is_first
        total += (self.head_bytes + self.drafting.last) * is_last
        if self.drafting.last and is_last and not (is_first or self.shared_bytes):
            total += self.embedding_bytes  # of the tokens that the MTP layer goes on from, which no head of its own has
        return total - self.shared_bytes * (is_first and is_last)

    def check_measured(self) -> None:
        """Check what was measured, or comes from a file of an earlier measurement.

        Raises:
            UserError: a cost cannot be.
        """
        self.check()
        owner = f"costs of {self.name or 'this host'}"
        for kind, costs in self.layer_kinds.items():
            costs.linear.check_possible(f"linear of layers of kind {kind!r} in the {owner}")
        self.head.check_possible(f"head in the {owner}")
        self.embed.check_possible(f"embed in the {owner}")

    def check(self) -> None:
        """Check what came from a file.

        Raises:
            UserError: a cost is negative, absent, or no number.
        """
        owner = f"costs of {self.name or 'a host'}"
        if not self.layers:
            raise UserError(f"{owner} list no layers; give the kind of each layer of the model")
        for kind in dict.fromkeys(self.layers):
            for field in ("layer_kinds", "layer_bytes", "kv_bytes"):
                if kind not in getattr(self, field):
                    raise UserError(f"{owner} have no {field} for layers of kind {kind!r}; probe the host again")
        for kind, costs in self.layer_kinds.items():
            costs.check(f"layers of kind {kind!r} in the {owner}")
        for field in ("head", "embed", "all_reduce", "skipped"):
            points = getattr(self, field)
            points.check(f"{field} in the {owner}")
            if not points.sizes and field in ("head", "embed"):
                raise UserError(f"{field} in the {owner} has no points; give seconds for at least one number of rows")
        numbers = {
            "memory": self.memory,
            "last_cut": self.last_cut or 0,
            "hidden_bytes": self.hidden_bytes,
            "embedded_bytes": self.embedded_bytes,
            "embedding_bytes": self.embedding_bytes,
            "head_bytes": self.head_bytes,
            "shared_bytes": self.shared_bytes,
            "fixed": self.fixed,
        }
        for field in ("layer_bytes", "kv_bytes", "state_bytes"):
            numbers |= {f"{field} of {kind!r}": number for kind, number in getattr(self, field).items()}
        for name, part in (("overheads", self.overheads), ("drafting", self.drafting)):
            numbers |= {f"{field} of the {name}": number for field, number in msgspec.structs.asdict(part).items()}
        for field, number in numbers.items():
            _check_number(number, f"{field} in the {owner}")
        if self.tp_size < 1:
            raise UserError(f"tp_size in the {owner} is {self.tp_size}; give at least 1")
        if self.sharing < 1:
            raise UserError(f"sharing in the {owner} is {self.sharing}; give at least 1")
        if self.mean is not None:
            self.on_average.check()


def _check_number(number: float, name: str) -> None:
    if not math.isfinite(number) or number < 0:
        raise UserError(f"{name} has {number:g}; give numbers of at least 0")
