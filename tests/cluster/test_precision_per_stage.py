"""``--quantization`` with a value for each stage under real launchers: what each rank holds, and what it computes."""

from __future__ import annotations

import json
import re

import pytest

from labinfer import LLM, SamplingParams

PROMPT = list(range(40, 70))
NUM_TOKENS = 24
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "64")


@pytest.fixture(scope="module")
def reference():
    """Tokens and log-probabilities of one rank on which the layers from the third on, and the head, are those of int8."""
    options = {"dtype": "float32", "threads": 1, "num_kv_blocks": 64}
    with LLM(quantization="none", **options) as llm, LLM(quantization="int8", **options) as rounded:
        model, other = (each._parts.worker.runner.model for each in (llm, rounded))
        for number in range(3, 6):
            model.model.layers[str(number)] = other.model.layers[str(number)]
        model.lm_head = other.lm_head
        runner = llm._parts.worker.runner
        for graphs in (runner._layers, runner._head):
            graphs._capture = None  # of one model's functions, which see no calls of the other's
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, logprobs=0)
        (output,) = llm.generate([PROMPT], params)
    return output.token_ids, [one.logprob for one in output.completions[0].logprobs]


def weights(table: str) -> dict[int, str]:
    """Precision and size of each rank's weights, from a layout's table."""
    rows = [re.split(" {2,}", line.strip()) for line in table.splitlines()]
    header = next(row for row in rows if row[:2] == ["rank", "device"])
    cells = [dict(zip(header, row, strict=False)) for row in rows if row[1:2] == ["cpu"]]
    return {int(row["rank"]): f"{row['dtype']}: {row['weights']}" for row in cells}


@pytest.mark.parametrize("launcher", [pytest.param("mpirun", marks=pytest.mark.slow), "torchrun"])
def test_stage_computes_in_its_own_precision(launcher, reference, launches, tmp_path):
    line = {"prompt_token_ids": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "logprobs": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    job = [*FLAGS, "-pp", "2", "--input", tmp_path / "in.jsonl", "--log-level", "info", "--output"]
    cases = {
        name: [*job, tmp_path / name, "-q", name] for name in ("none,int8", "int8", "int8,int8", "none", "int8,none")
    }
    cases |= {"three": [*job, tmp_path / "three", "-q", "none,int8,int8"], "plan": ["plan", *FLAGS, "-q", "none,int8"]}
    ended = {name: launches.run(launcher, 2, *arguments) for name, arguments in cases.items()}
    answers, held = {}, {}
    for name in list(cases)[:5]:
        assert ended[name].returncode == 0, ended[name].text
        record = json.loads((tmp_path / name).read_text())
        answers[name] = record["token_ids"], [one["logprob"] for one in record["logprobs"]]
        held[name] = weights(ended[name].text)
    tokens, logprobs = answers["none,int8"]
    assert tokens == reference[0] and logprobs == pytest.approx(reference[1], abs=1e-4)
    assert answers["int8,int8"] == answers["int8"]
    for other in ("none", "int8", "int8,none"):
        assert max(abs(a - b) for a, b in zip(logprobs, answers[other][1], strict=True)) > 1e-3, other
    assert held["none,int8"] == {0: held["none"][0], 1: held["int8"][1]} == weights(ended["plan"].text)
    assert held["int8,none"] == {0: held["int8"][0], 1: held["none"][1]}
    assert held["int8"][0].startswith("float32, int8: ") and held["none"][0].startswith("float32: ")
    (error,) = ended["three"].our_errors
    assert "--quantization none,int8,int8 has 3 values for 2 stages; give one, or one per stage" in error
