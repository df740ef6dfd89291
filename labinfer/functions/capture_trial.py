"""``CaptureCase``: trial of a graph capture, by a small decode step that is captured and replayed with longer contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from labinfer.base.plugins import describe_error
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads, QKVHeads
from labinfer.functions.calls import CallSetting
from labinfer.functions.functions import Functions
from labinfer.functions.graph import Capture, for_dry_run
from labinfer.functions.trial import Finding, TrialSetting, Verdict, dtype_name
from labinfer.functions.trial_results import dtype_tolerance

CONTEXTS = (17, 5, 33)
"""Context lengths of the captured step."""
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
HIDDEN, COLUMNS = 48, 40


class DecodeStep:
    """A small decode step (norm, products, attention and MLP) with inputs in memory that the next step overwrites.

    Args:
        functions: functions of the step.
        setting: device, dtype and cache layout.
    """

    def __init__(self, functions: Functions, setting: CallSetting):
        self._functions, self._matrices = functions, functions.matrices["layer"]
        own = TrialSetting(**vars(setting))
        self._own, size = own, (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        shapes = ((size, HIDDEN), (HIDDEN, HEADS * HEAD_SIZE), (2 * COLUMNS, HIDDEN), (HIDDEN, COLUMNS))
        self._packed = [self._matrices.pack_weight(own.random(*shape) / 8) for shape in shapes]
        self._norm_D = own.random(HIDDEN)
        self._cache = own.empty_cache(sum(own.blocks_for(n + 1) for n in CONTEXTS), KV_HEADS, HEAD_SIZE)
        self._hidden_TD = own.random(len(CONTEXTS), HIDDEN)
        lengths, blocks = list(CONTEXTS), iter(range(len(self._cache.k)))
        tables = [[next(blocks) for _ in range(own.blocks_for(length + 1))] for length in lengths]
        self._tables = tables
        self._angles = (own.random(len(CONTEXTS), HEAD_SIZE), own.random(len(CONTEXTS), HEAD_SIZE))
        self._heads = AttentionHeads(torch.arange(0, HEADS + 1, HEADS // KV_HEADS), HEAD_SIZE**-0.5)
        self.batch = AttentionBatch.build(list(range(len(lengths) + 1)), lengths, tables, own.device)
        self._slots_T = torch.tensor(self._slots(lengths), device=own.device)

    def _slots(self, lengths: list[int]) -> list[int]:
        pairs = zip(self._tables, lengths, strict=True)
        return [self._own.slot(table, length - 1) for table, length in pairs]

    def run(self, batch: AttentionBatch) -> torch.Tensor:
        """Hidden states of the step, (T, D)."""
        functions, linear = self._functions, self._matrices.linear
        qkv, out, gate_up, down = self._packed
        hidden_TD, x_TD = functions.add_rms_norm(self._hidden_TD.clone(), None, self._norm_D, 1e-6)
        qkv_THP = linear(x_TD, qkv).view(len(CONTEXTS), -1, HEAD_SIZE)
        q_THP = functions.rotate_and_write(qkv_THP, self._cache, self._slots_T, self._angles, QKVHeads(KV_HEADS))
        attended_THP = functions.paged_attention(q_THP, self._cache, batch, self._heads)
        delta_TD = linear(attended_THP.flatten(1), out)
        hidden_TD, x_TD = functions.add_rms_norm(hidden_TD, delta_TD, self._norm_D, 1e-6)
        return linear(functions.silu_and_mul(linear(x_TD, gate_up)), down)

    def advance(self) -> AttentionBatch:
        """Batch of the next step, with contexts that are longer by one token; its tensors keep their memory."""
        lengths = [length + 1 for length in self.batch.context_lens]
        self.batch.context_lens_B.copy_(torch.tensor(lengths))
        self._slots_T.copy_(torch.tensor(self._slots(lengths)))
        self._hidden_TD.copy_(self._own.random(len(CONTEXTS), HIDDEN))
        self.batch = replace(self.batch, context_lens=lengths)
        return self.batch


@dataclass(frozen=True, kw_only=True)
class CaptureCase:
    """Trial of a provider's capture with the functions that a run would select. The trial also fails if ``select`` raises an error."""

    name: str
    """Name of the provider."""
    make_capture: Callable[[], Capture]
    select: Callable[[], Functions]
    """Selects the functions of the step."""
    setting: CallSetting

    @property
    def key(self) -> tuple[str, str, str]:
        """Function (``capture``), name and quantization in this case's ``Finding``."""
        return self.finding("works").key

    def finding(self, verdict: Verdict, detail: str = "") -> Finding:
        """Make the ``Finding`` of this case."""
        names = (dtype_name(dtype) for dtype in (self.setting.dtype, self.setting.kv_dtype))
        dtype, kv_dtype = names
        return Finding(
            function="capture",
            name=self.name,
            quantization="none",
            dtype=dtype,
            kv_dtype=kv_dtype,
            rows=len(CONTEXTS),
            verdict=verdict,
            detail=detail,
        )

    @torch.inference_mode()
    def run(self) -> Finding:
        """Capture a step, replay it as the next step, and compare the results of both with the results of uncaptured calls."""
        try:
            functions = self.select()
            setting = replace(self.setting, tiled_cache=functions.tiled_cache)
            eager, captured = DecodeStep(functions, setting), DecodeStep(functions, setting)
            batch = captured.batch
            out, graph = self.make_capture()(
                lambda: captured.run(batch), lambda: captured.run(for_dry_run(batch)), batch
            )
            problem = self._difference("captured", out, eager.run(eager.batch))
            if graph is None:
                return self.finding("wrong", problem) if problem else self.finding("works", "not captured")
            replayed, expected = captured.advance(), eager.run(eager.advance())
            graph.replay(replayed)
            problem = problem or self._difference("replayed", out, expected)
        except Exception as error:  # noqa: BLE001 - captures raise whatever the vendor's library raises
            return self.finding("raises", describe_error(error))
        return self.finding("wrong", problem) if problem else self.finding("works")

    def _difference(self, how: str, got: torch.Tensor, expected: torch.Tensor) -> str:
        """Difference of the result of a captured or replayed step (``how``) from that of uncaptured calls; empty if within the tolerance."""
        got, expected = got.cpu().double(), expected.cpu().double()
        error = float((got - expected).abs().max() / expected.abs().max())
        limit = dtype_tolerance(self.setting.dtype)
        return "" if error <= limit else f"a {how} step differs from its calls by {error:.2g} of its largest number"
