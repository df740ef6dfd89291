"""What an output line looks like: simple ones of our own, and OpenAI's batch output format for batch lines."""

from __future__ import annotations

import time
from typing import Any

from labinfer.llm import RequestOutput
from labinfer.protocol import CHAT_URL, ParsedLine


def usage_of(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "total_tokens": len(output.prompt_token_ids) + len(output.token_ids),
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def result_record(number: int, line: ParsedLine, output: RequestOutput, model: str) -> dict[str, Any]:
    """The output line of a request that finished. ``number`` is its input line's."""
    if not line.is_batch:
        return {
            "id": number if line.id is None else line.id,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "usage": usage_of(output),
        }
    if line.url == CHAT_URL:
        kind, prefix, choice = "chat.completion", "chatcmpl", {"message": {"role": "assistant", "content": output.text}}
    else:
        kind, prefix, choice = "text_completion", "cmpl", {"text": output.text}
    body = {
        "id": f"{prefix}-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": line.model or model,
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": output.finish_reason}],
        "usage": usage_of(output),
    }
    return _batch_record(number, line.custom_id, 200, body)


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
