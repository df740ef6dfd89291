"""Replies in every built-in format, from a server through OpenAI's client: what streams is what comes whole."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from reply_reading import parse
from reply_samples import ANSWERS, ONE_CALL, THOUGHTS, TOOLS, TWO_CALLS
from reply_tokenizer import write_tokenizer
from safetensors.numpy import save_file
from serving import serving

from labinfer.text.reply_format import BUILT_IN, built_in_names, load_built_in
from labinfer.text.reply_grammar import GrammarWriter
from labinfer.text.tokenizer import Tokenizer

FORMATS = built_in_names()
FORCED = ("hermes", "qwen_xml", "kimi", "mistral")
"""Formats of further checkpoints, by whose chat templates it is known how calls are written, so that they can be forced."""
CHAT = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 3200,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A directory with a checkpoint of random weights for each format, which it brings itself."""
    root, rng = tmp_path_factory.mktemp("formats"), np.random.default_rng(5)
    shapes = {"embed_tokens.weight": (3200, 32), "norm.weight": (32,)}
    shapes |= {f"layers.0.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {f"layers.0.self_attn.{name}_proj.weight": (32, 32) for name in "qo"}
    shapes |= {f"layers.0.self_attn.{name}_proj.weight": (16, 32) for name in "kv"}
    weights = {f"model.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in (*FORMATS, *(f"{name}-forced" for name in FORCED)):
        (directory := root / name).mkdir()
        save_file(weights, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(CONFIG))
        format = name.removesuffix("-forced")
        marks = "{# " + " ".join(json.loads((BUILT_IN / f"{format}.json").read_text())["marks"]) + " #}"
        template = CHAT if format == name else marks + CHAT
        write_tokenizer(directory, template, response_template=load_built_in(format).source)
    return root


@pytest.fixture(scope="module")
def server(checkpoints):
    models = [text for path in checkpoints.iterdir() for text in ("--model", f"{path.name}={path}")]
    with serving(*models, "--dtype", "float32", "--num-kv-blocks", "64") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    )


@pytest.mark.parametrize("name", FORMATS)
def test_stream_joins_to_the_whole_reply(client, checkpoints, name):
    thought, _ = THOUGHTS.get(name, ("", ""))
    text = thought + TWO_CALLS.get(name, ONE_CALL.get(name, "It is **2**.")).replace("Paris", "北京 🦊 e\u0301")
    whole, told = ask(client, checkpoints, name, text)
    choice, expected = whole.choices[0], parse(name, text)
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        (call.name, call.arguments) for call in expected.calls
    ]
    assert len({call.id for call in calls}) == len(calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert (choice.message.content or "") == expected.content
    if thought:
        assert choice.message.reasoning == choice.message.reasoning_content == expected.reasoning
    num_thoughts = whole.usage.completion_tokens_details.reasoning_tokens
    assert "".join(token.token for token in told[:num_thoughts]) == thought.rstrip()


@pytest.mark.parametrize("name", FORMATS)
def test_answer_behind_a_thought_and_a_call_that_is_cut_off_are_content(client, checkpoints, name):
    thought, _ = THOUGHTS.get(name, ("", ""))
    answer, _ = ANSWERS.get(name, ("It is **2**.", ""))
    call = ONE_CALL.get(name, "")
    text = thought + answer + call[: len(call) // 2]
    whole, _ = ask(client, checkpoints, name, text)
    choice, expected = whole.choices[0], parse(name, text)
    assert (choice.message.content, choice.finish_reason) == (expected.content, "stop")
    assert choice.message.tool_calls is None and not expected.calls


def test_thought_may_be_left_out(client, checkpoints):
    name, (thought, _) = next(iter(THOUGHTS.items()))
    added_tokens = Tokenizer(checkpoints / name).added_tokens
    grammar = f"start: {GrammarWriter(added_tokens).text(thought + 'It is **2**.')}"
    fields = {"model": name, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 500}
    extra = {"structured_outputs": {"grammar": grammar}}
    shown = client.chat.completions.create(**fields, extra_body=extra)
    assert shown.choices[0].message.reasoning
    extra["include_reasoning"] = False
    whole = client.chat.completions.create(**fields, extra_body=extra)
    message = whole.choices[0].message.to_dict()
    assert message == {"role": "assistant", "content": shown.choices[0].message.content, "refusal": None}
    assert whole.usage == shown.usage
    chunks = list(client.chat.completions.create(**fields, extra_body=extra, stream=True))
    deltas = [choice.delta.to_dict() for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert not any(key.startswith("reasoning") for delta in deltas for key in delta)


MARKS = ("<", "[TOOL", "｜", "function", "invoke", "parameter", "weather")
"""Texts of which some stand in the marks of every format's calls."""


@pytest.mark.parametrize("name", FORCED)
def test_forced_call_that_max_tokens_cuts_off_is_a_call_in_every_api(server, name):
    name, function = f"{name}-forced", TOOLS[0]["function"]
    chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    numbers = []
    for max_tokens in (2, 30, 60):
        for is_named in (False, True):
            choice = {"type": "function", "function": {"name": "weather"}} if is_named else "required"
            body = chat | {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": max_tokens}
            status, whole = server.post("/v1/chat/completions", body)
            assert status == 200, whole
            message = whole["choices"][0]["message"]
            calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
            text, streamed = message["content"] or "", stream_of_chat(server, body)
            if whole["choices"][0]["finish_reason"] == "length":
                assert not any(mark in text for mark in MARKS)
            assert streamed == (text, calls, whole["choices"][0]["finish_reason"])
            numbers.append(len(calls))
            tool = {"type": "function", "name": "weather", "parameters": function["parameters"]}
            response_choice = {"type": "function", "name": "weather"} if is_named else "required"
            body = {"model": name, "input": "hi", "temperature": 0, "max_output_tokens": max_tokens, "store": False}
            _, response = server.post("/v1/responses", body | {"tools": [tool], "tool_choice": response_choice})
            items = [item for item in response["output"] if item["type"] == "function_call"]
            assert [item["arguments"] for item in items] == calls
            if whole["choices"][0]["finish_reason"] == "length":
                assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            tool = {"name": "weather", "input_schema": function["parameters"]}
            message_choice = {"type": "tool", "name": "weather"} if is_named else {"type": "any"}
            body = chat | {"max_tokens": max_tokens, "tools": [tool], "tool_choice": message_choice}
            _, answer = server.post("/v1/messages", body)
            blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
            assert [block["name"] for block in blocks] == ["weather"] * len(calls)
            assert all(isinstance(block["input"], dict) for block in blocks)
            if whole["choices"][0]["finish_reason"] == "length":
                assert answer["stop_reason"] == "max_tokens"
    assert numbers[0] == 0 and numbers[-1] >= 1


def stream_of_chat(server, body) -> tuple[str, list[str], str]:
    """Content, arguments of the calls, and why the answer ended."""
    connection, response = server.open("POST", "/v1/chat/completions", body | {"stream": True})
    with connection:
        lines = [line.removeprefix(b"data: ") for line in response.read().split(b"\n\n")]
    choices = [json.loads(line)["choices"][0] for line in lines if line.startswith(b"{")]
    calls = [call["function"]["arguments"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
    return "".join(choice["delta"].get("content", "") for choice in choices), calls, choices[-1]["finish_reason"]


def ask(client: openai.OpenAI, checkpoints, name: str, text: str):
    """The completion that the model answers with exactly this text, and its tokens; its stream must come to the same."""
    added_tokens = Tokenizer(checkpoints / name).added_tokens
    fields = {
        "model": name,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "max_tokens": 500,
        "logprobs": True,
        "extra_body": {"structured_outputs": {"grammar": f"start: {GrammarWriter(added_tokens).text(text)}"}},
    }
    whole = client.chat.completions.create(**fields)
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion()
    message, other = (one.choices[0].message.model_dump() for one in (whole, streamed))
    for key in ("content", "reasoning", "reasoning_content"):
        assert (message.get(key) or "") == (other.get(key) or "")
    for mine, its in zip(message["tool_calls"] or [], other["tool_calls"] or [], strict=True):
        assert {key: mine["function"][key] for key in ("name", "arguments")} == {
            key: its["function"][key] for key in ("name", "arguments")
        }
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage.completion_tokens_details == whole.usage.completion_tokens_details
    return whole, whole.choices[0].logprobs.content
