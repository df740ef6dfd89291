"""Functions that choose tokens, compiled and for several rows at once: the very tokens of the reference, over odd sizes, ties and
broken rows."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labinfer.base.draw_params import DrawParams
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.cpu.sampling import CpuSampling
from labinfer.functions.cuda import sampling as by_rows
from labinfer.functions.draw import Draw
from labinfer.functions.reference import sampling
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.launch.providers import make_registry
from labinfer.native import compiler

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def cpu(compiled_functions) -> CpuSampling:
    return CpuSampling(compiled_functions)


def row_of(kind: str, size: int, seed: int) -> torch.Tensor:
    """Logits of one row (V)."""
    generator = torch.Generator().manual_seed(seed)
    normal_V, chosen_V = (torch.randn(size, generator=generator) * 3, torch.rand(size, generator=generator))
    return {
        "normal": normal_V,
        "flat": normal_V * 0.01,
        "peaked": normal_V + 20 * (chosen_V > 0.99),
        "ties": (normal_V * 2).round() / 2,
        "equal": torch.zeros(size),
        "zeros": torch.where(chosen_V > 0.5, 0.0, -0.0),
        "masked": normal_V.masked_fill(chosen_V > 0.1, -INF),
        "nearly all masked": normal_V.masked_fill(torch.arange(size) != size // 2, -INF),
        "large": normal_V * 1e4,
        "ascending": normal_V.sort().values,
    }[kind]


def make_draw(row: int, position: int, temperature: float = 1.0, **params) -> Draw:
    return Draw(row, position, DrawParams(temperature=temperature, **params))


KINDS = ["normal", "flat", "peaked", "ties", "equal", "zeros", "masked", "nearly all masked", "large", "ascending"]
SIZES = [1, 2, 15, 16, 17, 31, 33, 100, 257, 1000, 4099]
DRAWS = st.builds(
    make_draw,
    row=st.just(0),
    position=st.integers(0, 100_000),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([1.0, 0.7, 1e-5, 2.3, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 50, 99, 100, 256, 1000, 4098, 10**6]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.1, 1e-300, 1 - 2**-53, 0.999999]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0, 1e-10, 1e-300]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.9]),
)


@pytest.mark.parametrize("num_examples", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_draws_are_the_references(cpu, num_examples):
    @settings(max_examples=num_examples, derandomize=True)
    @given(
        kind=st.sampled_from(KINDS),
        size=st.sampled_from(SIZES),
        dtype=st.sampled_from(DTYPES),
        logits_seed=st.integers(0, 20),
        draws=st.lists(DRAWS, min_size=1, max_size=4),
    )
    def check(kind, size, dtype, logits_seed, draws):
        logits_BV = row_of(kind, size, logits_seed).to(dtype)[None]
        assert cpu.sample(logits_BV, draws) == sampling.sample(logits_BV, draws)

    check()


@pytest.mark.parametrize("num_examples", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_draws_of_several_rows_are_the_references(monkeypatch, num_examples):
    @settings(max_examples=num_examples, derandomize=True)
    @given(
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
        size=st.sampled_from(SIZES),
        likeliest=st.sampled_from([1, 20, 1024]),
        dtype=st.sampled_from(DTYPES),
        logits_seed=st.integers(0, 20),
        draws=st.lists(DRAWS, min_size=6, max_size=6),
        broken=st.sampled_from([None, INF, -INF, NAN]),
    )
    def check(kinds, size, likeliest, dtype, logits_seed, draws, broken):
        monkeypatch.setattr(by_rows, "LIKELIEST", likeliest)
        monkeypatch.setattr(by_rows, "ROW_BYTES", 3 * 8 * size)
        logits_BV = torch.stack([row_of(kind, size, logits_seed) for kind in kinds]).to(dtype)
        if broken is not None:
            logits_BV[0, size // 2 :] = broken
        draws = [msgspec.structs.replace(draw, row=row) for row, draw in zip(range(len(kinds)), draws, strict=False)]
        assert by_rows.sample(logits_BV, draws) == sampling.sample(logits_BV, draws)

    check()


@pytest.mark.parametrize("broken", [INF, NAN])
def test_rows_of_no_numbers_are_the_references(broken):
    logits_BV = row_of("normal", 3000, 1).repeat(2, 1)
    logits_BV[1, 2000] = broken
    draws = [make_draw(row=row, position=1, top_k=20, top_p=0.9, min_p=0.01) for row in (0, 1)]
    assert by_rows.sample(logits_BV, draws) == sampling.sample(logits_BV, draws)


def test_top_p_of_many_largest_is_a_part_of_all_of_them():
    logits_BV = row_of("flat", 5000, 1)[None]
    draws = [make_draw(row=0, position=p, top_k=3000, top_p=0.3) for p in range(40)]
    assert by_rows.sample(logits_BV, draws) == sampling.sample(logits_BV, draws)


def test_most_draws_are_made_without_the_reference(monkeypatch):
    """Those of usual settings."""
    monkeypatch.setattr(by_rows, "sample_one_by_one", lambda logits_BV, draws: [] if not draws else 1 / 0)
    logits_BV = torch.stack([row_of("normal", 40_000, seed) for seed in range(4)])
    settings = ({"top_k": 20, "top_p": 0.8}, {"top_p": 0.5}, {"min_p": 0.1}, {})
    draws = [make_draw(row=row, position=9, temperature=0.7, **own) for row, own in enumerate(settings)]
    assert by_rows.sample(logits_BV, draws) == sampling.sample(logits_BV, draws)


@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "dtype"), [("normal", torch.float32), ("ties", torch.bfloat16)])
@pytest.mark.parametrize(
    "sets", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 300, "top_p": 0.8}], ids=str
)
@pytest.mark.parametrize("num_seeds", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_many_seeds_draw_the_references_tokens(cpu, kind, dtype, sets, num_seeds):
    logits_BV = row_of(kind, 1003, 1).to(dtype)[None]
    draws = [make_draw(row=0, position=seed % 7, seed=seed, temperature=1.3, **sets) for seed in range(num_seeds)]
    tokens = cpu.sample(logits_BV, draws)
    assert tokens == sampling.sample(logits_BV, draws)
    assert len(set(tokens)) > 2


@pytest.mark.parametrize("sets", [{}, {"top_k": 50, "top_p": 0.9}, {"top_k": 20_000}, {"top_p": 0.95}], ids=str)
@pytest.mark.parametrize("temperature", [0.8, 30.0])
def test_large_vocabulary(cpu, sets, temperature):
    """Also over threads that share a row: sums of whole numbers are the same however they are split."""
    torch.manual_seed(0)
    logits_BV = 3 * torch.randn(2, 151_936)
    draws = [make_draw(row=n % 2, position=n, seed=5, temperature=temperature, **sets) for n in range(6)]
    expected = sampling.sample(logits_BV, draws)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            assert cpu.sample(logits_BV, draws) == expected
            assert [cpu.sample(logits_BV, [draw])[0] for draw in draws] == expected
            assert torch.equal(cpu.argmax(logits_BV), logits_BV.argmax(-1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_argmax_takes_the_lowest_id_among_equals(cpu, dtype, size):
    for kind in KINDS:
        for threads in (1, 4):
            logits_BV = torch.stack([row_of(kind, size, seed) for seed in range(5)]).to(dtype)
            first = [(row == row.max()).nonzero()[0].item() for row in logits_BV]
            assert sampling.argmax(logits_BV).tolist() == first
            before = torch.get_num_threads()
            try:
                torch.set_num_threads(threads)
                assert cpu.argmax(logits_BV).tolist() == first
                assert cpu.argmax(logits_BV[2:3]).tolist() == first[2:3]
            finally:
                torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ({40: NAN, 70: NAN}, 40),
        ({0: NAN, 5: INF}, 0),
        ({50: INF, 33: NAN}, 33),
        ({7: INF, 99: INF}, 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("sets", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}], ids=str)
def test_logit_that_is_no_finite_number_is_taken(cpu, values, token, sets):
    logits_BV = torch.zeros(1, 100)
    for index, value in values.items():
        logits_BV[0, index] = value
    for functions in (cpu, sampling):
        assert functions.argmax(logits_BV).tolist() == [token]
        assert functions.sample(logits_BV, [make_draw(row=0, position=3, **sets)]) == [token]


@pytest.mark.parametrize("sets", [{}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}], ids=str)
def test_row_without_any_token_left_gives_the_first(cpu, sets):
    logits_BV = torch.full((1, 100), -INF)
    for functions in (cpu, sampling):
        assert functions.argmax(logits_BV).tolist() == [0]
        assert functions.sample(logits_BV, [make_draw(row=0, position=3, **sets)]) == [0]


@pytest.mark.parametrize("functions", ["cpu", "reference"])
@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.7, 0.9])
def test_where_the_mass_of_equal_tokens_just_reaches_top_p_it_ends(cpu, functions, top_p):
    """Of ten equal ones three have 0.3, also where 0.1 + 0.1 + 0.1 is not 0.3."""
    sample = {"cpu": cpu, "reference": sampling}[functions].sample
    draws = [make_draw(row=0, position=0, seed=seed, top_p=top_p) for seed in range(400)]
    assert set(sample(torch.zeros(1, 10), draws)) == set(range(round(10 * top_p)))


def test_draws_follow_the_softmax_of_the_candidates(cpu):
    logits_V, count = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5]), 6000
    tokens = cpu.sample(
        logits_V[None], [make_draw(row=0, position=4, seed=seed, temperature=0.8, top_k=4) for seed in range(count)]
    )
    kept = [0, 1, 4, 5]
    counts = torch.bincount(torch.tensor(tokens), minlength=6)
    expected = (logits_V[kept] / 0.8).softmax(-1) * count
    assert counts.sum() == counts[kept].sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum().item() < 16.3  # 3 degrees: once in a thousand


def test_rows_that_do_not_lie_one_after_another(cpu):
    logits_BV = torch.randn(100, 6, generator=torch.Generator().manual_seed(0)).T
    assert torch.equal(cpu.argmax(logits_BV), logits_BV.argmax(-1))
    draws = [make_draw(row=row, position=1, seed=9) for row in (5, 0, 5)]
    assert cpu.sample(logits_BV, draws) == sampling.sample(logits_BV, draws)


def test_tokens_of_accelerators_are_drawn_by_the_compiled_function(compiled_functions):
    provider, device = CpuProvider(), torch.device("meta")
    provider._host_library = compiled_functions
    registry = make_registry([ReferenceProvider(), provider])
    sample = registry.select(device, torch.float32).sample
    logits, draws = torch.randn(3, 100), [make_draw(2, 5), make_draw(0, 6, 0.7, top_p=0.8)]
    assert sample.__func__ is CpuSampling.sample_on_host
    assert sample(logits, draws) == sampling.sample(logits, draws)
    functions = {name for name, items in registry._candidates.items() if any(item.name == "host" for item in items)}
    assert functions == {"sample"}
