"""HostCosts: measured times and memory of a model on one kind of host."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

import msgspec

from labinfer.base.errors import UserError
from labinfer.planner.overheads import Overheads
from labinfer.planner.step_shape import StepShape, tokens_seen

LEAST_FRACTION = 0.01
"""Smallest plausible time, as a fraction of the longest time at a smaller size. It is low because times measured on heavily
oversubscribed CPUs are noisy: a step may measure up to 50 times faster than a smaller step."""
MIXER_SUMS = 1
"""Number of all-reduces over the tensor-parallel ranks in the mixer of a layer (attention or recurrent). The number in the MLP
varies."""


class Points(msgspec.Struct, frozen=True):
    """Measured seconds by size, with linear interpolation.

    If the implementation of a function changes at a size, two neighboring points mark the jump in time.
    """

    sizes: list[float]
    """Sizes of the measured points, ascending."""
    seconds: list[float]

    def at(self, size: float) -> float:
        """Seconds at ``size``: constant below the first point, the last slope (not negative) beyond the last point, 0 without points."""
        sizes, seconds = self.sizes, self.seconds
        if not sizes:
            return 0.0
        if size <= sizes[0]:
            return seconds[0]
        right = min(bisect.bisect_left(sizes, size), len(sizes) - 1)
        if right == 0:
            return seconds[0]
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        if size > sizes[right]:  # measurement noise must not make a larger size faster
            return seconds[right] + max(0.0, slope) * (size - sizes[right])
        return seconds[right - 1] + slope * (size - sizes[right - 1])

    def check_possible(self, name: str) -> None:
        """Check that every time is positive and not far below the times at smaller sizes.

        Raises:
            UserError: a time is implausible.
        """
        most = 0.0
        for size, seconds in zip(self.sizes, self.seconds, strict=True):
            if seconds <= LEAST_FRACTION * most or seconds <= 0:
                raise UserError(
                    f"{name} has {seconds:g} s at {size:g}, but {most:g} s at a smaller size; measure again"
                )
            most = max(most, seconds)

    def check(self, name: str) -> None:
        """Check the points, called ``name`` in errors.

        Raises:
            UserError: sizes and seconds do not match, sizes do not ascend, or a number is negative or not finite.
        """
        if len(self.sizes) != len(self.seconds):
            raise UserError(f"{name} has {len(self.sizes)} sizes but {len(self.seconds)} times; give one time per size")
        if any(left >= right for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise UserError(f"sizes of {name} do not ascend; give each once, the smallest first")
        for number in (*self.sizes, *self.seconds):
            _check_number(number, name)


class LayerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one layer of a kind, a key of ``HostCosts.layer_kinds``."""

    linear: Points
    """Seconds of the matrix products, those of experts included, by number of rows (tokens)."""
    small: Points
    """Seconds of everything else that depends only on the number of rows: norms, activation, rope."""
    decode: tuple[float, float, float]
    """Coefficients a0, a1, a2 of the seconds of decode attention: a0 + a1 * sequences + a2 * context tokens of all sequences."""
    chunk: tuple[float, float, float]
    """Coefficients b0, b1, b2 of the seconds in which a prefill chunk of q tokens attends to itself and to ``before`` earlier
    tokens: b0 + b1 * q + b2 * q * (before + q / 2)."""
    window: int = 0
    """Sliding window in tokens, the attending token included; 0 for full attention."""
    num_sums: int = MIXER_SUMS + 1
    """Number of all-reduces over the tensor-parallel ranks in a layer."""

    def seconds(self, shape: StepShape) -> float:
        """Seconds of this layer in a step, without all-reduces."""
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
        """Part of ``seconds(shape)`` in which prefill chunks attend to earlier tokens, which are not in the chunk."""
        window = self.window
        pairs = [
            tokens_seen(tokens, before, window) - tokens_seen(tokens, 0, window) for tokens, before in shape.chunks
        ]
        return self.chunk[2] * sum(pairs)

    def check(self, name: str) -> None:
        """Check the costs of the layer kind ``name``.

        Raises:
            UserError: a number is negative or not finite, points are malformed, or ``linear`` has no points.
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
    """Bytes per rank of a draft model and of an MTP layer, in addition to the target model; 0 for the one that is not in use."""

    first: int = 0
    """Bytes of the weights and captured steps of the draft model, which is on rank 0 (in the first stage)."""
    first_kv: int = 0
    """Bytes of the draft model's KV cache per token."""
    first_state: int = 0
    """Bytes of the draft model's recurrent state per sequence."""
    last: int = 0
    """Bytes of the MTP layer's weights without its embedding. The MTP layer is on the last stage."""
    last_kv: int = 0
    """Bytes of the MTP layer's KV cache per token."""


class MeanBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Mean bytes per tensor-parallel rank, rounded up, for ranks that share a memory; for the fields see ``HostCosts``."""

    layer_bytes: dict[str, int]
    kv_bytes: dict[str, int]
    state_bytes: dict[str, int]
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one stage of a model on one kind of host: ``tp_size`` ranks, in one dtype and quantization.

    Seconds were measured on the slowest rank while all ranks of the machine were busy. Bytes are the maximum over the ranks.
    """

    name: str
    """Display name of the kind of host."""
    hardware: str = ""
    """Display text: processor or device, and threads."""
    model: str
    """Digest of the model's shapes; equal for all hosts of a cluster."""
    dtype: str
    quantization: str = "none"
    tp_size: int = 1
    memory: int
    """Free bytes per rank before loading, less bytes for captured steps, swap space and memory used at startup. What remains is for
    weights and KV cache."""
    sharing: int = 1
    """Number of the machine's ranks that divide one memory, with ``memory`` bytes for each of them; 1 if each rank has a memory of
    its own."""
    layers: list[str]
    """Kind of each layer of the model, in order."""
    last_cut: int | None = None
    """Last layer at which a stage may begin; None for no limit."""
    layer_kinds: dict[str, LayerCosts]
    layer_bytes: dict[str, int]
    """Bytes of a layer's weights, by kind of layer."""
    kv_bytes: dict[str, int]
    """Bytes of a layer's KV cache per token, by kind of layer."""
    state_bytes: dict[str, int] = {}
    """Bytes of a layer's recurrent state per sequence, by kind of layer; 0 for a kind that is missing."""
    hidden_bytes: int
    """Bytes of a token's hidden state, as sent between stages and as summed by an all-reduce over tensor-parallel ranks."""
    embedded_bytes: int = 0
    """Bytes per token sent between stages in addition to ``hidden_bytes``: Gemma's per-layer embeddings."""
    embedding_bytes: int
    head_bytes: int
    """Bytes of the LM head's weights, on the last stage."""
    shared_bytes: int = 0
    """Bytes of the LM head that are also the embedding (tied weights), a part of ``head_bytes``. A rank with the first and the last
    stage stores them once."""
    head: Points
    """Seconds of logits and sampling, by number of sampled rows."""
    embed: Points
    """Seconds of the embedding, by rows (tokens)."""
    fixed: float
    """Constant seconds of every step on any stage."""
    all_reduce: Points = Points([], [])
    """Seconds of an all-reduce over the tensor-parallel ranks, by bytes of the tensor; no points if ``linear`` includes the
    all-reduce."""
    skipped: Points = Points([], [])
    """Seconds that the model's last layer saves in a step with prefill chunks, by number of rows that are not sampled. For such
    rows it computes only keys and values."""
    mean: MeanBytes | None = None
    """Mean bytes over the ranks; None if all have equal shards or the mean is unknown."""
    overheads: Overheads = Overheads()
    drafting: DraftBytes = DraftBytes()
    measured: bool = True
    """Whether all costs but ``overheads`` were measured rather than estimated."""

    @property
    def on_average(self) -> HostCosts:
        """Copy of the costs with mean bytes per rank in place of maximum bytes."""
        return (
            self if self.mean is None else msgspec.structs.replace(self, mean=None, **msgspec.structs.asdict(self.mean))
        )

    def step_seconds(self, shape: StepShape, layers: Mapping[str, int], *, is_first: bool, is_last: bool) -> float:
        """Seconds of a step on this stage.

        Args:
            layers: number of layers by kind; see ``count_layers``.
        """
        total = self.fixed + sum(count * self.layer_seconds(kind, shape) for kind, count in layers.items())
        if is_first:
            total += self.embed.at(shape.rows)
        return total + self.last_seconds(shape) if is_last else total

    def stage_seconds(self, shape: StepShape, layers: Mapping[str, int], *, is_first: bool, is_last: bool) -> float:
        """Seconds for which a step occupies a stage: the step itself, the gap between steps, and on the first stage (with rank 0) the
        scheduling. For the arguments see ``step_seconds``."""
        total = self.step_seconds(shape, layers, is_first=is_first, is_last=is_last) + self.between_seconds(shape)
        return total + self.overheads.plan_seconds(shape.num_sequences) if is_first else total

    def between_seconds(self, shape: StepShape) -> float:
        """Seconds between two steps of a stage, plus the seconds to prepare the inputs of the second and further sequences."""
        return self.overheads.lead + self.overheads.prepare_seconds(shape.num_sequences)

    def head_seconds(self, shape: StepShape) -> float:
        """Seconds of LM head and sampling."""
        return self.head.at(shape.num_samples) if shape.num_samples else 0.0

    def last_seconds(self, shape: StepShape) -> float:
        """Seconds of a step that only the last stage has: the LM head, less the work that the last layer skips (see
        ``skipped``)."""
        rows = shape.rows - shape.num_samples
        if not (self.skipped.sizes and shape.chunks and rows > 0):
            return self.head_seconds(shape)
        skipped = self.skipped.at(rows) + self.layer_kinds[self.layers[-1]].context_seconds(shape)
        return self.head_seconds(shape) - skipped

    def layer_seconds(self, kind: str, shape: StepShape) -> float:
        """Seconds of one layer, all-reduces included."""
        costs = self.layer_kinds[kind]
        sums = costs.num_sums * self.all_reduce.at(shape.rows * self.hidden_bytes) if self.tp_size > 1 else 0.0
        return costs.seconds(shape) + sums

    def count_layers(self, begin: int, end: int) -> dict[str, int]:
        """Number of layers of each kind among layers ``begin`` to ``end`` (exclusive)."""
        counts: dict[str, int] = {}
        for kind in self.layers[begin:end]:
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def sent_bytes(self, rows: float, receiver: HostCosts) -> float:
        """Bytes of activations that a stage sends to the next for ``rows`` tokens: one copy for each tensor-parallel rank of the
        ``receiver`` stage."""
        return rows * (self.hidden_bytes + self.embedded_bytes) * receiver.tp_size

    def weight_bytes(self, layers: Mapping[str, float], *, is_first: bool, is_last: bool) -> float:
        """Bytes of weights on each rank of a stage; for ``layers`` see ``step_seconds``."""
        total = sum(count * self.layer_bytes[kind] for kind, count in layers.items())
        total += (self.embedding_bytes + self.drafting.first) * is_first
        total += (self.head_bytes + self.drafting.last) * is_last
        if self.drafting.last and is_last and not (is_first or self.shared_bytes):
            total += self.embedding_bytes  # the MTP layer embeds tokens, and the rank has no table yet
        return total - self.shared_bytes * (is_first and is_last)

    def check_measured(self) -> None:
        """Check costs that were measured, now or earlier (read from a file).

        Raises:
            UserError: a cost is missing or implausible.
        """
        self.check()
        owner = f"costs of {self.name or 'this host'}"
        for kind, costs in self.layer_kinds.items():
            costs.linear.check_possible(f"linear of layers of kind {kind!r} in the {owner}")
        self.head.check_possible(f"head in the {owner}")
        self.embed.check_possible(f"embed in the {owner}")

    def check(self) -> None:
        """Check costs read from a file.

        Raises:
            UserError: a cost is negative, missing, or not finite.
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
