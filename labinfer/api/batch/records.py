"""Output lines of a job: LABInfer's simple format, or OpenAI's batch output format for batch lines."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET

from labinfer.base.pooling import EmbeddingOutput
from labinfer.launch.fingerprint import Fingerprint
from labinfer.requests.jsonl import ParsedLine
from labinfer.requests.openai.api_errors import INVALID_REQUEST, ErrorAnswer, ErrorDetails
from labinfer.requests.openai.api_object import ApiObject, plain_logprobs, prompt_logprobs, total_usage
from labinfer.requests.openai.chat import CHAT_PREFIX, ChatCompletion, ChatMessage, chat_choice, chat_messages
from labinfer.requests.openai.completions import COMPLETION_PREFIX, Echo, TextCompletion, text_choice, without_tokens
from labinfer.requests.openai.embeddings import embedding_list
from labinfer.requests.outputs import Completion, RequestOutput
from labinfer.requests.prompts import ChatPrompt, TextPrompt
from labinfer.requests.protocol import CHAT_URL
from labinfer.requests.scoring import Classification, PairScoring
from labinfer.text.tokenizer import Tokenizer


def result_record(
    number: int,
    line: ParsedLine,
    output: RequestOutput,
    *,
    model: str,
    fingerprint: Fingerprint,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Output record of a finished request, with token ids of the answers if the job has --reproducible.

    Args:
        number: number of the input line.
        fingerprint: its digest is ``system_fingerprint`` in the body of a batch line.
    """
    if line.prompt_alone:
        output = without_tokens(output)
    echoed = _prompt_text(line, output, tokenizer) if line.echo else ""
    messages, usage = [None] * len(output.completions), total_usage([output])
    if isinstance(line.prompt, ChatPrompt):
        messages, usage = chat_messages(output, tokenizer, line.prompt.tool_use, line.include_reasoning)
    answers = list(zip(output.completions, messages, strict=True))
    token_ids = [completion.token_ids if fingerprint.reproducible else UNSET for completion in output.completions]
    if not line.is_batch:
        simple = [_simple_answer(completion, message, echoed) for completion, message in answers]
        own_id = number if line.id is None else line.id
        record = {"id": own_id, **simple[0], "usage": msgspec.to_builtins(usage)}
        if len(simple) > 1:
            record["choices"] = [{"index": index, **answer} for index, answer in enumerate(simple)]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = msgspec.to_builtins(prompt_logprobs(output.prompt_logprobs, tokenizer))
        return record
    body: ChatCompletion | TextCompletion
    if line.url == CHAT_URL:
        body = ChatCompletion(
            id=f"{CHAT_PREFIX}{number}",
            created=int(time.time()),
            model=model,
            system_fingerprint=fingerprint.digest,
            choices=[
                msgspec.structs.replace(
                    chat_choice(completion, message, output, tokenizer, line.return_drafted), token_ids=ids
                )
                for (completion, message), ids in zip(answers, token_ids, strict=True)
            ],
            usage=usage,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs, tokenizer),
        )
    else:
        echo = Echo(echoed, output.prompt_token_ids, output.prompt_logprobs) if line.echo else None
        body = TextCompletion(
            id=f"{COMPLETION_PREFIX}{number}",
            created=int(time.time()),
            model=model,
            system_fingerprint=fingerprint.digest,
            choices=[
                msgspec.structs.replace(
                    text_choice(completion, output, tokenizer, echo, completion.index), token_ids=ids
                )
                for completion, ids in zip(output.completions, token_ids, strict=True)
            ],
            usage=usage,
        )
    return _batch_record(number, line.custom_id, 200, body)


def embedding_record(number: int, line: ParsedLine, outputs: list[EmbeddingOutput], model: str) -> dict[str, Any]:
    """Output record of an embeddings line. ``outputs`` are in the order of the line's inputs."""
    body = embedding_list(outputs, model, line.embedding.encoding_format)
    return _batch_record(number, line.custom_id, 200, body)


def score_record(
    number: int, line: ParsedLine, work: PairScoring | Classification, outputs: list[EmbeddingOutput], model: str
) -> dict[str, Any]:
    """Output record of a line with scores or classes: one record, however many documents the line has.

    Args:
        outputs: pooled outputs in the order of the prompts of ``work``.
    """
    prefix = line.url.rpartition("/")[2]
    body = line.scoring.answer(work, outputs, id=f"{prefix}-{number}", created=int(time.time()), model=model)
    return _batch_record(number, line.custom_id, 200, body)


def describe_record(record: dict[str, Any], number: int, line: ParsedLine | None) -> str:
    """Readable text for an output record: the prompt and the answers.

    Args:
        number: number of the input line.
        line: the parsed line; None if the line is invalid.
    """
    body = record["response"]["body"] if "response" in record else record
    if line is None:
        return f"--- line {number}\nerror: {body['error']['message']}\n"
    if line.embedding is not None:
        return f"--- line {number}\n{len(body['data'])} vectors\n"
    if line.scoring is not None:
        return f"--- line {number}\n{len(body.get('data', body.get('results')))} scores\n"
    choices = body.get("choices", [body])
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
    return "\n".join([f"--- {_question(line)}", *(text or "" for text in texts)]) + "\n"


def _question(line: ParsedLine) -> str:
    """Prompt of a line as readable text; for a conversation, only the last message."""
    if isinstance(line.prompt, ChatPrompt):
        return str(line.prompt.messages[-1].get("content", "")) if line.prompt.messages else ""
    return line.prompt.text if isinstance(line.prompt, TextPrompt) else f"{len(line.prompt.token_ids)} token ids"


def _prompt_text(line: ParsedLine, output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """Text of a line's prompt: the text in the line, or text decoded from token ids if the line has messages or token ids."""
    if isinstance(line.prompt, TextPrompt):
        return line.prompt.text
    return tokenizer.decode(output.prompt_token_ids) if tokenizer else ""


def _simple_answer(completion: Completion, message: ChatMessage | None, echoed: str) -> dict[str, Any]:
    text, reasoning = completion.text, {}
    if message is not None:
        text, reasoning = message.content, {} if message.reasoning is UNSET else {"reasoning": message.reasoning}
    answer: dict[str, Any] = {
        "text": None if text is None else echoed + text,
        **reasoning,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.stop_reason is not None:
        answer["stop_reason"] = completion.stop_reason
    if completion.logprobs is not None:
        answer["logprobs"] = msgspec.to_builtins(plain_logprobs(completion.logprobs))
    if completion.score is not None:
        answer["score"] = completion.score
    return answer


def error_record(number: int, custom_id: str | None, own_id: str | int | None, message: str) -> dict[str, Any]:
    """Output record of an input line that is invalid or has failed."""
    text = f"line {number}: {message}"
    if custom_id is None:
        return {
            "id": number if own_id is None else own_id,
            "error": {"message": text, "type": INVALID_REQUEST, "line": number},
        }
    body = ErrorAnswer(ErrorDetails(text, INVALID_REQUEST, None, None))
    return _batch_record(number, custom_id, 400, body)


def _batch_record(number: int, custom_id: str, status: int, body: ApiObject) -> dict[str, Any]:
    return {
        "id": f"batch_req_{number}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{number}", "body": msgspec.to_builtins(body)},
        "error": None,
    }
