"""SpeculativeOptions: what it reads, and what it refuses in one line."""

from __future__ import annotations

import pytest

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.base.speculative_options import DRAFT_MODEL, SpeculativeOptions


def test_every_method_has_a_proposer(add_part):
    assert {*REGISTRY.names("proposer"), DRAFT_MODEL} == {"ngram", "mtp", "draft_model"}
    with pytest.raises(UserError, match="method 'mine' is not one of ngram, mtp, draft_model, nor a Python file"):
        SpeculativeOptions.parse({"method": "mine"})
    add_part("proposer", "mine", lambda options, facts: None)
    assert SpeculativeOptions.parse({"method": "mine"}).method == "mine"
    with pytest.raises(UserError, match="method 'yours' is not one of ngram, mtp, mine, draft_model"):
        SpeculativeOptions.parse({"method": "yours"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{}", SpeculativeOptions()),
        ({"method": "ngram"}, SpeculativeOptions(method="ngram")),
        ('{"num_speculative_tokens": 4}', SpeculativeOptions(num_speculative_tokens=4)),
        ({"num_speculative_tokens": "auto", "method": None}, SpeculativeOptions()),
        ({"prompt_lookup_max": 1}, SpeculativeOptions(prompt_lookup_min=1, prompt_lookup_max=1)),
        ({"prompt_lookup_min": 7}, SpeculativeOptions(prompt_lookup_min=7, prompt_lookup_max=7)),
        ({"prompt_lookup_min": 3}, SpeculativeOptions(prompt_lookup_min=3)),
        ({"continuous": False}, SpeculativeOptions(continuous=False)),
        ({"continuous": True}, SpeculativeOptions(continuous=True)),
        ({"continuous": None}, SpeculativeOptions()),
        ({"model": "x", "draft_rank": 2}, SpeculativeOptions(method="draft_model", model="x", draft_rank=2)),
        ({"method": "mine/drafter.py"}, SpeculativeOptions(method="mine/drafter.py")),
    ],
)
def test_options_are_read(given, expected):
    assert EngineOptions.from_flat({"speculative_config": given}).scheduler.speculative_config == expected


def test_nothing_is_drafted_unless_it_is_asked_for():
    assert EngineOptions.from_flat({}).scheduler.speculative_config is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("ngram", "ngram is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", r"must be an object, as in .*, not \[1\]"),
        (3, "must be an object"),
        ({"tokens": 3}, "has no 'tokens'; its keys are method, "),
        ({"method": "medusa"}, "method 'medusa' is not one of ngram"),
        ({"method": 3}, "method 3 is not one of"),
        ({"num_speculative_tokens": 0}, 'whole number from 1 to 128 or "auto", not 0'),
        ({"num_speculative_tokens": 129}, "not 129"),
        ({"num_speculative_tokens": True}, "not True"),
        ({"num_speculative_tokens": 2.0}, "not 2.0"),
        ({"model": "x", "draft_rank": -1}, "draft_rank must be a whole number from 0 to 1000000, not -1"),
        ({"model": "x", "draft_rank": "2"}, "draft_rank must be a whole number"),
        ({"method": "mtp", "draft_rank": 2}, "draft_rank 2 needs method draft_model, not mtp"),
        ({"continuous": 1}, "continuous must be true or false, not 1"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be a whole number from 1 to 64"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4 is more than prompt_lookup_max 3"),
        (
            {"method": "x.py", "prompt_lookup_max": 3},
            "prompt_lookup_min needs method ngram, not x.py|prompt_lookup_max needs",
        ),
    ],
)
def test_wrong_options_are_refused(given, says):
    with pytest.raises(UserError, match=says) as caught:
        EngineOptions.from_flat({"speculative_config": given})
    assert "\n" not in str(caught.value)
    assert "speculative-config" in str(caught.value)
