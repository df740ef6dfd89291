"""Compiled attention against the reference, over caches in rows and in tiles, and the same bits whatever is computed with it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference import attention
from labinfer.native import compiler
from labinfer.native.targets import X86_64_V3, Target

CPU = torch.device("cpu")
FEW_SHAPES = [(4, torch.bfloat16), (16, torch.bfloat16), (32, torch.int8)]
SHAPES = pytest.mark.parametrize(("block", "kv_dtype"), FEW_SHAPES, ids=str)
ALL_SHAPES = pytest.mark.parametrize(
    ("block", "kv_dtype"), [*FEW_SHAPES, (4, torch.int8), (16, torch.int8), (32, torch.bfloat16)], ids=str
)
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


@pytest.fixture(scope="module")
def functions(compiled_functions, kernel) -> CpuFunctions:
    """Of each kernel."""
    return CpuFunctions(compiled_functions, kernel)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


class Case:
    """Sequences in a cache, in tiles where it can be; slots that hold no token of them hold what is no number.

    Args:
        heads: KV heads and their size.
        in_order: blocks of a sequence stand one after another; else anywhere.
    """

    def __init__(
        self, contexts: list[int], heads: tuple[int, int], block: int, kv_dtype: torch.dtype, *, in_order: bool = False
    ):
        counts = [-(-context // block) for context in contexts]
        order = torch.arange(sum(counts)) if in_order else torch.randperm(sum(counts) + 1)[:-1]
        self.tables = [table.tolist() for table in order.split(counts)]
        self.contexts, self.block = contexts, block
        self.cache = LayerCache.zeros(sum(counts) + 1, block, heads, kv_dtype, tiled=True)
        for tensor in self.cache.tensors():
            tensor.fill_(127 if tensor.dtype == torch.int8 else float("nan"))
        for table, context in zip(order.split(counts), contexts, strict=True):
            positions = torch.arange(context)
            slots = table[positions // block] * block + positions % block
            attention.write_kv(random(context, *heads), random(context, *heads), self.cache, slots)

    def batch(self, new: list[int], contexts: list[int] | None = None, sequences: list[int] | None = None):
        """The last tokens of contexts, of these sequences or all."""
        contexts, sequences = contexts or self.contexts, sequences or range(len(self.contexts))
        tables = [self.tables[b][: -(-context // self.block)] for b, context in zip(sequences, contexts, strict=True)]
        return AttentionBatch.build([0, *torch.tensor(new).cumsum(0).tolist()], contexts, tables, CPU)

    def exact(self, q: torch.Tensor, batch: AttentionBatch, heads: AttentionHeads) -> torch.Tensor:
        return attention.paged_attention(q.float(), self.cache, batch, heads)


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize("head_ptr", [(0, 7, 14), (0, 1, 4, 6), (0, 33)], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 112, 38])
@pytest.mark.parametrize("window", [0, 1, 9])
@ALL_SHAPES
def test_attention_is_that_of_the_reference(functions, head_ptr, size, window, block, kv_dtype):
    """Contexts around the vector's length, single tokens and chunks mixed, blocks in any order."""
    case = Case([1, 15, 16, 17, 70, 33, 9], (len(head_ptr) - 1, size), block, kv_dtype)
    assert case.cache.is_tiled == (block % 16 == 0 and size % 16 == 0)
    batch = case.batch([1, 1, 1, 1, 1, 6, 9])
    q, heads = random(20, head_ptr[-1], size), AttentionHeads(torch.tensor(head_ptr), size**-0.5, window)
    got = functions.paged_attention(q, case.cache, batch, heads)
    # Weights are in bfloat16.
    torch.testing.assert_close(got.float(), case.exact(q, batch, heads), rtol=0.02, atol=0.02)


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize(("context", "tokens"), [(700, 700), (530, 40), (1100, 300), (31, 2), (600, 257)])
@pytest.mark.parametrize("window", [0, 33, 515])
@SHAPES
def test_long_chunks_attend(functions, context, tokens, window, block, kv_dtype):
    """Over more keys than a span has, and more query tokens than a tile."""
    case, size = Case([context], (2, 32), block, kv_dtype), 32
    heads = AttentionHeads(torch.tensor([0, 3, 4]), size**-0.5, window)
    batch, q = case.batch([tokens]), random(tokens, 4, size) * 3
    got = functions.paged_attention(q, case.cache, batch, heads)
    torch.testing.assert_close(got.float(), case.exact(q, batch, heads), rtol=0.02, atol=0.02)


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize(("context", "tokens"), [(70, 1), (75, 6), (700, 1), (700, 300), (1100, 1100)])
@pytest.mark.parametrize("window", [1, 9, 33, 515])
@ALL_SHAPES
def test_blocks_before_the_window_are_not_read(functions, context, tokens, window, block, kv_dtype):
    """Their places in the table may name any block: here one that holds no numbers, for the reference, too."""
    case, size = Case([context], (2, 32), block, kv_dtype), 32
    heads = AttentionHeads(torch.tensor([0, 3, 4]), size**-0.5, window)
    q, whole = random(tokens, 4, size), case.batch([tokens])
    [table] = case.tables
    unseen = max(0, context - tokens - window + 1) // block
    [unused] = {*range(len(table) + 1)} - {*table}
    case.tables = [[unused] * unseen + table[unseen:]]
    batch = case.batch([tokens])
    exact = case.exact(q, whole, heads)
    assert torch.equal(case.exact(q, batch, heads), exact)
    got = functions.paged_attention(q, case.cache, batch, heads)
    assert torch.equal(got, functions.paged_attention(q, case.cache, whole, heads))
    torch.testing.assert_close(got.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("contexts", [[513], [600, 1100], [100, 5000]], ids=str)
@pytest.mark.parametrize("window", [0, 1700])
@SHAPES
def test_keys_of_few_sequences_are_dealt_over_threads(functions, contexts, window, threads, block, kv_dtype):
    case, size = Case(contexts, (2, 64), block, kv_dtype), 64
    heads = AttentionHeads(torch.tensor([0, 7, 14]), size**-0.5, window)
    batch, q = case.batch([1] * len(contexts)), random(len(contexts), 14, size) * 3
    with threads_of_torch(threads):
        got = functions.paged_attention(q, case.cache, batch, heads)
    torch.testing.assert_close(got.float(), case.exact(q, batch, heads), rtol=0.02, atol=0.006)


@pytest.mark.parametrize(("context", "window"), [(40, 0), (256, 0), (700, 300), (1300, 0)])
@SHAPES
def test_bits_do_not_depend_on_what_is_computed_together(functions, context, window, block, kv_dtype):
    """A token's attention alone, in a chunk of any size, verified among others, beside other sequences, on any threads."""
    contexts, new = [context, 90, 1100], min(context, 40)
    case, size = Case(contexts, (2, 48), block, kv_dtype), 48
    heads = AttentionHeads(torch.tensor([0, 7, 10]), size**-0.5, window)
    q = random(new, 10, size) * 3

    def attend(batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        return functions.paged_attention(q, case.cache, batch, heads)

    with threads_of_torch(1):
        alone = [attend(case.batch([1], [context - new + 1 + i], [0]), q[i : i + 1]) for i in range(new)]
    expected = torch.cat(alone)
    for threads in (1, 2, 5):
        with threads_of_torch(threads):
            for chunk in (3, 7, new):
                for begin in range(0, new, chunk):
                    end = min(new, begin + chunk)
                    batch = case.batch([end - begin], [context - new + end], [0])
                    assert torch.equal(attend(batch, q[begin:end]), expected[begin:end]), (threads, chunk, begin)
            others = random(1 + 30, 10, size)
            together = attend(case.batch([new, 1, 30]), torch.cat([q, others]))
            assert torch.equal(together[:new], expected), threads
    assert expected.isfinite().all()


WIDE = [
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.float16, torch.float16),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
]
"""Dtypes of activations and of a cache that are multiplied in float32."""
NEAR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize("contexts", [[1500], [740, 768, 1270]], ids=str)
@pytest.mark.parametrize(("head_ptr", "new"), [((0, 7, 14), 1), ((0, 1, 3, 6, 7, 9), 2), ((0, 2, 2, 4), 3)], ids=str)
@pytest.mark.parametrize("size", [16, 48, 64])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("threads", [1, 2])
def test_kv_heads_have_the_same_bits_together_and_alone(functions, contexts, head_ptr, new, size, window, threads):
    case = Case(contexts, (len(head_ptr) - 1, size), 16, torch.bfloat16, in_order=True)
    count = new * len(contexts)
    q, sinks = random(count, head_ptr[-1], size), torch.randn(head_ptr[-1])

    def attend(begin: int, end: int) -> torch.Tensor:
        """By these query heads; the others' KV heads are read by none."""
        own, batch = torch.tensor(head_ptr).clamp(begin, end) - begin, case.batch([new] * len(contexts))
        queries = q[:, begin:end].contiguous()
        heads = AttentionHeads(own, 0.125, window, sinks[begin:end])
        return functions.paged_attention(queries, case.cache, batch, heads)

    with threads_of_torch(threads):
        together = attend(0, head_ptr[-1])
        assert together.isfinite().all()
        for begin, end in pairwise(head_ptr):
            if begin < end:
                assert torch.equal(together[:, begin:end], attend(begin, end))


@pytest.mark.pairwise
@pytest.mark.parametrize(("dtype", "kv_dtype"), WIDE, ids=str)
@pytest.mark.parametrize("head_ptr", [(0, 7, 14), (0, 1, 4, 6), (0, 33)], ids=str)
@pytest.mark.parametrize(("block", "size"), [(4, 38), (16, 64), (32, 80), (16, 112), (16, 7), (8, 33), (16, 16)])
@pytest.mark.parametrize("window", [0, 9])
def test_attention_in_float32_is_that_of_the_reference(
    compiled_functions, dtype, kv_dtype, head_ptr, block, size, window
):
    """Contexts around the vector's length, single tokens and chunks mixed, blocks in any order, sizes of heads that are odd, too."""
    case = Case([1, 15, 16, 17, 70, 33, 9, 300], (len(head_ptr) - 1, size), block, kv_dtype)
    assert case.cache.is_tiled == (block % 16 == 0 and size % 16 == 0)
    batch = case.batch([1, 1, 1, 1, 1, 6, 9, 2])
    q = torch.randn(22, head_ptr[-1], size, dtype=dtype)
    heads = AttentionHeads(torch.tensor(head_ptr), size**-0.5, window)
    functions = CpuFunctions(compiled_functions, dtype=dtype)
    got = functions.paged_attention(q, case.cache, batch, heads)
    exact = case.exact(q, batch, heads)
    torch.testing.assert_close(got.float(), exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)], ids=str
)
@pytest.mark.parametrize("size", [7, 33])
def test_heads_of_an_odd_size_attend(functions, size, dtype, kv_dtype):
    case, heads = Case([1, 16, 70, 300], (2, size), 16, kv_dtype), AttentionHeads(torch.tensor([0, 3, 4]), size**-0.5)
    batch, q = case.batch([1, 1, 6, 40]), random(48, 4, size)
    got = functions.paged_attention(q, case.cache, batch, heads)
    torch.testing.assert_close(got.float(), case.exact(q, batch, heads), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [WIDE[0], WIDE[3], WIDE[4], WIDE[6]], ids=str)
@pytest.mark.parametrize(("block", "size"), [(16, 48), (8, 33)])
def test_bits_in_float32_do_not_depend_on_what_is_computed_together(compiled_functions, dtype, kv_dtype, block, size):
    functions, kept, new = CpuFunctions(compiled_functions, dtype=dtype), [700, 90, 1100], 40
    case, heads = Case(kept, (2, size), block, kv_dtype), AttentionHeads(torch.tensor([0, 7, 10]), size**-0.5)
    q, others = (torch.randn(count, 10, size, dtype=dtype) * 3 for count in (new, 31))

    def attend(batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        return functions.paged_attention(q, case.cache, batch, heads)

    with threads_of_torch(1):
        expected = torch.cat([attend(case.batch([1], [660 + 1 + i], [0]), q[i : i + 1]) for i in range(new)])
    for threads in (1, 2, 5):
        with threads_of_torch(threads):
            for chunk in (3, 7, new):
                for begin in range(0, new, chunk):
                    end = min(new, begin + chunk)
                    batch = case.batch([end - begin], [660 + end], [0])
                    assert torch.equal(attend(batch, q[begin:end]), expected[begin:end]), (threads, chunk, begin)
            assert torch.equal(attend(case.batch([new, 1, 30]), torch.cat([q, others]))[:new], expected), threads
    assert expected.isfinite().all()


@pytest.mark.parametrize("threads", [1, 9])
def test_sinks_and_long_chunks_in_float32(compiled_functions, threads):
    functions, size = CpuFunctions(compiled_functions, dtype=torch.float32), 32
    case = Case([600, 1100, 40], (2, size), 16, torch.float32)
    batch, q, sinks = case.batch([400, 1, 1]), torch.randn(402, 4, size) * 3, torch.tensor([2.0, -90.0, 90.0, 5.0])
    for window, sinks_H in ((0, None), (0, sinks), (33, sinks)):
        heads = AttentionHeads(torch.tensor([0, 3, 4]), size**-0.5, window, sinks_H)
        with threads_of_torch(threads):
            got = functions.paged_attention(q, case.cache, batch, heads)
        torch.testing.assert_close(got, case.exact(q, batch, heads), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("level", ["x86-64-v3", pytest.param("x86-64", marks=pytest.mark.slow)])
def test_processors_with_narrower_vectors(load_functions, level):
    narrow = CpuFunctions(load_functions(Target(level, "x86_64", (f"-march={level}",), X86_64_V3)))
    for block, kv_dtype in ((4, torch.bfloat16), (16, torch.bfloat16), (16, torch.int8)):
        test_long_chunks_attend(narrow, 70, 9, 0, block, kv_dtype)
        test_bits_do_not_depend_on_what_is_computed_together(narrow, 700, 0, block, kv_dtype)


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize("threads", [1, 9])
@pytest.mark.parametrize("window", [0, 33])
@SHAPES
def test_sinks_count_without_values(functions, window, threads, block, kv_dtype):
    """One head's sink takes nearly all weight, another's none; beside chunks there are keys that are dealt over threads."""
    case, size = Case([600, 1100, 40], (2, 32), block, kv_dtype), 32
    batch, q, sinks = case.batch([40, 1, 1]), random(42, 4, size) * 3, torch.tensor([2.0, -90.0, 90.0, 5.0])
    without = AttentionHeads(torch.tensor([0, 3, 4]), size**-0.5, window)
    heads = replace(without, sinks_H=sinks)
    with threads_of_torch(threads):
        got = functions.paged_attention(q, case.cache, batch, heads)
    exact = case.exact(q, batch, heads)
    torch.testing.assert_close(got.float(), exact, rtol=0.02, atol=0.02)
    assert got[:, 2].abs().max() < 1e-6 and (exact - case.exact(q, batch, without)).abs().max() > 0.1


@pytest.mark.parametrize("window", [0, 33])
@SHAPES
def test_scores_are_capped(functions, window, block, kv_dtype):
    """Beside chunks there are keys that are dealt over threads; some scores are far above the cap."""
    case, size = Case([600, 1100, 40], (2, 32), block, kv_dtype), 32
    batch, q = case.batch([40, 1, 1]), random(42, 4, size) * 3
    heads = AttentionHeads(torch.tensor([0, 3, 4]), size**-0.5, window, cap=1.5)
    with threads_of_torch(2):
        got = functions.paged_attention(q, case.cache, batch, heads)
    exact = case.exact(q, batch, heads)
    torch.testing.assert_close(got.float(), exact, rtol=0.02, atol=0.02)
    assert (exact - case.exact(q, batch, replace(heads, cap=0.0))).abs().max() > 0.1


@pytest.mark.parametrize("cap", [0.5, 50.0])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_scores_are_capped_in_float32(compiled_functions, cap, kv_dtype):
    functions, size = CpuFunctions(compiled_functions, dtype=torch.float32), 32
    case = Case([600, 1100, 40], (2, size), 16, kv_dtype)
    batch, q = case.batch([400, 1, 1]), torch.randn(402, 4, size) * 3
    heads = AttentionHeads(torch.tensor([0, 2, 4]), size**-0.5, 0, cap=cap)
    got = functions.paged_attention(q, case.cache, batch, heads)
    torch.testing.assert_close(got, case.exact(q, batch, heads), rtol=2e-5, atol=2e-5)
