"""Pages of Anthropic's list of models."""

from __future__ import annotations

import pytest

from labinfer.requests.anthropic.models import anthropic_model, anthropic_model_list
from labinfer.requests.openai.models import ModelEntry

MODELS = [anthropic_model(ModelEntry(id=name, created=0)) for name in "abcde"]


@pytest.mark.parametrize(
    ("limit", "after_id", "before_id", "ids", "has_more"),
    [
        (20, None, None, "abcde", False),
        (2, None, None, "ab", True),
        (2, "b", None, "cd", True),
        (2, "d", None, "e", False),
        (2, None, "e", "cd", True),
        (2, None, "c", "ab", False),
        (9, None, "a", "", False),
        (9, "e", None, "", False),
        (2, "unknown", None, "ab", True),
    ],
)
def test_page_has_the_models_beside_a_given_one(limit, after_id, before_id, ids, has_more):
    page = anthropic_model_list(MODELS, limit, after_id, before_id)
    assert ("".join(model.id for model in page.data), page.has_more) == (ids, has_more)
    assert (page.first_id, page.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


def test_model_that_is_not_loaded_has_no_lengths():
    assert (MODELS[0].created_at, MODELS[0].max_input_tokens) == ("1970-01-01T00:00:00Z", None)
