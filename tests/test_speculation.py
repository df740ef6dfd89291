"""Speculation as users turn it on: its options, drafters of their own, and that no answer depends on it."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY, RegistryEntry

OPTIONS = {"block_size": 4, "threads": 1, "num_kv_blocks": 400}
OWN_DRAFTER = """
class LastToken:
    def propose(self, sequences, limits):
        return [[sequence.token_ids[-1]] * min(limit, 3) for sequence, limit in zip(sequences, limits)]

    def forget(self, sequences):
        pass

def make_proposer(options, facts):
    assert facts.vocab_size > 0 and options.method.endswith(".py")
    return LastToken()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("speculation") / "model", "llama-untied"))


@pytest.fixture(scope="module")
def requests():
    prompts = [prompt[:20] * 2 for prompt in mixed_prompts()]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9 * (index % 2), seed=index)
        for index in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain(checkpoint, requests):
    with LLM(checkpoint, **OPTIONS) as llm:
        return [output.token_ids for output in llm.generate(*requests)]


@pytest.fixture
def add_proposer(monkeypatch):
    """Registers a proposer for one test."""

    def add(name: str, make) -> None:
        monkeypatch.setitem(REGISTRY._entries["proposer"], name, RegistryEntry(part=make, details={}, origin="test"))

    return add


@pytest.mark.parametrize("method", ["ngram", "own"])
def test_method_drafts_and_changes_no_answer(checkpoint, requests, plain, method, tmp_path):
    config = {"method": method, "num_speculative_tokens": 4}
    if method == "own":
        (tmp_path / "drafter.py").write_text(OWN_DRAFTER)
        config["method"] = str(tmp_path / "drafter.py")
    with LLM(checkpoint, speculative_config=config, **OPTIONS) as llm:
        assert [output.token_ids for output in llm.generate(*requests)] == plain
        assert llm.report.counts["drafted"] > (4 if method == "ngram" else 50)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "file .*drafter.py does not exist"),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("make = 3", "has no function make_proposer"),
        ("def make_proposer(options, facts):\n    raise OSError('no disk')", "failed to create a proposer: OSError"),
        ("\nimport nothing_of_that_name", "drafter.py, line 2 cannot be imported: "),
        ("def f(:", "drafter.py, line 1 cannot be imported: SyntaxError"),
        ("", "drafter.py is empty"),
        (
            "def make_proposer(options, facts):\n    raise OSError('no disk')",
            "drafter.py, line 2 failed to create a proposer: ",
        ),
    ],
    ids=["missing", "import", "function", "raises", "line of import", "syntax", "empty", "line that raises"],
)
def test_drafter_that_cannot_be_made_is_refused(checkpoint, tmp_path, text, says):
    path = tmp_path / "drafter.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        LLM(checkpoint, speculative_config={"method": str(path)}, **OPTIONS)
    assert "\n" not in str(caught.value)


def test_registered_proposer_drafts_and_changes_no_answer(checkpoint, requests, plain, add_proposer):
    class Own:
        def __init__(self, options, facts):
            assert facts.vocab_size > 0 and options.method == "last_token"

        def propose(self, sequences, limits):
            return [[sequence.token_ids[-1]] * min(limit, 3) for sequence, limit in zip(sequences, limits, strict=True)]

        def forget(self, sequences):
            pass

    add_proposer("last_token", Own)
    with LLM(checkpoint, speculative_config={"method": "last_token", "num_speculative_tokens": 4}, **OPTIONS) as llm:
        assert [output.token_ids for output in llm.generate(*requests)] == plain
        assert llm.report.counts["drafted"] > 50


def test_registered_proposer_that_cannot_be_made_is_refused(checkpoint, add_proposer):
    def broken(options, facts):
        raise OSError("no disk")

    add_proposer("broken", broken)
    with pytest.raises(
        UserError, match=r"test_speculation.py, line [0-9]+ failed to create a proposer: OSError: no disk"
    ):
        LLM(checkpoint, speculative_config={"method": "broken"}, **OPTIONS)


def test_output_tells_of_drafted_tokens(checkpoint, requests):
    with LLM(checkpoint, speculative_config={"num_speculative_tokens": 3}, **OPTIONS) as llm:
        outputs = llm.generate(*requests)
        counts = llm.report.counts
    assert sum(output.num_drafted_tokens for output in outputs) == counts["drafted"] > 0
    assert sum(output.num_accepted_tokens for output in outputs) == counts["accepted"]


def test_lengths_are_chosen_by_measured_times(checkpoint, requests, plain):
    with LLM(checkpoint, speculative_config={}, **OPTIONS) as llm:
        assert llm.spec.step_times.draft_rows == [1, 2, 4, 8, 16]
        assert [output.token_ids for output in llm.generate(*requests)] == plain
