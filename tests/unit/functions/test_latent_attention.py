"""The two forms of latent attention against what they are made of, and against each other."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import CacheMove
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.cpu.latent import CpuLatent
from labinfer.functions.latent_cache import LatentCache, LatentTransform
from labinfer.functions.layer_cache import SCALE_DTYPE
from labinfer.functions.reference import latent_attention as reference
from labinfer.functions.reference.elementwise import rms_norm
from labinfer.launch.providers import reference_registry
from labinfer.models.layers.cache_spec import CacheSpec, TokenTensor
from labinfer.models.layers.rope import RopeConfig, RotaryTable
from labinfer.native import compiler
from labinfer.worker.kv_cache import KVCacheManager

CPU = torch.device("cpu")
BLOCK = 4
RANK, ROTATED, UNROTATED = 48, 16, 24
FORMS = (reference.absorbed, reference.expanded)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def empty_cache(num_blocks: int, dtype: torch.dtype = torch.float32) -> LatentCache:
    latent = torch.full((num_blocks, BLOCK, RANK + ROTATED), 99).to(dtype)
    scale = torch.full((num_blocks, BLOCK, 2), 99.0, dtype=SCALE_DTYPE) if dtype == torch.int8 else None
    return LatentCache(latent=latent, latent_scale=scale, rank=RANK)


@dataclass
class Case:
    """Sequences with these many new tokens behind so many others, their blocks in no order."""

    counts: list[int]
    lengths: list[int]
    heads: int = 5
    value_size: int = 20
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32

    def __post_init__(self):
        needed = [-(-length // BLOCK) for length in self.lengths]
        order = torch.randperm(sum(needed)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in needed]
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        self.batch = AttentionBatch.build([0, *ends], self.lengths, tables, CPU)
        self.cache = empty_cache(sum(needed), self.kv_dtype)
        self.seen = []
        for table, length in zip(tables, self.lengths, strict=True):
            latents, keys = (torch.randn(length, size).to(self.dtype) for size in (RANK, ROTATED))
            slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)])
            self.cache.latents.store(latents, slots)
            self.cache.keys.store(keys, slots)
            self.seen.append((latents, keys))
        self.q = torch.randn(sum(self.counts), self.heads, UNROTATED + ROTATED).to(self.dtype)
        self.weight = (torch.randn(self.heads, UNROTATED + self.value_size, RANK) * RANK**-0.5).to(self.dtype)
        self.scale = (UNROTATED + ROTATED) ** -0.5

    def run(self, form) -> torch.Tensor:
        return form(self.q, self.cache, self.batch, self.weight, self.scale)

    def exact(self) -> torch.Tensor:
        """Head by head and query by query, in float64, without a cache."""
        out = torch.empty(len(self.q), self.heads, self.value_size, dtype=torch.float64)
        for b, (latents, keys) in enumerate(self.seen):
            begin, end = self.batch.row_ptr[b : b + 2]
            for row in range(begin, end):
                num_seen = len(latents) - (end - 1 - row)
                c, k_rotated = latents[:num_seen].double(), keys[:num_seen].double()
                for h, weight in enumerate(self.weight.double()):
                    k = torch.cat((c @ weight[:UNROTATED].t(), k_rotated), dim=1)
                    probabilities = (k @ self.q[row, h].double() * self.scale).softmax(0)
                    out[row, h] = probabilities @ (c @ weight[UNROTATED:].t())
        return out


CASES = {
    "decodes": ([1, 1, 1], [1, 9, 70]),
    "a prompt": ([33], [33]),
    "a chunk": ([7], [61]),
    "mixed": ([1, 130, 1, 6], [14, 151, 1, 6]),
}


@pytest.mark.parametrize(("counts", "lengths"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("value_size", [20, 24, 56], ids=lambda size: f"values of {size}")
def test_both_forms_are_attention_over_keys_and_values_of_latents(counts, lengths, value_size):
    """Values narrower than the keys' part without position, as wide, and wider than whole keys."""
    case = Case(counts, lengths, value_size=value_size)
    exact = case.exact()
    absorbed, expanded = (case.run(form) for form in FORMS)
    for out in (absorbed, expanded, case.run(reference.latent_attention)):
        assert out.dtype == torch.float32 and out.is_contiguous()
        assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (absorbed - expanded).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_work_that_is_cut_into_steps_comes_to_the_same(form, monkeypatch):
    """Some heads after others, some tokens after others: one at a time, and several."""
    case = Case([9, 1, 30], [40, 3, 30])
    whole = case.run(form)
    for most in (1, 5000, 20000):
        monkeypatch.setattr(reference, "MOST_BYTES", most)
        torch.testing.assert_close(case.run(form), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_near(form):
    case = Case([1, 40], [60, 80], dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    exact = case.exact()
    assert (case.run(form) - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_int8_latents_are_near(form):
    case = Case([1, 40], [60, 80], kv_dtype=torch.int8)
    exact = case.exact()
    error = (case.run(form) - exact).abs().max()
    assert 1e-4 * exact.abs().max() < error < 0.03 * exact.abs().max()


def test_rotated_part_has_a_scale_of_its_own_in_int8():
    """Small keys beside large latents keep their digits."""
    cache = empty_cache(1, torch.int8)
    latents, keys = 1000 * torch.randn(4, RANK), 0.001 * torch.randn(4, ROTATED)
    cache.latents.store(latents, torch.arange(4))
    cache.keys.store(keys, torch.arange(4))
    for pool, stored in ((cache.latents, latents), (cache.keys, keys)):
        steps = stored.abs().amax(1, keepdim=True) / 127
        assert ((pool.load(torch.tensor([0]), torch.float32) - stored).abs() <= 0.51 * steps).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_write_latent_normalises_rotates_and_stores(interleaved):
    cache, count, heads = empty_cache(3), 5, 2
    both = torch.randn(count, 7 + RANK + ROTATED)
    kv, q = both[:, 7:], torch.randn(count, heads, UNROTATED + ROTATED)
    angles = torch.randn(count, ROTATED // 2)
    spread = angles.repeat_interleave(2, 1) if interleaved else torch.cat((angles, angles), 1)
    norm, slots = torch.randn(RANK), torch.tensor([7, 3, 0, 11, 4])
    given, untouched = q.clone(), cache.latent.clone()
    transform = LatentTransform(norm, 1e-6, interleaved)
    rotated = reference.write_latent(q, kv, cache, slots, (spread.cos(), spread.sin()), transform=transform)

    def turn(x: torch.Tensor) -> torch.Tensor:
        """Pairs as complex numbers."""
        pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(count, ROTATED // 2), angles)
        parts = torch.view_as_real(turned)
        return parts.flatten(-2) if interleaved else parts.transpose(-1, -2).flatten(-2)

    stored = cache.latent.view(-1, RANK + ROTATED)[slots]
    torch.testing.assert_close(stored[:, :RANK], rms_norm(kv[:, :RANK], norm, 1e-6))
    torch.testing.assert_close(stored[:, RANK:], turn(kv[:, RANK:]))
    assert torch.equal(rotated[..., :UNROTATED], given[..., :UNROTATED])
    for head in range(heads):
        torch.testing.assert_close(rotated[:, head, UNROTATED:], turn(given[:, head, UNROTATED:]))
    others = torch.ones(12, dtype=torch.bool).index_fill(0, slots, False)
    assert torch.equal(cache.latent.view(12, -1)[others], untouched.view(12, -1)[others])


# Compiled functions.

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


@pytest.fixture(scope="module")
def cpu(kernel, compiled_functions) -> CpuLatent:
    return CpuLatent(compiled_functions, kernel)


@needs_compiler
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("counts", "lengths"), [*CASES.values(), ([1, 1], [700, 300])], ids=[*CASES, "long"])
@pytest.mark.parametrize("value_size", [20, 56], ids=lambda size: f"values of {size}")
def test_compiled_latent_attention_is_near_the_exact_one(cpu, counts, lengths, value_size, kv_dtype):
    """Within what rounding queries, weights and sums to bfloat16 makes, which the reference does as well."""
    case = Case(counts, lengths, value_size=value_size, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    exact, got = case.exact(), case.run(cpu.latent_attention)
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    bound = 0.02 if kv_dtype == torch.bfloat16 else 0.05
    assert (got - exact).abs().max() < bound * exact.abs().max()


@needs_compiler
@pytest.mark.parametrize("heads", [1, 5, 16, 33])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_token_has_the_same_bits_alone_in_a_chunk_and_on_any_threads(cpu, heads, kv_dtype):
    case = Case([40, 1, 3], [600, 300, 3], heads=heads, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    with threads_of_torch(1):
        together = case.run(cpu.latent_attention)
    for num_threads in (1, 3):
        with threads_of_torch(num_threads):
            assert torch.equal(case.run(cpu.latent_attention), together)
            for b, row in ((0, 0), (0, 17), (0, 39), (1, 40)):
                length = case.lengths[b] - (case.batch.row_ptr[b + 1] - 1 - row)
                table = case.batch.tables_N.tolist()[case.batch.table_ptr[b] : case.batch.table_ptr[b + 1]]
                alone = AttentionBatch.build([0, 1], [length], [table[: -(-length // BLOCK)]], CPU)
                got = cpu.latent_attention(case.q[row : row + 1], case.cache, alone, case.weight, case.scale)
                assert torch.equal(got[0], together[row])


@needs_compiler
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float32, torch.float16], ids=str)
def test_compiled_write_latent_is_the_references(cpu, kv_dtype, dtype, interleaved):
    """Up to a rounding of each number; what the queries have without a position stays as it is."""
    count, heads = 5, 3
    both = torch.randn(count, 6 + RANK + ROTATED).to(dtype)
    q, angles = torch.randn(count, heads, UNROTATED + ROTATED).to(dtype), torch.randn(count, ROTATED)
    norm, slots = torch.randn(RANK).to(dtype), torch.tensor([7, 3, 0, 11, 4])
    outs = []
    for write in (reference.write_latent, cpu.write_latent):
        cache = empty_cache(3, kv_dtype)
        tables, transform = (angles.cos().to(dtype), angles.sin().to(dtype)), LatentTransform(norm, 1e-6, interleaved)
        rotated = write(q.clone(), both[:, 6:], cache, slots, tables, transform=transform)
        blocks = torch.arange(3)
        outs.append((rotated, cache.latents.load(blocks, torch.float32), cache.keys.load(blocks, torch.float32)))
    for wanted, got in zip(*outs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.03)
    assert torch.equal(outs[0][0][..., :UNROTATED], outs[1][0][..., :UNROTATED])


@needs_compiler
@pytest.mark.parametrize("rank", [2, 20, 36])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_latents_of_any_size_and_dtype_have_the_same_bits_alone(cpu, monkeypatch, rank, dtype):
    monkeypatch.setitem(globals(), "RANK", rank)
    for kv_dtype in (dtype, torch.bfloat16, torch.int8):
        case = Case([1, 5], [9, 300], dtype=dtype, kv_dtype=kv_dtype)
        exact, together = case.exact(), case.run(cpu.latent_attention)
        bound = 2e-6 if dtype == kv_dtype == torch.float32 else 0.05
        assert (together - exact).abs().max() < bound * exact.abs().max()
        table = case.batch.tables_N.tolist()[case.batch.table_ptr[1] :]
        for row in range(5):
            alone = AttentionBatch.build([0, 1], [296 + row], [table[: -(-(296 + row) // BLOCK)]], CPU)
            got = cpu.latent_attention(case.q[row + 1 : row + 2], case.cache, alone, case.weight, case.scale)
            assert torch.equal(got[0], together[row + 1])


# The choice between them.


def test_reference_takes_the_form_with_fewer_operations():
    """A pair takes 2 * 512 numbers absorbed and 256 expanded, which costs 512 * 256 for a key: from 171 queries on it pays."""
    weight = torch.empty(1, 256, 512, device="meta")
    assert reference.fewest_operations(170, weight, 1.0) is reference.absorbed
    assert reference.fewest_operations(171, weight, 1.0) is reference.expanded
    wide = torch.empty(1, 1024, 512, device="meta")
    assert reference.fewest_operations(100_000, wide, 1.0) is reference.absorbed


def test_measured_forms_go_by_the_tokens_of_each_sequence():
    """Not by those of the batch: sequences that decode stay absorbed, however many they are."""
    calls = []

    def noted(form):
        def run(q, cache, batch, *others):
            calls.append((form.__name__, [e - b for b, e in zip(batch.row_ptr, batch.row_ptr[1:], strict=False)]))
            return form(q, cache, batch, *others)

        return run

    registry = reference_registry()
    for item in registry._candidates["latent_attention"]:
        if item.name in ("absorbed", "expanded"):
            object.__setattr__(item, "call", noted(item.call))
    choice = {"latent_attention": ("absorbed", "absorbed", "absorbed", "expanded", "expanded")}
    functions = registry.select(CPU, torch.bfloat16, choice=choice)
    case = Case([1] * 40 + [33, 1, 200, 32], [3] * 40 + [40, 9, 200, 32])
    got = case.run(functions.latent_attention)
    assert calls == [("absorbed", [1] * 41 + [32]), ("expanded", [33, 200])]
    torch.testing.assert_close(got, case.run(reference.absorbed), rtol=1e-5, atol=1e-5)


# Moving on.


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_context_shift_turns_the_rotated_part_only(dtype, interleaved):
    """To where it would be had it been written there; latents keep their bits."""
    rope = RopeConfig(
        dim=ROTATED, parameters={"rope_type": "default", "rope_theta": 1e4}, max_position=64, interleaved=interleaved
    )
    latent = TokenTensor(shape=(RANK + ROTATED,), rope=rope, rope_begin=RANK, parts=(RANK, ROTATED))
    table = RotaryTable(rope, 64, torch.float32, CPU)
    manager = KVCacheManager(
        [CacheSpec(view=partial(LatentCache, rank=RANK), per_token={"latent": latent})],
        CacheSizes(num_blocks=6, max_model_len=64),
        block_size=BLOCK,
        dtype=dtype,
        device=CPU,
        rotary_table=lambda _: table,
    )
    (cache,) = manager.layers
    q, kv, norm = torch.zeros(8, 1, ROTATED), torch.randn(8, RANK + ROTATED), torch.ones(RANK)
    for slots, first in ((torch.arange(8), 20), (torch.arange(8) + 16, 12)):
        angles, transform = table.at(torch.arange(first, first + 8)), LatentTransform(norm, 1e-6, interleaved)
        reference.write_latent(q, kv, cache, slots, angles, transform=transform)
    manager.move([CacheMove("copy", [0, 1], [2, 3], -8)])
    moved, written = torch.tensor([2, 3]), torch.tensor([4, 5])
    assert torch.equal(cache.latent[2:4, :, :RANK], cache.latent[4:6, :, :RANK])
    if dtype == torch.int8:
        assert torch.equal(cache.latent_scale[2:4, :, 0], cache.latent_scale[4:6, :, 0])
    keys, exact = (cache.keys.load(blocks, torch.float32) for blocks in (moved, written))
    assert not torch.allclose(cache.keys.load(torch.tensor([0, 1]), torch.float32), exact, atol=0.1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.int8: 0.02}[dtype]
    assert (keys - exact).abs().max() < tolerance * exact.abs().max()
