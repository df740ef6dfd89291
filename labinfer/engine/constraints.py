"""Constraints on output tokens: rejects requests whose constraints contradict each other, and words the errors."""

from __future__ import annotations

from collections.abc import Collection

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import sampling_parameters
from labinfer.engine.request import Request

THINKING_BUDGET = "thinking_budget"
"""Logits processor that closes the reasoning after a number of tokens."""


def check_constraints(request: Request, ends: Collection[int], vocab_size: int, mask: bytes = b"") -> None:
    """Reject constraints that allow no first token. If no later token is allowed, the answer is aborted.

    Args:
        ends: stop token ids.
        mask: ``Guide.mask`` for the first token; empty without structured outputs.

    Raises:
        UserError: the text names the constraints.
    """
    sampling = request.sampling
    allowed, never = sampling.allowed_token_ids, [word[0] for word in request.bad_token_ids if len(word) == 1]
    if not allowed and not never:
        return
    given = " and ".join(name for name, value in (("allowed_token_ids", allowed), ("bad_words", never)) if value)
    left = (_bits(allowed) if allowed else (1 << vocab_size) - 1) & ~_bits(never)
    if not left:
        raise UserError(f"{given} together allow no token; allow a token that is not a bad word")
    if sampling.min_tokens and not mask and not left & ~_bits(ends):
        raise UserError(
            f"{given} allow only end-of-sequence tokens, which min_tokens {sampling.min_tokens} forbids; allow "
            "another token, or leave min_tokens out"
        )
    if mask and not left & int.from_bytes(mask, "little"):
        raise UserError(f"{given} forbid every token with which {request.form_field} can start; leave one of them out")
    if (budget := sampling.logits_processors.get(THINKING_BUDGET)) is not None:
        _, _, closing, _ = budget
        if missing := [token for token in closing if not left >> token & 1]:
            raise UserError(
                f"{given} forbid token {missing[0]}, which ends the reasoning when thinking_token_budget is spent; "
                "allow it, or leave thinking_token_budget out"
            )


def no_token_left(request: Request, num_output_tokens: int) -> str:
    """Error text for an answer aborted after ``num_output_tokens`` tokens, as the request's constraints allow no next token."""
    sampling = request.sampling
    parameters = [name for name in sampling.logits_processors if name in sampling_parameters()]
    given = {
        request.form_field: sampling.structured_outputs,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": sampling.bad_words or request.bad_token_ids,
        "min_tokens": sampling.min_tokens,
        "logits_processors": sampling.logits_processors.keys() - parameters,
        **dict.fromkeys(parameters, True),
    }
    names = [name for name, value in given.items() if value]
    behind = (
        f"after {num_output_tokens} output token{'s' * (num_output_tokens > 1)}"
        if num_output_tokens
        else "at the start of the output"
    )
    return f"{' and '.join(names)} allow no token {behind}; leave one of them out"


def _bits(token_ids: Collection[int]) -> int:
    """Encode a set of token ids as a bit mask in an integer."""
    bits = bytearray(1 + max(token_ids, default=0) // 8)
    for token in token_ids:
        bits[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(bits, "little")
