"""Drafts of a model's own MTP layer, through ``LLM`` in one process: its logits, its tokens, and that no answer depends on it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from checkpoints import MTP_KINDS, add_mtp, donor_layer, make_checkpoint, mixed_prompts
from golden import LogitsRecorder, relative_error
from test_drafts import PARAMS, PROMPTS, assert_same
from transformers import AutoModelForCausalLM

from labinfer import LLM, SamplingParams
from labinfer.errors import UserError

OPTIONS = {"block_size": 4, "threads": 1}
THREE = {"method": "mtp", "num_speculative_tokens": 3}


class Reference:
    """The MTP layer in plain torch, around a decoder layer of Transformers'."""

    def __init__(self, directory, kind: str, parts: dict[str, torch.Tensor]):
        self._model = load(directory)
        self._layer = load(directory.with_name(f"{directory.name}-donor")).model.layers[donor_layer(kind)]
        self._parts, self._offset = parts, 0.0 if "deepseek" in kind else 1.0
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
        drafter, seen = llm._parts.worker.runner._drafter, []
        draft, places = drafter.draft, iter(())

        class Recorder(LogitsRecorder):
            def __call__(self, logits_BV, rows):
                place = next(places)
                seen.extend((list(row.token_ids), place, logits_V.clone()) for logits_V, row in zip(logits_BV, rows))
                return self._sampler(logits_BV, rows)

        def begin(*arguments):
            nonlocal places
            places = iter(range(100))
            return draft(*arguments)

        drafter._sampler, drafter.draft = Recorder(drafter._sampler), begin
        yield llm, seen


@pytest.fixture(scope="module", params=MTP_KINDS)
def model(request, tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("mtp") / "model", request.param)
    parts = add_mtp(directory, request.param)
    return directory, Reference(directory, request.param, parts)


@pytest.fixture(scope="module")
def alone(model):
    """The answers to each request, one after another with nothing in the cache and no drafts."""
    with LLM(str(model[0]), num_kv_blocks=400, enable_prefix_caching=False, **OPTIONS) as llm:
        return [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS_OF_HYBRIDS, strict=True)]


PARAMS_OF_HYBRIDS = PARAMS


@pytest.mark.parametrize("chunk", [5, 512])
def test_drafts_have_the_logits_of_the_reference(model, chunk):
    directory, reference = model
    with drafting(directory, chunked_prefill_size=chunk) as (llm, seen):
        llm.generate(mixed_prompts()[:4], SamplingParams(max_tokens=8, ignore_eos=True))
    assert {place for _, place, _ in seen} == {0, 1, 2}
    for token_ids, place, logits_V in seen:
        assert relative_error(logits_V, reference.logits(token_ids, place)) < 1e-4, (len(token_ids), place)
