"""The sampler: greedy, its candidate sets, its distribution, and that it is a pure function of seed and position."""

from __future__ import annotations

import math

import pytest
import torch

from labinfer.base.plan import NO_TOKEN, TokenSampling
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.reference.sampling import gumbel_noise, split_mix
from labinfer.launch.providers import make_registry, reference_registry
from labinfer.worker.host_copies import HostCopies
from labinfer.worker.logits_processors.constraints import min_tokens
from labinfer.worker.logits_processors.processor import SampledRow
from labinfer.worker.sampler import Sampler, measure

MASK = (1 << 64) - 1


def reference_split_mix(state: int) -> int:
    """SplitMix64 in Python's own whole numbers (Steele, Lea & Flood 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def row(position: int = 0, temperature: float = 1.0, mask: bytes = b"", **sampling) -> SampledRow:
    """A sequence whose token at ``position`` is to be chosen."""
    wanted = TokenSampling(num_prompt_tokens=position, temperature=temperature, **sampling)
    return SampledRow(wanted, [0] * position, mask)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def sampler(request, load_functions) -> Sampler:
    """Without processors, over torch's functions and over the compiled ones."""
    compiled = load_functions() if request.param == "cpu" else None
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled)])
    return Sampler({}, registry.select(torch.device("cpu"), torch.float32), HostCopies())


@pytest.fixture
def drawn(sampler):
    """One token for each of ``count`` seeds: ``drawn(logits_V, count, **params)``."""

    def draw(logits_V: torch.Tensor, count: int, **params) -> list[int]:
        return sampler(logits_V.expand(count, -1), [row(seed=seed, **params) for seed in range(count)])

    return draw


@pytest.mark.parametrize("state", [0, 1, 2, 12345, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0xDEADBEEFCAFEF00D])
def test_split_mix_is_split_mix(state):
    assert split_mix(torch.tensor(signed(state))).item() & MASK == reference_split_mix(state)


def test_split_mix_gives_the_published_outputs_of_seed_0():
    outputs, state = [], 0
    for _ in range(3):
        outputs.append(split_mix(torch.tensor(signed(state))).item() & MASK)
        state = (state + 0x9E3779B97F4A7C15) & MASK
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 3), (2**63 - 1, 100_000)])
def test_noise_is_the_documented_hash_of_seed_position_and_token(seed, position):
    key = reference_split_mix((reference_split_mix(seed) + position) & MASK)
    expected = []
    for token in (0, 1, 151_935):
        bits = reference_split_mix((key + token * 0x9E3779B97F4A7C15) & MASK)
        expected.append(-math.log(-math.log(((bits >> 11) + 0.5) * 2.0**-53)))
    assert gumbel_noise(seed, position, torch.tensor([0, 1, 151_935])).tolist() == pytest.approx(expected, rel=1e-12)


def test_noise_of_a_token_does_not_depend_on_the_others():
    ids = torch.tensor([5, 900, 17])
    assert torch.equal(gumbel_noise(3, 4, ids), gumbel_noise(3, 4, torch.arange(1000))[ids])


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(1, 2, torch.arange(200_000))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_noise_changes_with_seed_and_with_position():
    ids = torch.arange(1000)
    base = gumbel_noise(1, 2, ids)
    for other in (gumbel_noise(2, 2, ids), gumbel_noise(1, 3, ids), gumbel_noise(2, 1, ids)):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.15


def test_temperature_0_takes_the_largest_logit_whatever_the_rest_says(sampler):
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    rows = [row(seed, 0.0, top_p=0.1, top_k=3, seed=seed) for seed in range(6)]
    assert sampler(logits_BV, rows) == logits_BV.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_may_be_of_any_float_type(sampler, dtype):
    logits_BV = torch.tensor([[0.0, 30.0, 0.0], [9.0, -30.0, -30.0]], dtype=dtype)
    assert sampler(logits_BV, [row(0, 0.0), row()]) == [1, 0]


def test_many_seeds_follow_the_softmax(drawn):
    logits_V, count, temperature = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5]), 4000, 0.8
    counts = torch.bincount(torch.tensor(drawn(logits_V, count, temperature=temperature)), minlength=6)
    expected = (logits_V / temperature).softmax(-1) * count
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand


def test_many_positions_follow_the_softmax_too(sampler):
    logits_V, count = torch.tensor([1.0, 0.0, -1.0]), 4000
    tokens = sampler(logits_V.expand(count, -1), [row(position, seed=42) for position in range(count)])
    expected = logits_V.softmax(-1) * count
    counts = torch.bincount(torch.tensor(tokens), minlength=3)
    assert ((counts - expected) ** 2 / expected).sum().item() < 13.8


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_draws_from_the_k_largest_and_from_all_of_them(drawn, top_k):
    logits_V = torch.tensor([0.3, 0.1, 0.5, 0.2, 0.4, 0.0, 0.45])
    allowed = set(logits_V.argsort(descending=True)[:top_k].tolist())
    assert set(drawn(logits_V, 300, top_k=top_k)) == allowed


@pytest.mark.parametrize("top_k", [0, -1, 7, 1000])
def test_top_k_that_is_off_or_larger_than_the_vocabulary_keeps_all(drawn, top_k):
    logits_V = torch.zeros(7)
    assert drawn(logits_V, 100, top_k=top_k) == drawn(logits_V, 100)
    assert set(drawn(logits_V, 300, top_k=top_k)) == set(range(7))


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.01, {2}), (0.39, {2}), (0.41, {2, 0}), (0.75, {2, 0, 3}), (0.95, {2, 0, 3, 1})]
)
def test_top_p_draws_from_the_smallest_set_that_is_enough(drawn, top_p, allowed):
    logits_V = torch.tensor([0.3, 0.1, 0.4, 0.2]).log()
    assert set(drawn(logits_V, 400, top_p=top_p)) == allowed


def test_top_p_counts_within_what_top_k_left(drawn):
    logits_V = torch.tensor([0.3, 0.1, 0.4, 0.2]).log()  # the two largest are 4/7 and 3/7 of what is left
    assert set(drawn(logits_V, 300, top_k=2, top_p=0.5)) == {2}
    assert set(drawn(logits_V, 300, top_k=2, top_p=0.6)) == {2, 0}


def test_top_p_is_taken_after_temperature(drawn):
    logits_V = torch.tensor([0.6, 0.4]).log()
    assert set(drawn(logits_V, 200, top_p=0.65)) == {0, 1}
    assert set(drawn(logits_V, 200, top_p=0.65, temperature=0.5)) == {0}


def test_ties_are_broken_by_token_id(drawn):
    assert set(drawn(torch.zeros(50), 300, top_k=2)) == {0, 1}


def test_top_k_of_everything_draws_the_same_as_no_filter(drawn):
    """A candidate's noise is its own, so a filter changes a draw only by forbidding it."""
    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(1))
    free, filtered = drawn(logits_V, 300), drawn(logits_V, 300, top_k=19)
    forbidden = int(logits_V.argmin())
    assert all(a == b for a, b in zip(free, filtered, strict=True) if a != forbidden)


def test_row_draws_the_same_in_every_batch(sampler):
    logits_BV = torch.randn(8, 100, generator=torch.Generator().manual_seed(2))
    rows = [row(5 * i, 0.7 if i % 3 else 0.0, top_p=0.9, seed=i * 11) for i in range(8)]
    together = sampler(logits_BV, rows)
    backwards = sampler(logits_BV.flip(0), rows[::-1])
    alone = [sampler(logits_BV[i : i + 1], [rows[i]])[0] for i in range(8)]
    assert together == backwards[::-1] == alone


def test_same_call_twice_draws_the_same(drawn):
    logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    first = drawn(logits_V, 20)
    torch.manual_seed(1)  # torch's own generators have no say
    assert drawn(logits_V, 20) == first


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e-320])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_smallest_temperatures_are_greedy_and_never_fail(drawn, temperature, top_p):
    logits_V = torch.tensor([3.0, 9.0, 8.0, -5.0])
    assert drawn(logits_V, 20, temperature=temperature, top_p=top_p) == [1] * 20


# Masks: bit i of the little-endian bits allows token i.


def mask_of(*tokens: int) -> bytes:
    number = sum(1 << token for token in tokens)
    return number.to_bytes(max(tokens) // 8 + 1, "little")


@pytest.mark.pairwise
@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("tokens", [(0,), (7, 8), (3, 17, 49)])
@pytest.mark.parametrize("sets", [{}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.9}, {"typical_p": 0.2}])
def test_only_tokens_of_the_mask_are_chosen(sampler, temperature, tokens, sets):
    logits_BV = 5 * torch.randn(40, 50, generator=torch.Generator().manual_seed(5))
    rows = [row(seed, temperature, mask_of(*tokens), seed=seed, **sets) for seed in range(40)]
    assert set(sampler(logits_BV, rows)) <= set(tokens)


def test_greedy_takes_the_largest_that_is_allowed(sampler):
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(6))
    allowed = [2, 9, 31, 48]
    expected = [allowed[int(logits_V[allowed].argmax())] for logits_V in logits_BV]
    assert sampler(logits_BV, [row(0, 0.0, mask_of(*allowed))] * 6) == expected


def test_mask_that_allows_all_changes_no_draw(drawn):
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(7))
    assert drawn(logits_V, 100, mask=b"\xff" * 7) == drawn(logits_V, 100)


def test_mask_changes_a_draw_only_by_forbidding_it(drawn):
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(8))
    allowed = set(range(0, 50, 2))
    free, masked = drawn(logits_V, 300), drawn(logits_V, 300, mask=mask_of(*allowed))
    assert set(masked) <= allowed
    assert all(a == b for a, b in zip(free, masked, strict=True) if a in allowed)


def test_rows_beside_a_masked_one_choose_what_they_would_alone(sampler):
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(9))
    plain = [row(0, 0.8 * (b % 2), seed=b) for b in range(6)]
    mixed = [row(0, 0.8 * (b % 2), mask_of(b) if b in (1, 4) else b"", seed=b) for b in range(6)]
    alone = sampler(logits_BV, plain)
    assert sampler(logits_BV, mixed) == [b if b in (1, 4) else alone[b] for b in range(6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masked_logits_may_be_of_any_float_type(sampler, dtype):
    logits_BV = torch.tensor([[0.0, 30.0, 1.0]], dtype=dtype)
    assert sampler(logits_BV, [row(0, 0.0, mask_of(0, 2))]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("largest", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_do_not_get_past_the_mask(sampler, temperature, largest):
    logits_BV = torch.full((3, 50), largest)
    logits_BV[1, 20] = 1.0
    logits_BV[2, :40] = 1.0
    found = sampler(logits_BV, [row(0, temperature, mask_of(20, 45))] * 3)
    assert set(found) <= {20, 45}


class TestMaskAndProcessors:
    """A request's logits processors and the mask of its form hold together; nothing is sampled where they leave no token."""

    @pytest.fixture
    def sampler(self):
        def forbid(logits_V, tokens, row):
            logits_V[tokens] = float("-inf")

        def want(logits_V, tokens, row):
            logits_V[tokens] += 1000.0

        def allow(logits_V, tokens, row):
            logits_V[tokens] = 1000.0

        def keep_largest(logits_V, value, row):
            logits_V[logits_V < logits_V.max()] = float("-inf")

        def divide(logits_V, value, row):
            logits_V[0] /= value

        processors = {"forbid": forbid, "want": want, "allow": allow, "keep_largest": keep_largest, "divide": divide}
        functions = reference_registry().select(torch.device("cpu"), torch.float32)
        return Sampler(processors | {"min_tokens": min_tokens}, functions, HostCopies())

    def choose(self, sampler, mask, *processors, temperature=0.0):
        logits_BV = torch.arange(50.0)[None]
        return sampler(logits_BV, [row(0, temperature, mask, processors=list(processors))])[0]

    def test_what_both_allow_is_chosen(self, sampler):
        assert self.choose(sampler, mask_of(10, 20, 30), ("forbid", [30])) == 20

    def test_processor_cannot_bring_in_what_the_mask_forbids(self, sampler):
        assert self.choose(sampler, mask_of(10, 20), ("want", [40, 10])) == 10
        assert self.choose(sampler, mask_of(10, 20), ("allow", [40])) == 20

    def test_processor_that_keeps_the_largest_keeps_what_the_mask_allows(self, sampler):
        assert self.choose(sampler, mask_of(10, 20), ("keep_largest", 0)) == 20

    def test_processor_that_makes_logits_nan_is_named(self, sampler):
        with pytest.raises(AssertionError, match="the logits processors want, divide make logits NaN"):
            self.choose(sampler, b"", ("want", [3]), ("divide", 0.0))

    @pytest.mark.parametrize("forbidden", [[10, 20], list(range(50))])
    @pytest.mark.parametrize("mask", [b"", mask_of(10, 20)])
    @pytest.mark.parametrize("temperature", [0.0, 1e-3])
    def test_no_constraint_is_dropped_where_nothing_is_left(self, sampler, mask, forbidden, temperature):
        """Also where the row beside it has a token."""
        processors = [("forbid", forbidden)] if mask else [("forbid", list(range(50)))]
        blocked = row(0, temperature, mask, processors=processors)
        free = row(0, temperature, mask_of(7))
        assert sampler(torch.arange(50.0).repeat(3, 1), [free, blocked, free]) == [7, NO_TOKEN, 7]
        beam = row(0, temperature, mask, processors=processors, after_processors=True)
        logprobs_BV = torch.arange(50.0).repeat(2, 1)
        sampler.process_beams(logprobs_BV, [row(), beam])
        assert torch.equal(logprobs_BV[0], torch.arange(50.0)) and (logprobs_BV[1] == float("-inf")).all()

    def test_end_comes_before_min_tokens_where_the_form_allows_nothing_else(self, sampler):
        ends = [("min_tokens", [5, [10]])]
        assert sampler(torch.arange(50.0)[None], [row(0, 0.0, mask_of(10, 20), processors=ends)]) == [20]
        both = [("forbid", [20]), *ends]
        assert sampler(torch.arange(50.0)[None], [row(0, 0.0, mask_of(10, 20), processors=both)]) == [10]
        alone = row(0, 0.0, processors=[("forbid", [t for t in range(50) if t != 10]), *ends])
        assert sampler(torch.arange(50.0)[None], [alone]) == [NO_TOKEN]

    @pytest.mark.parametrize("mask", [b"", mask_of(10, 20)])
    def test_token_that_the_model_never_says_comes_where_nothing_else_may(self, sampler, mask):
        logits_V = torch.arange(50.0)
        logits_V[10] = float("-inf")
        forbidden = [("forbid", [t for t in range(50) if t != 10])]
        assert sampler(logits_V[None], [row(0, 0.0, mask, processors=forbidden)]) == [10]


def test_measured_tokens_have_their_logprob_rank_and_likeliest_tokens():
    logprobs = torch.randn(3, 40).log_softmax(1)
    token_ids = [7, 0, NO_TOKEN]
    measured = measure(logprobs, token_ids, [2, 0, 3], with_ranks=True, copies=HostCopies())
    for row_V, token_id, top, got in zip(logprobs, token_ids, [2, 0, 3], measured, strict=True):
        likeliest = row_V.argsort(descending=True)[:top].tolist()
        assert got.token_id == token_id and got.logprob == row_V[token_id].item()
        assert got.rank == (row_V > row_V[token_id]).sum() + 1
        assert got.top == {other: row_V[other].item() for other in likeliest}
    assert [each.rank for each in measure(logprobs, token_ids, [1, 1, 1], copies=HostCopies())] == [0, 0, 0]
