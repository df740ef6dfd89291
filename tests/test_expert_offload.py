"""``--expert-offload`` through ``LLM``: the same tokens with half of the experts in memory, and refusals."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.weights.checkpoint import Checkpoint

PROMPTS = mixed_prompts(4)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
OPTIONS = {"num_kv_blocks": 64, "autotune": False}
PACKED = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("offload") / "qwen3-moe", "qwen3-moe"))


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_offloaded_experts_give_the_same_tokens_and_are_told_of(mixture, packed):
    def tokens(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]

    with LLM(mixture, **OPTIONS, **packed) as llm:
        expected, meta = tokens(llm), llm.layout.meta(llm.place)
        assert "expert cache hits" not in llm.report.format()
    with LLM(mixture, **OPTIONS, **packed, expert_offload=meta.expert_bytes / 2 / 2**30) as llm:
        assert tokens(llm) == expected
        reads = llm.report.workers[0].expert_reads
        assert reads.hits > 0 and reads.misses > 0 and reads.bytes_read > 0
        assert "% of" in llm.report.format().partition("expert cache hits")[2]
        assert llm.report.as_dict()["expert_reads"][0]["misses"] == reads.misses
        assert meta.weight_bytes - llm.layout.weight_bytes(llm.place) == pytest.approx(meta.expert_bytes / 2, abs=1)
        assert [llm.generate([PROMPTS[0]], GREEDY)[0].token_ids] == expected[:1]
        assert 0 < llm.report.workers[0].expert_reads.misses < reads.misses  # each run counts from 0


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4-moe"])
@pytest.mark.parametrize("packed", [{}, {"quantization": "int8"}], ids=str)
def test_offloaded_experts_with_biases_or_another_activation_give_the_same_tokens(kind, packed, tmp_path):
    directory = str(make_checkpoint(tmp_path / kind, kind))
    with LLM(directory, **OPTIONS, **packed) as llm:
        expected, meta = llm.generate(PROMPTS[:2], GREEDY), llm.layout.meta(llm.place)
    with LLM(directory, **OPTIONS, **packed, expert_offload=meta.expert_bytes / 2 / 2**30) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY)
        assert llm.report.workers[0].expert_reads.misses > 0
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_offload_without_experts_is_refused():
    with pytest.raises(UserError, match=r"expert_offload 1: \w+ has no MoE experts"):
        LLM("demo", expert_offload=1)


def test_offload_of_the_references_experts_is_refused(mixture):
    with pytest.raises(UserError, match="expert_offload needs the compiled CPU kernels"):
        LLM(mixture, expert_offload=1, num_kv_blocks=64, functions="reference")


def test_offload_with_too_little_room_is_refused_before_loading(mixture, monkeypatch):
    monkeypatch.setattr(Checkpoint, "load", lambda *arguments: pytest.fail("something was read"))
    with pytest.raises(UserError, match=r"expert_offload holds 0 experts of \d+ bytes; give at least \d+ bytes"):
        LLM(mixture, expert_offload=1e-9 * 2, num_kv_blocks=64)
