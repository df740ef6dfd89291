"""Logits processors and candidate sets against those of Transformers, and how a registered one is found."""

from __future__ import annotations

import msgspec
import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import Request
from labinfer.engine.sequence import token_sampling
from labinfer.functions.reference.sampling import candidates
from labinfer.launch.providers import reference_registry
from labinfer.worker.host_copies import HostCopies
from labinfer.worker.logits_processors.processor import SampledRow, check_logits_processors
from labinfer.worker.sampler import Sampler

VOCAB = 50
PROMPT, OUTPUT = [3, 4, 4, 5, 9], [7, 8, 7, 7, 3]


def row(bad_token_ids=(), eos=(1,), **params) -> SampledRow:
    request = Request(
        key=0,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(**params),
        bad_token_ids=tuple(map(tuple, bad_token_ids)),
    )
    return SampledRow(token_sampling(request, 0, sorted(request.ends(frozenset(eos)))), PROMPT + OUTPUT)


def nested(depth: int) -> dict:
    """So many objects inside each other."""
    found: dict = {}
    for _ in range(depth - 1):
        found = {"x": found}
    return found


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def processed(one: SampledRow, logits_V: torch.Tensor) -> torch.Tensor:
    """Logits of a beam, which are processed in place."""
    functions = reference_registry().select(torch.device("cpu"), torch.float32)
    beam = SampledRow(msgspec.structs.replace(one.sampling, after_processors=True), one.token_ids, one.mask)
    logits_BV = logits_V[None].clone()
    Sampler(REGISTRY.parts("logits_processor"), functions, HostCopies()).process_beams(logits_BV, [beam])
    return logits_BV[0]


def theirs(processor, logits_V: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    return processor(torch.tensor([token_ids]), logits_V.clone()[None])[0]


def test_plain_request_has_no_processors():
    assert row(temperature=0.7, top_p=0.9, min_tokens=0, seed=3).sampling.processors == []


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_transformers(penalty):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits(), PROMPT + OUTPUT)
    assert torch.equal(processed(row(repetition_penalty=penalty), logits()), expected)


def test_presence_and_frequency_penalties_count_the_answer_only():
    changed = logits() - processed(row(presence_penalty=0.5, frequency_penalty=0.25), logits())
    expected = torch.zeros(VOCAB)
    expected[7], expected[8], expected[3] = 0.5 + 0.75, 0.75, 0.75
    assert torch.allclose(changed, expected, atol=1e-6)


def test_penalties_of_an_empty_answer_change_nothing():
    request = Request(
        key=0, prompt_token_ids=PROMPT, sampling=SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    )
    empty = SampledRow(token_sampling(request, 0, []), PROMPT)
    assert torch.equal(processed(empty, logits()), logits())


def test_bad_words_are_transformers():
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor

    words = [[11], [3, 12], [7, 3, 13], [8, 14]]
    expected = theirs(NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=1), logits(), OUTPUT)
    assert torch.equal(processed(row(bad_token_ids=words), logits()), expected)
    assert (expected == float("-inf")).nonzero().flatten().tolist() == [11, 12, 13]


def test_logit_bias_is_added():
    changed = processed(row(logit_bias={4: 2.5, 9: -100.0}), logits()) - logits()
    assert changed[4] == pytest.approx(2.5, abs=1e-5) and changed[9] == pytest.approx(-100, abs=1e-4)
    assert changed.count_nonzero() == 2


def test_only_allowed_tokens_are_left():
    result = processed(row(allowed_token_ids=[5, 6]), logits())
    assert result[[5, 6]].tolist() == logits()[[5, 6]].tolist()
    assert torch.isfinite(result).sum() == 2


@pytest.mark.parametrize(("min_tokens", "masked"), [(0, []), (5, []), (6, [1, 2, 20])])
def test_before_min_tokens_nothing_ends_the_answer(min_tokens, masked):
    result = processed(row(min_tokens=min_tokens, stop_token_ids=[20], eos=(1, 2)), logits())
    assert (result == float("-inf")).nonzero().flatten().tolist() == masked


def test_min_tokens_with_nothing_that_could_end_it():
    assert row(min_tokens=3, ignore_eos=True).sampling.processors == []


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5], "bad_token_ids": [[5]]},
        {"allowed_token_ids": [3], "bad_token_ids": [[7, 3, 3]]},
        {"allowed_token_ids": [1], "min_tokens": 6},
        {"allowed_token_ids": [1, 5], "min_tokens": 6, "bad_token_ids": [[5]]},
        {"allowed_token_ids": [5], "logits_processors": {"thinking_budget": [2, [], [30], []]}},
        {"bad_token_ids": [[30]], "logits_processors": {"thinking_budget": [2, [], [30], []]}},
    ],
)
def test_constraints_that_contradict_each_other_leave_no_token(fields):
    assert (processed(row(**fields), logits()) == float("-inf")).all()


def test_bias_that_forbids_every_allowed_token_leaves_them():
    result = processed(row(allowed_token_ids=[5, 6], logit_bias={5: -100.0, 6: -100.0}), logits())
    assert torch.isfinite(result).nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "warper", "value"),
    [
        ("min_p", "MinPLogitsWarper", 0.2),
        ("typical_p", "TypicalLogitsWarper", 0.6),
        ("typical_p", "TypicalLogitsWarper", 0.95),
        ("top_p", "TopPLogitsWarper", 0.7),
        ("top_k", "TopKLogitsWarper", 5),
    ],
)
def test_candidate_sets_are_transformers(name, warper, value, seed):
    from transformers.generation import logits_process

    kept = torch.isfinite(theirs(getattr(logits_process, warper)(value), logits(seed).double(), PROMPT))
    ours = candidates(logits(seed).double(), row(temperature=1.0, **{name: value}).sampling)
    assert sorted(ours.tolist()) == kept.nonzero().flatten().tolist()


def test_sets_narrow_one_after_another():
    params = row(temperature=1.0, top_k=10, top_p=0.9, min_p=0.05, typical_p=0.8).sampling
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )

    kept = logits().double()
    for warper in (TopKLogitsWarper(10), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05), TypicalLogitsWarper(0.8)):
        kept = theirs(warper, kept, PROMPT)
    ours = sorted(candidates(logits().double(), params).tolist())
    assert ours == torch.isfinite(kept).nonzero().flatten().tolist()
    assert len(ours) < 10


def test_registered_processor_is_found(add_part):
    def no_repeat(logits_V, value, row):
        logits_V[row.token_ids[-value:]] = float("-inf")

    add_part("logits_processor", "no_repeat", no_repeat)
    result = processed(row(logits_processors={"no_repeat": 3}), logits())
    assert (result == float("-inf")).nonzero().flatten().tolist() == [3, 7]
    check_logits_processors({"no_repeat": 3}, PROMPT, VOCAB)


@pytest.mark.parametrize("name", ["nonsense", "logit_bias", "bad_words", "temperature"])
def test_only_processors_that_no_field_asks_for_can_be_named(name):
    with pytest.raises(UserError, match=f"unknown logits processor '{name}'; available: thinking_budget$"):
        check_logits_processors({name: 1}, PROMPT, VOCAB)


def test_processor_that_makes_logits_nan_is_refused(add_part):
    add_part("logits_processor", "scaled", lambda logits_V, value, row: logits_V.div_(value))
    check_logits_processors({"scaled": 2.0}, PROMPT, VOCAB)
    with pytest.raises(UserError, match="the logits processor scaled rejects 0.0: .*it makes logits NaN"):
        check_logits_processors({"scaled": 0.0}, PROMPT, VOCAB)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"typical_p": 0}, "typical_p must be above 0"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n must be"),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is more than max_tokens 8"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3"),
        ({"logit_bias": {"3": 1}}, "logit_bias must map"),
        ({"bad_words": ["a", ""]}, "bad_words: a string must have 1 to 256"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"stop_token_ids": "a"}, "stop_token_ids"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"logits_processors": {"x": object()}}, "cannot be sent"),
        ({"logits_processors": {"x": 2**70}}, "cannot be sent"),
        ({"logits_processors": nested(65)}, "nested more than 64 deep"),
        ({"logits_processors": nested(970)}, "nested more than 64 deep"),
        ({"logits_processors": nested(100_000)}, "nested more than 64 deep"),
    ],
)
def test_out_of_bounds_is_refused_by_name(fields, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("budget", "opening", "output", "forced"),
    [
        (2, [20], [20, 7], None),
        (2, [20], [20, 7, 8], 30),
        (2, [20], [20, 7, 8, 30], 31),
        (2, [20], [20, 7, 8, 30, 31], None),
        (2, [20], [20, 30, 31, 7, 8, 9], None),
        (2, [20], [20, 30, 7, 30, 31, 8], None),
        (2, [20], [7, 8, 9, 7], None),
        (2, [20], [7, 20, 8, 9], 30),
        (2, [], [7], None),
        (2, [], [7, 8], 30),
        (2, [], [7, 30], 31),
        (2, [20, 21], [20, 21, 7, 8], 30),
        (2, [20, 21], [20, 20, 21, 7, 8], 30),
        (2, [20], [20, 40, 7, 8], None),
        (2, [20], [40, 20, 7, 8], 30),
        (0, [20, 30], [20, 30], 30),
    ],
    ids=str,
)
def test_thought_is_closed_where_its_budget_is_spent(budget, opening, output, forced):
    """What ends the opening mark is no part of the closing one, and a call, which 40 begins, is left alone."""
    sampling = row(logits_processors={"thinking_budget": [budget, opening, [30, 31], [40]]}).sampling
    changed_V = processed(SampledRow(sampling, PROMPT + output), logits())
    expected_V = logits()
    if forced is not None:
        expected_V = torch.full((VOCAB,), float("-inf"))
        expected_V[forced] = logits()[forced]
    assert torch.equal(changed_V, expected_V)


@pytest.mark.parametrize(
    "value",
    [
        3,
        [1, [2]],
        [-1, [2], [3], []],
        [1, [2], [], []],
        [1, [2], [VOCAB], []],
        [1, ["a"], [3], []],
        [1, [2], [3], ["a"]],
    ],
)
def test_budget_of_thoughts_that_makes_no_sense_is_refused(value):
    with pytest.raises(UserError, match="thinking_budget rejects"):
        check_logits_processors({"thinking_budget": value}, PROMPT, VOCAB)
