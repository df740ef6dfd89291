"""LogitsProcessor: contract of functions that change a row's logits before sampling; SampledRow: their argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from labinfer.base.errors import UserError
from labinfer.base.plan import TokenSampling
from labinfer.base.registry import REGISTRY
from labinfer.base.sampling_params import SamplingParams, sampling_parameters


class SampledRow(msgspec.Struct, frozen=True):
    """A prefix of a sequence after which the next token is sampled."""

    sampling: TokenSampling
    token_ids: list[int]
    """The prefix: the prompt, and the answer before the token to be sampled."""
    mask: bytes = b""
    """Mask of allowed tokens, as in ``BatchEntry``; empty for no constraint."""

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.sampling.num_prompt_tokens :]

    @property
    def is_processed(self) -> bool:
        """Whether logits processors or a mask change the row's logits."""
        return bool(self.sampling.processors or self.mask)


LogitsProcessor = Callable[[torch.Tensor, Any, SampledRow], None]
"""Changes one row's logits in place: ``processor(logits_V, value, row)``, with the ``value`` of the row's request.

``Sampler`` calls it for each token of each request that names it, on the first tp rank of the last stage; draft models and MTP
layers also call it where they draft. ``logits_V`` are float32, of vocabulary size, on the stage's device. The mask of a structured
output, the processors of ``SamplingParams``' own fields, and those that the request names first are applied before;
temperature, top-k and the other candidate filters follow. Contract:

- It depends on ``logits_V``, ``value`` and ``row`` alone, and is deterministic: the same arguments give the same logits.
- It keeps no state between calls. A sequence's rows may come in any order, in another batch, on another rank, or twice: drafts are
  verified, and a preempted or restarted request is run again.
- It forbids a token with ``-inf``, and leaves at least one allowed token. If none is left, the answer ends with an error that
  names ``logits_processors``.
- It makes no logit NaN. ``Sampler`` asserts this on every row, by the maximum that it computes anyway.
- It changes neither ``value`` nor ``row``, and is fast: the whole batch waits for it.

Rank 0 tries each request's processors once on logits of 0, before any rank sees the request. If one raises
then, or gives NaN, the request is rejected. If one raises later, the ranks end.

A plugin registers ``@register("logits_processor", NAME)``, and requests then give ``"logits_processors": {NAME: value}``. With
``parameter=SamplingParameter(…)`` the value is a number with bounds, and requests may also give it as a field of their own, beside
``temperature``. A processor with an attribute ``numbers`` gets the tensor ``numbers(value, row)``, on the device, in place of ``row``:
``Sampler`` uploads those of all rows at once.
"""


def check_logits_processors(requested: Mapping[str, Any], prompt_ids: list[int], vocab_size: int) -> None:
    """Try a request's own logits processors before any rank runs them.

    Args:
        requested: values of the processors by name.

    Raises:
        UserError: a name is unknown, or a processor fails with its value or breaks its contract.
    """
    row = SampledRow(TokenSampling(num_prompt_tokens=len(prompt_ids)), prompt_ids)
    for name, value in requested.items():
        names = [known for known in REGISTRY.names("logits_processor") if known not in SamplingParams.__struct_fields__]
        if name not in names:
            raise UserError(f"unknown logits processor {name!r:.60}; available: {', '.join(names)}")
        if parameter := sampling_parameters().get(name):  # not read yet if ``requested`` predates the plugin
            parameter.read(name, value)
        logits_V = torch.zeros(vocab_size)
        processor = REGISTRY.find("logits_processor", name)
        try:
            processor(logits_V, value, processor.numbers(value, row) if hasattr(processor, "numbers") else row)
            assert not logits_V.isnan().any(), "it makes logits NaN"
        except Exception as error:  # noqa: BLE001 - a plugin's processor may raise anything
            raise UserError(f"the logits processor {name} rejects {value!r:.60}: {error!r:.200}") from None
