"""Answers that must have a form, through ``LLM`` with the bundled model: they have it, however they are drawn and run."""

from __future__ import annotations

import json
import random
import re

import msgspec
import pytest
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams, StructuredOutputs
from labinfer.base.errors import UserError
from labinfer.text import guidance
from labinfer.weights.resolve import resolve_model

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 3},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}
FORMS = {
    "regex": StructuredOutputs(regex=r"[A-Z][a-z]{1,9} is [0-9]{1,3} (years|days) old\."),
    "choice": StructuredOutputs(choice=["Paris", "Paris, France", "巴黎", "I do not know"]),
    "json": StructuredOutputs(json=SCHEMA),
    "grammar": StructuredOutputs(grammar='start: sum\nsum: NUMBER (" + " NUMBER){1,4}\nNUMBER: /[1-9][0-9]{0,2}/'),
}
CHATS = [[{"role": "user", "content": text}] for text in ("What is LABInfer?", "法国的首都是哪里？", "Sort 5, 3, 9.")]
PLAIN = SamplingParams(max_tokens=24, temperature=0.7, seed=9)


@pytest.fixture(scope="module")
def demo():
    # Functions that are chosen by measured times may differ between two 16-bit models, and so may their tokens.
    with LLM(num_kv_blocks=200, threads=1, autotune=False) as llm:
        yield llm


def check(kind: str, text: str) -> None:
    """That a complete answer has its form."""
    if kind == "regex":
        assert re.fullmatch(FORMS["regex"].regex, text), text
    elif kind == "choice":
        assert text in FORMS["choice"].choice
    elif kind == "grammar":
        assert re.fullmatch(r"[1-9][0-9]{0,2}( \+ [1-9][0-9]{0,2}){1,4}", text), text
    else:
        value = json.loads(text)
        assert {"city", "population", "capital"} <= set(value) <= set(SCHEMA["properties"]), text
        assert isinstance(value["city"], str) and len(value["city"]) <= 12
        assert type(value["population"]) is int and 0 <= value["population"] <= 10**8
        assert isinstance(value["capital"], bool)
        assert len(value.get("tags", [])) <= 3 and set(value.get("tags", [])) <= {"old", "new"}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_have_their_form(demo, kind, temperature):
    params = SamplingParams(max_tokens=300, temperature=temperature, n=3, seed=4, structured_outputs=FORMS[kind])
    for output in demo.generate(CHATS, params):
        assert len(output.completions) == 3
        for completion in output.completions:
            assert completion.finish_reason == "stop"
            check(kind, completion.text)
    if temperature and kind in ("regex", "json"):
        assert len({completion.text for completion in output.completions}) == 3


def test_any_json_object(demo):
    params = SamplingParams(
        max_tokens=400, temperature=1.0, n=3, structured_outputs=StructuredOutputs(json_object=True)
    )
    done = [c for output in demo.generate(CHATS, params) for c in output.completions if c.finish_reason == "stop"]
    assert done and all(isinstance(json.loads(completion.text), dict) for completion in done)


def test_grammar_may_be_in_the_form_of_llama_cpp_and_vllm(demo):
    grammar = 'root ::= sum # of numbers\nsum ::= number (" + " number){1,4}\nnumber ::= [1-9] [0-9]{0,2}'
    params = SamplingParams(
        max_tokens=60, temperature=1.0, n=3, seed=4, structured_outputs=StructuredOutputs(grammar=grammar)
    )
    for output in demo.generate(CHATS, params):
        for completion in output.completions:
            assert completion.finish_reason == "stop"
            check("grammar", completion.text)
    with pytest.raises(UserError, match="structured_outputs.grammar, line 2: undefined rule 'b'"):
        demo.generate(CHATS[0], SamplingParams(structured_outputs=StructuredOutputs(grammar='root ::= "a"\n b')))


def test_answer_may_be_cut_by_its_length(demo):
    params = SamplingParams(max_tokens=5, structured_outputs=FORMS["json"])
    for output in demo.generate(CHATS, params):
        assert output.finish_reason == "length" and len(output.token_ids) == 5 and output.text.startswith("{")


def test_streamed_pieces_are_the_text(demo):
    pieces: dict[int, str] = {}

    def listen(delta):
        pieces[delta.key] = pieces.get(delta.key, "") + delta.text

    params = SamplingParams(max_tokens=300, temperature=1.5, structured_outputs=FORMS["json"])
    for output in demo.generate(CHATS, params, on_delta=listen):
        assert pieces[output.key] == output.text
        check("json", output.text)


def test_end_comes_only_where_the_answer_is_complete(demo):
    """``a+`` may end anywhere, and ``min_tokens`` holds the end back as long as more may come."""
    params = {"temperature": 1.0, "max_tokens": 12, "n": 4, "logit_bias": {EOS: 100.0}}
    free = StructuredOutputs(regex="a+")
    (output,) = demo.generate(CHATS[:1], SamplingParams(structured_outputs=free, **params))
    assert all(re.fullmatch("a+", c.text) and c.token_ids[1:] == [EOS] for c in output.completions)
    (output,) = demo.generate(CHATS[:1], SamplingParams(structured_outputs=free, min_tokens=6, **params))
    assert all(len(c.token_ids) == 7 and c.token_ids[-1] == EOS for c in output.completions)
    fixed = StructuredOutputs(choice=["no"])
    (output,) = demo.generate(CHATS[:1], SamplingParams(structured_outputs=fixed, min_tokens=6, **params))
    assert {(c.text, c.finish_reason) for c in output.completions} == {("no", "stop")}


def test_constraints_that_forbid_the_form_are_refused(demo):
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="no"), allowed_token_ids=[65])
    with pytest.raises(UserError, match="allowed_token_ids forbid every token with which structured_outputs can start"):
        demo.generate(CHATS[0], params)


def test_constraints_that_forbid_the_rest_of_the_form_break_the_answer_off(demo):
    (seven,) = demo.tokenizer.encode("7", add_special_tokens=False)
    form = StructuredOutputs(regex="7[a-z]+")
    params = SamplingParams(max_tokens=9, allowed_token_ids=[seven], structured_outputs=form)
    (output,) = demo.generate(["red"], params)
    assert (output.text, output.finish_reason) == ("7", "abort")
    assert output.error.startswith("structured_outputs and allowed_token_ids allow no token after 1 output token")


def mixed(kinds: list[str], seed: int) -> list[SamplingParams]:
    draw = random.Random(seed)
    return [
        SamplingParams(
            max_tokens=60,
            temperature=draw.choice([0.0, 1.5]),
            seed=number,
            n=draw.choice([1, 2]),
            structured_outputs=FORMS.get(kind),
        )
        for number, kind in enumerate(kinds)
    ]


def texts_of(outputs) -> list[list[tuple[str, str]]]:
    return [[(completion.text, completion.finish_reason) for completion in output.completions] for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 34, "max_num_seqs": 8},
        {"num_kv_blocks": 34, "max_num_seqs": 8, "preemption_mode": "swap", "swap_space": 0.01},
        {"chunked_prefill_size": 5, "max_num_batched_tokens": 16, "max_inflight": 3},
    ],
)
def test_forms_and_other_requests_are_the_same_under_pressure(demo, options):
    """Preempted, swapped and cut into chunks: every answer is the one it has alone."""
    kinds = ["json", "none", "regex", "none", "choice", "grammar", "json", "none", "regex", "json"]
    chats = [CHATS[number % 3] for number in range(len(kinds))]
    params = mixed(kinds, seed=1)
    alone = [texts_of(demo.generate([chat], one))[0] for chat, one in zip(chats, params, strict=True)]
    with LLM(block_size=4, threads=1, autotune=False, **options) as llm:
        assert texts_of(llm.generate(chats, params)) == alone
        if "num_kv_blocks" in options:
            assert llm.report.counts["preemptions"] > 0
    for kind, answers in zip(kinds, alone, strict=True):
        for text, reason in answers:
            if kind != "none" and reason == "stop":
                check(kind, text)


def test_requests_without_a_form_are_as_before_beside_others(demo):
    alone = texts_of(demo.generate(CHATS, PLAIN))
    guided = msgspec.structs.replace(PLAIN, structured_outputs=FORMS["json"])
    together = texts_of(demo.generate([*CHATS, *CHATS], [PLAIN] * 3 + [guided] * 3))
    assert together[:3] == alone and together[3:] != alone


# Refusals, and limits on the way.


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, "prompt 1: structured_outputs.regex is refused"),
        ({"json": {"type": "strong"}}, "prompt 1: structured_outputs.json is refused"),
        ({"grammar": "start: nothing"}, "prompt 1: structured_outputs.grammar is refused"),
    ],
)
def test_form_that_is_none_is_refused_before_anything_runs(demo, form, says):
    with pytest.raises(UserError, match=says):
        demo.generate(CHATS, [PLAIN, SamplingParams(structured_outputs=StructuredOutputs(**form)), PLAIN])
    assert demo.generate(CHATS[0], PLAIN)


def test_limit_that_is_hit_on_the_way_ends_that_answer_only(demo, monkeypatch, caplog):
    alone = texts_of(demo.generate(CHATS, PLAIN))
    monkeypatch.setitem(guidance.LIMITS, "max_lexer_states", 40)
    with LLM(num_kv_blocks=200, threads=1) as llm:
        hard = SamplingParams(
            max_tokens=200, temperature=1.5, structured_outputs=StructuredOutputs(regex="[ab]*a[ab]{9}c{300}")
        )
        broken, *others = llm.generate([CHATS[0], *CHATS], [hard] + [PLAIN] * 3)
        assert broken.finish_reason == "abort"
        assert texts_of(others) == alone
    assert "is aborted" in caplog.text


def test_token_prompts_of_a_model_whose_logits_are_wider_than_its_tokenizer(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "qwen2-tied")
    with LLM(str(checkpoint), num_kv_blocks=200, threads=1) as llm:
        assert llm.tokenizer.vocab_size < llm.spec.vocab_size
        params = SamplingParams(max_tokens=300, temperature=1.5, n=4, structured_outputs=FORMS["json"])
        for output in llm.generate(mixed_prompts(3), params):
            for completion in output.completions:
                assert all(token < llm.tokenizer.vocab_size for token in completion.token_ids)
                if completion.finish_reason == "stop":
                    check("json", completion.text)
        (checkpoint / "tokenizer.json").unlink()
    with LLM(str(checkpoint), num_kv_blocks=200, threads=1) as llm, pytest.raises(UserError, match="no tokenizer"):
        llm.generate(mixed_prompts(1), params)


# Behind thoughts.

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n<think>\n"
THINKS += "{% if not enable_thinking %}\n</think>\n\n{% endif %}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The bundled model with a chat template that opens thoughts, and a token that ends them."""
    bundled, directory = resolve_model("demo", "", may_download=False), tmp_path_factory.mktemp("thinker")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).symlink_to(bundled / name)
    words = json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8"))
    closing = next(token for token in words["added_tokens"] if token["content"] == "<|endoftext|>")
    closing.update(content="</think>", special=False)
    words["model"]["vocab"]["</think>"] = words["model"]["vocab"].pop("<|endoftext|>", closing["id"])
    (directory / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    config = json.loads((bundled / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = {"chat_template": "{# </think> #}" + THINKS, "eos_token": config["eos_token"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    # In float32, whose tokens are the same with any kernels: how long a drawn thought is would else depend on them.
    with LLM(str(directory), num_kv_blocks=200, threads=1, dtype="float32") as llm:
        yield llm, closing["id"]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("thinks", [True, False])
def test_form_begins_behind_a_thought(thinker, kind, thinks):
    llm, closing = thinker
    prompt = {"messages": CHATS[0], "chat_template_kwargs": {"enable_thinking": thinks}}
    for bias in (100.0, 9.0):  # the thought ends at once, or after a while
        params = SamplingParams(
            max_tokens=300, temperature=1.0, seed=3, structured_outputs=FORMS[kind], logit_bias={closing: bias}
        )
        (output,) = llm.generate([prompt], params)
        thought, ends, form = output.text.rpartition("</think>")
        assert (ends == "</think>") == thinks and not thought.count("</think>")
        assert output.finish_reason == "stop"
        check(kind, form.strip())
