"""``WorkloadLimits``: tokens/s that memory bandwidth and arithmetic of a machine allow on a workload, for one model on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from labinfer.cli.bench.workloads import BenchWorkload
from labinfer.functions.calls import FunctionCall, LinearCall, PagedAttentionCall, collect_calls
from labinfer.functions.delta_calls import DeltaRuleCall
from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.latent_calls import LatentAttentionCall
from labinfer.functions.mamba_calls import SelectiveScanCall
from labinfer.functions.roofline_limits import RooflineLimits
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.experts import RoutedExperts
from labinfer.models.layers.attention import Attention
from labinfer.models.layers.matrix import Matrix


@dataclass(frozen=True)
class PackedBytes:
    """Bytes of a model's weights as they are packed in memory: 1.5 a weight in 12 bits, scales of quantized weights included."""

    matrices: float
    """Matrices that every step reads, LM head included. An embedding counts only if it is also the LM head."""
    experts: float = 0.0
    """All routed experts of all layers."""

    @classmethod
    def from_model(cls, model: Decoder) -> PackedBytes:
        """Bytes of a loaded model that is whole on this rank."""
        modules = [*model.model.modules()]
        matrices = [module for module in modules if isinstance(module, Matrix) and any(module.calls())]
        experts = [module for module in modules if isinstance(module, RoutedExperts)]
        return cls(
            sum(module.num_bytes for module in [*matrices, model.lm_head]), sum(module.num_bytes for module in experts)
        )


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one sequence that a step computes, after ``cached`` tokens in the KV cache."""

    cached: int
    count: int


class WorkloadLimits:
    """Least time of steps, and from it the limit of a workload in tokens/s.

    A step takes as long as the larger of two times.

    Reading, at the measured memory bandwidth: all ``PackedBytes.matrices`` once; of the experts, the share that the step's tokens choose on
    average if all experts are equally likely (for one token the active ones); the keys and values that the tokens see, and the
    states of the gated delta rule and of Mamba-2.

    Arithmetic, at the highest measured rate for the quantization of the weights: two operations for each weight of each matrix product and
    token, of routed experts only the active ones; and four operations for each query head, element of the head and visible key
    (attention's two products). The LM head, and of the last layer all but its QKV projection, count only for sampled rows: the last token of
    each sequence.

    Routers, norms, activations, rotary embeddings, sampling, and reads and writes of hidden states are not counted.

    A workload is one step with all prompts, then decode steps of all sequences that are not finished.

    Args:
        model: the whole model, loaded or on torch's meta device.
        kv_dtype: dtype of the KV cache.
        limits: measured rates of the machine.
    """

    def __init__(self, model: Decoder, packed: PackedBytes, kv_dtype: torch.dtype, limits: RooflineLimits):
        self._packed, self._kv_dtype, self._limits = packed, kv_dtype, limits
        last = [*model.model.layers.values()][-1]
        mixer = last.self_attn
        every_row = collect_calls(mixer.qkv_proj if isinstance(mixer, Attention) else mixer)
        rest_of_last = collect_calls(last) - every_row
        self._every_row = collect_calls(model.model) - rest_of_last
        self._sampled_rows = rest_of_last + Counter(model.calls())
        counts = self._every_row + self._sampled_rows
        self.is_known = limits.memory > 0 and not any(isinstance(call, LatentAttentionCall) for call in counts)
        """Whether the rates are measured and all of the model's functions are counted. Latent attention is not."""
        self._expert_elements = sum(n * call.elements for call, n in counts.items() if isinstance(call, ExpertsCall))

    def tokens_per_second(self, work: BenchWorkload) -> float:
        """Limit of the workload's figure."""
        answers = [(len(prompt), out) for prompt, out in zip(work.prompts, work.output_lens, strict=True)]
        prefill = self.step_seconds([NewTokens(0, length) for length, _ in answers])
        decode = sum(
            self.step_seconds([NewTokens(length + step - 1, 1) for length, out in answers if step < out])
            for step in range(1, max(work.output_lens))
        )
        if work.figure == "prefill":
            return sum(length for length, _ in answers) / prefill
        if work.figure == "decode":
            return sum(out - 1 for _, out in answers) / decode
        return sum(work.output_lens) / (prefill + decode)

    def step_seconds(self, step: Sequence[NewTokens]) -> float:
        """Least time of a step."""
        last = [NewTokens(tokens.cached + tokens.count - 1, 1) for tokens in step]
        parts = [self._work(self._every_row, step), self._work(self._sampled_rows, last)]
        num_bytes = self._packed.matrices + sum(part[0] for part in parts)
        return max(num_bytes / self._limits.memory, sum(part[1] for part in parts))

    def _work(self, calls: Mapping[FunctionCall, int], step: Sequence[NewTokens]) -> tuple[float, float]:
        """Bytes that ``calls`` read besides matrices, and seconds of their arithmetic."""
        rows = sum(tokens.count for tokens in step)
        num_bytes = seconds = 0.0
        for call, count in calls.items():
            read, operations, quantization = 0.0, 0.0, "none"
            if isinstance(call, LinearCall):
                operations, quantization = 2 * rows * call.elements, call.quantization
            elif isinstance(call, ExpertsCall):
                active = call.num_chosen / call.all_experts
                operations, quantization = 2 * rows * active * call.elements, call.quantization
                chosen = 1 - (1 - active) ** rows
                read = chosen * self._packed.experts * call.elements / self._expert_elements
            elif isinstance(call, PagedAttentionCall):
                visible = sum(_visible_keys(tokens, call.window) for tokens in step)
                operations = 4 * call.heads * call.head_size * visible
                cached = sum(_visible_tokens(tokens, call.window) for tokens in step)
                read = 2 * cached * call.kv_heads * call.head_size * self._kv_dtype.itemsize
            elif isinstance(call, DeltaRuleCall):
                state = len(call.key_heads) * call.key_size * call.value_size
                operations, read = 6 * rows * state, len(step) * state * torch.float32.itemsize
            elif isinstance(call, SelectiveScanCall):
                state = len(call.groups) * call.state_size * call.head_size
                operations, read = 5 * rows * state, len(step) * state * torch.float32.itemsize
            num_bytes += count * read
            seconds += count * operations / self._limits.arithmetic(quantization)
        return num_bytes, seconds


def _visible_keys(tokens: NewTokens, window: int) -> int:
    """Number of pairs of a new token and a key that it sees, its own included.

    Args:
        window: sliding-window size in tokens; 0 for full attention.
    """
    first, last = tokens.cached + 1, tokens.cached + tokens.count
    if not window or last <= window:
        return (first + last) * tokens.count // 2
    growing = max(0, window - tokens.cached)
    return (first + window) * growing // 2 + (tokens.count - growing) * window


def _visible_tokens(tokens: NewTokens, window: int) -> int:
    """Number of keys that any of the new tokens sees."""
    length = tokens.cached + tokens.count
    return min(length, window + tokens.count - 1) if window else length
