"""What an output line looks like: simple ones of our own, and OpenAI's batch output format for batch lines."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from labinfer.outputs import Completion, RequestOutput
from labinfer.plan import TokenLogprobs
from labinfer.protocol import CHAT_URL, ParsedLine
from labinfer.text.tool_calls import parse_answer
from labinfer.text.tokenizer import Tokenizer


def usage_of(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": output.num_output_tokens,
        "total_tokens": len(output.prompt_token_ids) + output.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def result_record(
    number: int, line: ParsedLine, output: RequestOutput, model: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The output line of a request that finished. ``number`` is its input line's."""
    echoed = _prompt_text(line, output, tokenizer) if line.echo else ""
    if not line.is_batch:
        answers = [_simple_answer(completion, echoed) for completion in output.completions]
        record = {"id": number if line.id is None else line.id, **answers[0], "usage": usage_of(output)}
        if len(answers) > 1:
            record["choices"] = [{"index": index, **answer} for index, answer in enumerate(answers)]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
        return record
    if line.url == CHAT_URL:
        kind, prefix = "chat.completion", "chatcmpl"
        choices = [_chat_choice(completion, tokenizer, line) for completion in output.completions]
    else:
        kind, prefix = "text_completion", "cmpl"
        echo = Echo(echoed, output.prompt_token_ids, output.prompt_logprobs) if line.echo else None
        choices = [_text_choice(completion, tokenizer, echo) for completion in output.completions]
    for choice, completion in zip(choices, output.completions, strict=True):
        if completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if completion.score is not None:
            choice["score"] = completion.score
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
    body = {
        "id": f"{prefix}-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": line.model or model,
        "choices": choices,
        "usage": usage_of(output),
    }
    return _batch_record(number, line.custom_id, 200, body)


@dataclass(frozen=True)
class Echo:
    """The prompt, where it comes back before the answer."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


def _prompt_text(line: ParsedLine, output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """As it was given, or, if it was given as messages or ids, as its tokens read."""
    given = line.prompt.get("prompt") if isinstance(line.prompt, dict) else None
    return given or (tokenizer.decode(output.prompt_token_ids) if tokenizer else "")


def _simple_answer(completion: Completion, echoed: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": None if completion.text is None else echoed + completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.stop_reason is not None:
        answer["stop_reason"] = completion.stop_reason
    if completion.logprobs is not None:
        answer["logprobs"] = _plain_logprobs(completion.logprobs)
    if completion.score is not None:
        answer["score"] = completion.score
    return answer


def _plain_logprobs(measured: list[TokenLogprobs]) -> list[dict[str, Any]]:
    return [{"token_id": one.token_id, "logprob": one.logprob, "top": one.top} for one in measured]


def _chat_choice(completion: Completion, tokenizer: Tokenizer | None, line: ParsedLine) -> dict[str, Any]:
    """As OpenAI's chat completion object has it; where tools were offered, with the calls that the text has."""
    logprobs = None
    if completion.logprobs is not None:
        content = []
        for one in completion.logprobs:
            top = [_spelled(token_id, logprob, tokenizer) for token_id, logprob in one.top.items()]
            content.append(_spelled(one.token_id, one.logprob, tokenizer) | {"top_logprobs": top})
        logprobs = {"content": content}
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    finish_reason = completion.finish_reason
    if line.prompt.get("tools") and completion.text is not None:
        content, calls = parse_answer(completion.text, line.prompt.get("parallel_tool_calls", True))
        if calls:
            message |= {"content": content or None, "tool_calls": [call.as_dict() for call in calls]}
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    return {"index": completion.index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def _spelled(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = _spell(token_id, tokenizer)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _spell(token_id: int, tokenizer: Tokenizer | None) -> str:
    return tokenizer.decode([token_id]) if tokenizer else f"token_id:{token_id}"


def _text_choice(completion: Completion, tokenizer: Tokenizer | None, echo: Echo | None) -> dict[str, Any]:
    """As OpenAI's completion object has it; with ``echo``, the prompt and its log-probabilities come first."""
    text, logprobs = completion.text, None
    if echo is not None and text is not None:
        text = echo.text + text
    if completion.logprobs is not None:
        measured: list[TokenLogprobs | None] = list(completion.logprobs)
        token_ids = list(completion.token_ids)
        if echo is not None:
            measured = [None, *(echo.logprobs or []), *measured]  # the first token follows nothing
            token_ids = echo.token_ids + token_ids
        tokens = [_spell(token_id, tokenizer) for token_id in token_ids]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [one and one.logprob for one in measured],
            "top_logprobs": [one and {_spell(i, tokenizer): value for i, value in one.top.items()} for one in measured],
            "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
        }
    return {"index": completion.index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}


def error_record(number: int, custom_id: str | None, own_id: str | int | None, message: str) -> dict[str, Any]:
    """The output line of an input line that was refused."""
    text = f"line {number}: {message}"
    if custom_id is None:
        return {
            "id": number if own_id is None else own_id,
            "error": {"message": text, "type": "invalid_request_error", "line": number},
        }
    body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
    return _batch_record(number, custom_id, 400, body)


def _batch_record(number: int, custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{number}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{number}", "body": body},
        "error": None,
    }
