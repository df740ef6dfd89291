"""Paged attention for Ascend NPUs and its captured steps, by a stand-in for torch_npu."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import stub_torch_npu as ops
import torch
from npu_cases import NpuCase, assert_near, randn
from stub_torch_npu import LimitError

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.graph import for_dry_run
from labinfer.functions.npu.attention import NpuAttention
from labinfer.functions.npu.graph import NpuCapture
from labinfer.functions.npu.provider import NpuProvider
from labinfer.functions.reference import attention as reference

CPU = torch.device("cpu")
DECODES = [(7, 1), (1, 1), (130, 1), (300, 1)]
MIXED = [(40, 40), (9, 1), (300, 21), (65, 65), (5, 2), (129, 1), (140, 1)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def attend():
    return NpuAttention(ops, CPU)


def make_heads(num_heads: int, num_kv: int, size: int, window: int = 0) -> AttentionHeads:
    return AttentionHeads(torch.arange(num_kv + 1) * (num_heads // num_kv), size**-0.5, window)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "lengths",
    [DECODES, MIXED, [(900, 1)], [(700, 6)], [(9, 3), (300, 3)]],
    ids=["decodes", "mixed", "long", "drafts", "rounds"],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "size"), [(14, 2, 64), (4, 4, 16), (6, 2, 80), (8, 1, 128), (4, 4, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("window", [0, 5, 64, 200, 4000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [128, 256])
def test_attention(calls, attend, lengths, num_heads, num_kv, size, window, dtype, block):
    case = NpuCase(lengths, (num_kv, size), dtype, block=block, window=window)
    q, heads = randn(case.rows, num_heads, size, dtype=dtype), make_heads(num_heads, num_kv, size, window)
    exact = reference.paged_attention(q, case.cache, case.batch, heads)
    assert_near(attend(q, case.cache, case.batch, heads), exact, dtype)
    assert set(calls) == {"npu_fused_infer_attention_score"}


def test_sequences_with_different_numbers_of_tokens_share_a_call_if_heads_have_128_dimensions(calls, attend):
    for size, expected in ((128, 1), (64, 6)):  # the last two sequences have one new token each
        case, heads = NpuCase(MIXED, (2, size), torch.bfloat16), make_heads(8, 2, size)
        calls.clear()
        attend(randn(case.rows, 8, size, dtype=torch.bfloat16), case.cache, case.batch, heads)
        assert len(calls) == expected


def test_sequences_that_share_more_blocks_than_the_pool_has_attend_in_several_calls(calls, attend):
    """The operator refuses block tables with more entries than the pool has blocks."""
    case, heads = NpuCase([(400, 1)], (2, 64), torch.bfloat16), make_heads(4, 2, 64)
    tables = [case.batch.tables_N.tolist()] * 3
    batch = AttentionBatch.build([0, 1, 2, 3], [400] * 3, tables, CPU)
    q = randn(3, 4, 64, dtype=torch.bfloat16)
    exact = reference.paged_attention(q, case.cache, batch, heads)
    assert_near(attend(q, case.cache, batch, heads), exact, torch.bfloat16)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"size": 72},
        {"size": 528},
        {"lengths": [(20, 3)], "block": 16},
        {"block": 1024},
        {"block": 24},
        {"num_heads": 65, "num_kv": 1},
        {"sinks": True},
        {"cap": 2.0},
        {"uneven": True},
        {"kv": torch.int8},
    ],
    ids=str,
)
def test_cases_that_the_operator_lacks_are_the_references(calls, attend, change):
    options = {
        "lengths": DECODES,
        "num_heads": 4,
        "num_kv": 2,
        "size": 32,
        "dtype": torch.bfloat16,
        "block": 128,
    } | change
    num_heads, num_kv, size = (options[name] for name in ("num_heads", "num_kv", "size"))
    kv_dtype = options.get("kv", options["dtype"])
    case = NpuCase(
        options["lengths"], (num_kv, size), torch.bfloat16 if "kv" in options else kv_dtype, block=options["block"]
    )
    if "kv" in options:
        scales = (torch.rand(case.cache.k.shape[:3]) for _ in range(2))
        case.cache = type(case.cache)(
            *(torch.ones_like(x, dtype=torch.int8) for x in (case.cache.k, case.cache.v)), *scales
        )
    heads = make_heads(num_heads, num_kv, size)
    if "uneven" in options:
        heads = replace(heads, head_ptr=torch.tensor([0, 1, 4]))
    if "sinks" in options:
        heads = replace(heads, sinks_H=torch.randn(num_heads))
    heads = replace(heads, cap=options.get("cap", 0.0))
    q = randn(case.rows, num_heads, size, dtype=options["dtype"])
    exact = reference.paged_attention(q, case.cache, case.batch, heads)
    assert torch.equal(attend(q, case.cache, case.batch, heads), exact)
    assert not calls


def test_decodes_in_small_blocks_are_the_operators(calls, attend):
    case, heads = NpuCase(DECODES, (2, 32), torch.bfloat16, block=16), make_heads(4, 2, 32)
    q = randn(case.rows, 4, 32, dtype=torch.bfloat16)
    exact = reference.paged_attention(q, case.cache, case.batch, heads)
    assert_near(attend(q, case.cache, case.batch, heads), exact, torch.bfloat16)
    assert len(calls) == 1


class CapturedStep:
    """Two layers over one pool, the second with a window, whose batch lives in one buffer as in a run."""

    def __init__(self, tables: list[list[int]], contexts: list[int], window: int = 100):
        torch.manual_seed(1)
        self.case = NpuCase([(128 * 40, 1)], (2, 64), torch.bfloat16, spare=0)
        self.buffer = torch.zeros(4096, dtype=torch.int64)
        self.attention = NpuAttention(ops, CPU)
        self.window, count = window, len(contexts)
        self.row_ptr_B, self.contexts_B, self.table_ptr_B, self.tables = (
            self.buffer[begin:] for begin in (0, count + 1, 2 * count + 1, 3 * count + 2)
        )
        self.q = randn(count, 4, 64, dtype=torch.bfloat16)
        self.batch = self.fill(tables, contexts)

    def fill(self, tables: list[list[int]], contexts: list[int]) -> AttentionBatch:
        """The batch of a step, at the addresses of all steps."""
        own = AttentionBatch.build(list(range(len(contexts) + 1)), contexts, tables, CPU)
        views = {}
        for name, place in (
            ("row_ptr_B", self.row_ptr_B),
            ("context_lens_B", self.contexts_B),
            ("table_ptr_B", self.table_ptr_B),
            ("tables_N", self.tables),
        ):
            values = getattr(own, name)
            place[: len(values)] = values
            views[name] = place[: len(values)]
        return replace(own, **views, _parts={})

    def run(self, batch: AttentionBatch, attend) -> torch.Tensor:
        hidden = self.q
        for window in (0, self.window):
            hidden = attend(hidden, self.case.cache, batch, make_heads(4, 2, 64, window)) + self.q
        return hidden

    def exact(self, batch: AttentionBatch) -> torch.Tensor:
        return self.run(batch, reference.paged_attention)

    def capture(self):
        capture = NpuCapture(ops.npu, self.attention, CPU)
        return capture(
            lambda: self.run(self.batch, self.attention),
            lambda: self.run(for_dry_run(self.batch), self.attention),
            self.batch,
        )


BLOCKS = torch.arange(40).tolist()


def test_captured_attention_goes_on_as_contexts_grow(calls):
    step = CapturedStep([BLOCKS[:2], BLOCKS[2:3]], [130, 40])
    out, graph = step.capture()
    assert_near(out, step.exact(step.batch), torch.bfloat16)
    operators = len(calls)
    for tables, contexts in (
        ([BLOCKS[:2], BLOCKS[2:3]], [131, 41]),
        ([BLOCKS[:3], BLOCKS[5:6]], [300, 128]),  # another block, behind those of the captured step
        ([BLOCKS[:4], BLOCKS[5:9]], [512, 400]),
    ):
        step.q.normal_()
        batch = step.fill(tables, contexts)
        graph.replay(batch)
        assert_near(out, step.exact(batch), torch.bfloat16)
    assert len(calls) == operators  # graphs repeat calls
    batch = step.fill([BLOCKS[:9], BLOCKS[9:10]], [1100, 7])  # more blocks than the captured tables have room for
    graph.replay(batch)
    assert_near(out, step.exact(batch), torch.bfloat16)
    assert len(calls) == operators + 2
    graph.replay(batch)
    assert_near(out, step.exact(batch), torch.bfloat16)
    assert len(calls) == operators + 2


def test_replay_of_sequences_that_share_many_blocks_runs_without_a_graph():
    step = CapturedStep([BLOCKS[:2], BLOCKS[2:3]], [130, 40])
    out, graph = step.capture()
    shared = [BLOCKS[:25], BLOCKS[:25]], [3200, 3199]  # 50 blocks of a pool of 40
    short = [BLOCKS[:2], BLOCKS[2:3]], [140, 60]
    for tables, contexts in (shared, shared, shared, short, shared, short):
        step.q.normal_()
        batch = step.fill(tables, contexts)
        graph.replay(batch)
        assert_near(out, step.exact(batch), torch.bfloat16)


def test_steps_run_without_a_graph_after_a_replay_fails_to_capture(caplog, monkeypatch):
    step = CapturedStep([BLOCKS[:2], BLOCKS[2:3]], [130, 40])
    out, graph = step.capture()
    attempts = []

    def fail(*arguments, **named):
        attempts.append(named)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ops.npu, "graph", fail)
    long, short = ([BLOCKS[:9], BLOCKS[9:10]], [1100, 7]), ([BLOCKS[:2], BLOCKS[2:3]], [140, 60])
    for tables, contexts in (long, long, short, long):
        step.q.normal_()
        batch = step.fill(tables, contexts)
        graph.replay(batch)
        assert_near(out, step.exact(batch), torch.bfloat16)
    assert len(attempts) == 1 and caplog.text.count("out of memory") == 1


def test_steps_that_read_lists_are_not_captured():
    step = CapturedStep([BLOCKS[:2]], [130])
    step.attention = reference.paged_attention
    capture = NpuCapture(ops.npu, SimpleNamespace(lengths=None), CPU)
    out, graph = capture(
        lambda: step.run(step.batch, step.attention),
        lambda: step.run(for_dry_run(step.batch), step.attention),
        step.batch,
    )
    assert graph is None and torch.equal(out, step.exact(step.batch))
    out, graph = capture(lambda: step.q + 1, lambda: step.q + 1)  # as the LM head, which reads no lengths
    step.q.normal_()
    graph.replay(step.batch)
    assert torch.equal(out, step.q + 1)


def test_graph_that_fails_leaves_the_step_as_it_is(caplog, monkeypatch):
    step = CapturedStep([BLOCKS[:2]], [130])

    def fail(*arguments, **named):
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(ops.npu, "graph", fail)
    out, graph = step.capture()
    assert graph is None and "the driver is too old" in caplog.text
    assert_near(out, step.exact(step.batch), torch.bfloat16)


def test_stand_in_refuses_what_the_page_does_not_allow():
    q, k = torch.ones(2, 1, 4, 64, dtype=torch.bfloat16), torch.ones(3, 128, 128, dtype=torch.bfloat16)
    good = {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BSND",
        "block_size": 128,
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "actual_seq_lengths_kv": [1, 100],
    }
    ops.npu_fused_infer_attention_score(q, k, k, **good)
    for change in (
        {"actual_seq_lengths_kv": [1, 200]},
        {"actual_seq_lengths_kv": [1]},
        {"block_table": torch.zeros(2, 1, dtype=torch.int64)},
        {"block_table": torch.full((2, 1), 3, dtype=torch.int32)},
        {"block_size": 64},
        {"sparse_mode": 3},
        {"atten_mask": torch.zeros(2, 64, dtype=torch.bool)},
        {"num_heads": 2},
        {"input_layout": "TND"},
    ):
        with pytest.raises(LimitError, match=r"\.md\)"):
            ops.npu_fused_infer_attention_score(q, k, k, **good | change)
    with pytest.raises(LimitError, match="float32"):
        ops.npu_fused_infer_attention_score(q.float(), k, k, **good)


def test_provider_offers_its_functions_where_torch_npu_works(caplog):
    provider = NpuProvider()
    provider.prepare(CPU)
    assert provider.capture() is None and not provider.fingerprint()
    provider = NpuProvider(ops)
    provider.prepare(CPU)
    assert isinstance(provider.capture(), NpuCapture)
    assert provider.fingerprint() == ("2.12.0", "9.1.0", "25.5.0", "Ascend910B")
    broken = NpuProvider(SimpleNamespace(__version__="2.12.0"))
    broken.prepare(CPU)
    assert broken.capture() is None and "torch_npu does not work here" in caplog.text
