"""Constraints of a request that contradict each other are refused before anything runs, or break the answer off."""

from __future__ import annotations

import pytest

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParameter, SamplingParams
from labinfer.engine.constraints import check_constraints, no_token_left
from labinfer.engine.request import Request

VOCAB = 50
EOS = [1, 2]
BUDGET = {"thinking_budget": [8, [20], [30, 31], []]}


def request(bad=(), **fields) -> Request:
    return Request(key=0, prompt_token_ids=[3], sampling=SamplingParams(**fields), bad_token_ids=tuple(map(tuple, bad)))


def mask_of(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(VOCAB // 8 + 1, "little")


@pytest.mark.parametrize(
    ("fields", "mask", "message"),
    [
        (
            {"allowed_token_ids": [5, 6], "bad": [[5], [6]]},
            (),
            "allowed_token_ids and bad_words together allow no token",
        ),
        ({"bad": [[token] for token in range(VOCAB)]}, (), "bad_words together allow no token"),
        ({"allowed_token_ids": [1, 2], "min_tokens": 2}, (), "allowed_token_ids allow only end-of-sequence tokens"),
        ({"allowed_token_ids": [1, 7], "min_tokens": 2, "bad": [[7]]}, (), "which min_tokens 2 forbids"),
        ({"allowed_token_ids": [5]}, (6, 7), "forbid every token with which structured_outputs can start"),
        (
            {"bad": [[6], [7]]},
            (6, 7),
            "bad_words forbid every token with which structured_outputs can start",
        ),
        ({"allowed_token_ids": [5], "logits_processors": BUDGET}, (), "forbid token 30, which ends the reasoning"),
        ({"bad": [[31]], "logits_processors": BUDGET}, (), "bad_words forbid token 31"),
    ],
)
def test_contradiction_is_refused(fields, mask, message):
    with pytest.raises(UserError, match=message):
        check_constraints(request(**fields), EOS, VOCAB, mask_of(*mask) if mask else b"")


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, ()),
        ({"allowed_token_ids": [5, 6], "bad": [[5], [6, 6]]}, ()),
        ({"allowed_token_ids": [1]}, ()),
        ({"allowed_token_ids": [1, 5], "min_tokens": 2}, ()),
        ({"allowed_token_ids": [1], "min_tokens": 2}, (1, 7)),
        ({"allowed_token_ids": [6]}, (6, 7)),
        ({"allowed_token_ids": [5, 30, 31], "logits_processors": BUDGET}, ()),
        ({"logits_processors": BUDGET, "bad": [[29]]}, ()),
        ({"allowed_token_ids": [5], "logit_bias": {5: -100.0}}, ()),
    ],
)
def test_constraints_that_leave_a_token_are_taken(fields, mask):
    check_constraints(request(**fields), EOS, VOCAB, mask_of(*mask) if mask else b"")


def test_error_names_the_constraints_and_the_place():
    both = request(allowed_token_ids=[5], bad=[[5, 5]])
    assert no_token_left(both, 1) == (
        "allowed_token_ids and bad_words allow no token after 1 output token; leave one of them out"
    )


def test_answer_names_parameters_of_plugins_by_their_fields(add_part):
    width = SamplingParameter(default=0.0, least=0.0, most=9.0, help="x")
    add_part("logits_processor", "width", lambda logits_V, value, row: None, parameter=width)
    text = "allow no token after 3 output tokens; leave one of them out"
    assert no_token_left(request(width=2.0), 3) == f"width {text}"
    both = request(logits_processors={"width": 2.0, "mine": 1}, min_tokens=4)
    assert no_token_left(both, 3) == f"min_tokens and logits_processors and width {text}"
