"""Drafts of a model's own MTP layer, through ``LLM`` in one process: its logits, its tokens, and that no answer depends on it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts
from golden import LogitsRecorder, relative_error
from mtp_checkpoints import MTP_KINDS, add_mtp, donor_layer
from safetensors.torch import load_file
from test_drafts import PARAMS, PROMPTS, assert_same
from transformers import AutoModelForCausalLM

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError

OPTIONS = {"block_size": 4, "threads": 1}
THREE = {"method": "mtp", "num_speculative_tokens": 3}


class Reference:
    """The MTP layer in plain torch, around a decoder layer of Transformers'."""

    def __init__(self, directory, kind: str, parts: dict[str, torch.Tensor]):
        self._model = load(directory)
        self._layer = load(directory.with_name(f"{directory.name}-donor")).model.layers[donor_layer(kind)]
        self._parts, self._offset = parts, float("qwen" in kind)
        self._eps = self._model.config.rms_norm_eps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * (self._parts[name] + self._offset)

    def _run(self, hidden_TD: torch.Tensor, next_tokens: list[int]) -> torch.Tensor:
        """Hidden states of the first tokens, and the tokens behind them → (D) behind the last one."""
        embedded_TD = self._model.get_input_embeddings()(torch.tensor(next_tokens))
        both = (self._norm(embedded_TD, "mtp.pre_fc_norm_embedding"), self._norm(hidden_TD, "mtp.pre_fc_norm_hidden"))
        x_1TD = (torch.cat(both, dim=-1) @ self._parts["mtp.fc"].T)[None]
        positions, count = torch.arange(len(next_tokens))[None], len(next_tokens)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = self._model.model.rotary_emb(x_1TD, positions)
        out = self._layer(x_1TD, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        return self._norm(out[0, -1], "mtp.norm")

    @torch.no_grad()
    def logits(self, token_ids: list[int], num_drafted: int) -> torch.Tensor:
        """What the token behind these is drafted from, of which the last ``num_drafted`` were drafted themselves."""
        end = len(token_ids) - num_drafted
        hidden_TD = self._model.model(torch.tensor([token_ids[: end - 1]])).last_hidden_state[0]
        for last in range(end, len(token_ids) + 1):
            own_D = self._run(hidden_TD, token_ids[1:last])
            hidden_TD = torch.cat((hidden_TD, own_D[None]))
        return self._model.lm_head(own_D)


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@contextmanager
def drafting(checkpoint, **options):
    """An ``LLM`` and what its MTP layer's tokens were chosen from: (tokens before, how many of them were drafted, logits)."""
    with LLM(str(checkpoint), **{"num_kv_blocks": 400, "speculative_config": THREE} | OPTIONS | options) as llm:
        drafter, seen = llm._parts.worker.runner.drafter, []
        draft, places = drafter.draft, iter(())

        class Recorder(LogitsRecorder):
            def __call__(self, logits_BV, rows):
                place = next(places)
                seen.extend(
                    (list(row.token_ids), place, logits_V.clone())
                    for logits_V, row in zip(logits_BV, rows, strict=True)
                )
                return self._sampler(logits_BV, rows)

        def begin(*arguments):
            nonlocal places
            places = iter(range(100))
            return draft(*arguments)

        drafter._sampler, drafter.draft = Recorder(drafter._sampler), begin
        yield llm, seen


@pytest.fixture(
    scope="module",
    params=[
        kind if kind in ("deepseek-v3", "qwen3.5") else pytest.param(kind, marks=pytest.mark.slow) for kind in MTP_KINDS
    ],
)
def model(request, tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("mtp") / "model", request.param)
    parts = add_mtp(directory, request.param)
    return directory, Reference(directory, request.param, parts)


@pytest.mark.parametrize("chunk", [5, 512])
def test_drafts_have_the_logits_of_the_reference(model, chunk):
    directory, reference = model
    with drafting(directory, chunked_prefill_size=chunk) as (llm, seen):
        llm.generate(mixed_prompts()[:4], SamplingParams(max_tokens=5, ignore_eos=True))
    assert {place for _, place, _ in seen} == {0, 1, 2}
    for token_ids, place, logits_V in seen:
        assert relative_error(logits_V, reference.logits(token_ids, place)) < 1e-4, (len(token_ids), place)


# No answer depends on drafts.

RANDOM, NEAR, SAME = None, 0.3, 0.0
"""Noise of the MTP layer: most that it drafts is wrong, some, or nothing."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("deepseek-v3", RANDOM), marks=pytest.mark.slow),
        ("deepseek-v3", NEAR),
        ("qwen3-next-moe", NEAR),
    ],
)
def drafter(request, tmp_path_factory):
    """A checkpoint with an MTP layer, and the answers to each request, one after another with nothing in the cache and no drafts."""
    kind, noise = request.param
    directory = make_checkpoint(tmp_path_factory.mktemp("drafter") / "model", kind)
    add_mtp(directory, kind, noise=noise)
    with LLM(str(directory), num_kv_blocks=400, enable_prefix_caching=False, **OPTIONS) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    return directory, alone, noise


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 400},
        {"num_kv_blocks": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_kv_blocks": 40, "preemption_mode": "swap", "swap_space": 0.01, "chunked_prefill_size": 5},
        {"num_kv_blocks": 400, "max_inflight": 3, "batch_policy": "greedy", "speculative_config": {"method": "mtp"}},
    ],
    ids=["cached", "recompute", "swap", "auto"],
)
def test_answers_do_not_depend_on_drafts(drafter, options):
    directory, alone, noise = drafter
    with LLM(str(directory), **OPTIONS | {"speculative_config": THREE} | options) as llm:
        for _ in range(2):  # the second run finds blocks and states of the first
            for ours, theirs in zip(llm.generate(PROMPTS, PARAMS), alone, strict=True):
                assert_same(ours, theirs)
            counts = llm.report.counts
            if "speculative_config" not in options:  # auto may find that it does not pay
                assert counts["drafted"] > 30
                assert noise is RANDOM or 0 < counts["accepted"] < counts["drafted"]
            assert counts["preemptions"] > 0 or options["num_kv_blocks"] > 40
        if "speculative_config" in options:
            assert llm.spec.step_times.draft_rows == [1, 2, 4]  # no more than the 5 of the longest draft


@pytest.mark.parametrize("kind", ["deepseek-v3", "qwen3.5"])
def test_layer_that_agrees_is_nearly_always_right(kind, tmp_path):
    """Greedy and sampled: the noise is that of the tokens."""
    directory = make_checkpoint(tmp_path / "model", kind)
    add_mtp(directory, kind, noise=SAME)
    params = [
        SamplingParams(max_tokens=33, ignore_eos=True, temperature=0.9 * (index % 2), seed=index)
        for index in range(len(PROMPTS))
    ]
    with LLM(str(directory), num_kv_blocks=400, **OPTIONS) as llm:
        plain = [output.token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(str(directory), num_kv_blocks=400, speculative_config=THREE, **OPTIONS) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == plain
        counts = llm.report.counts
        assert counts["drafted"] > 23 * len(PROMPTS)
        assert counts["accepted"] > 0.98 * counts["drafted"]


def test_context_shift_moves_keys_of_the_layer(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "deepseek-v3")
    add_mtp(directory, "deepseek-v3", noise=NEAR)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=8, ignore_eos=True, max_context_len=44)
    options = OPTIONS | {"num_kv_blocks": 200, "context_shift": True, "keep": 3}
    answers = []
    for config in (None, THREE):
        with LLM(str(directory), speculative_config=config, **options) as llm:
            answers.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            accepted = llm.report.counts["accepted"]
    assert answers[0] == answers[1] and accepted > 0


# What it takes, and who has none.


def test_memory_of_the_layer_is_counted(drafter):
    """On the last stage alone: its weights, and the keys and values that a token leaves in it."""
    directory, _, _ = drafter
    with LLM(str(directory), num_kv_blocks=64, **OPTIONS) as plain:
        before = plain.layout.meta(plain.place)
    with LLM(str(directory), num_kv_blocks=64, speculative_config=THREE, **OPTIONS) as llm:
        after, size = llm.layout.meta(llm.place), llm.layout.config.hidden_size
        stored = sum(
            tensor.nbytes
            for name, tensor in load_file(directory / "model.safetensors").items()
            if name.startswith(("mtp.", "model.layers.4."))
        )
        assert after.weight_bytes - before.weight_bytes == pytest.approx(stored, rel=0.01)
        assert stored > 2 * size * size * 4
        spec = after.model.mtp.layer.self_attn.cache_spec()
        assert after.bytes_per_token - before.bytes_per_token == spec.bytes_per_token(torch.float32) > 0


@pytest.mark.parametrize("kind", ["llama-untied", "deepseek-v3", "qwen3.5"])
def test_model_without_mtp_layer_is_refused(kind, tmp_path):
    """A family without, a config that says so, tensors that are not there."""
    directory = make_checkpoint(tmp_path, kind)
    with pytest.raises(UserError, match="has no MTP layer; choose another method") as caught:
        LLM(str(directory), speculative_config=THREE, num_kv_blocks=64, **OPTIONS)
    assert "\n" not in str(caught.value)
