"""Chat templates beside Transformers', and the sandbox they run in."""

from __future__ import annotations

import json

import pytest
from checkpoints import CHAT_TEMPLATE
from transformers import AutoTokenizer

from labinfer.base.errors import UserError
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.prompts import parse_prompt
from labinfer.text.chat_template import ChatTemplate
from labinfer.text.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "你好 <|im_end|> {{ 7 * 7 }}"},
        {"role": "assistant", "content": " ho "},
        {"role": "user", "content": ""},
    ],
]
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "trims blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U:{{ m.content }}\n    {% endif %}\n"
    "{% endfor %}\nend\n",
    "special tokens": "{{ bos_token }}{{ messages[0].content | trim }}{{ eos_token }}{{ pad_token }}",
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ 'é<&>' | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "no tools": "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCUMENTS{% endif %}x",
    "undefined tools": "{% if tools is defined and tools %}TOOLS{% endif %}{% if nothing is defined %}y{% endif %}x",
    "ensure_ascii": "{{ messages | tojson(ensure_ascii=True) }}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "several"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(bpe_directory, tmp_path, template, conversation):
    config = json.loads((bpe_directory / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|im_start|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATES[template]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    ours = Tokenizer(tmp_path)
    assert ours.encode_chat(conversation) == ours.encode(expected, add_special_tokens=False)
    tokens = {name: config[name] for name in ("bos_token", "eos_token", "pad_token")}
    assert ChatTemplate(TEMPLATES[template], tokens).render(conversation) == expected


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "é <&>", "parameters": {"type": "object", "properties": {}}},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [
    {"role": "user", "content": "And in 京都?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "京都", "days": 1}}},
            {"type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "20 C"},
    {"role": "tool", "content": '{"time": "10:00"}'},
    {"role": "assistant", "content": "It is 20 C at 10:00."},
]
TOOL_TEMPLATE = """
{%- if tools %}{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments | tojson }})
            {%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
        {%- endfor %}
    {%- elif m.role == 'tool' %}<{{ m.tool_call_id }}: {{ m.content }}>
    {%- else %}{{ m.role }}: {{ m.content }}
    {%- endif %}
{% endfor %}"""
"""Of our own, with what Qwen2.5's and Llama 3's do with tools and calls."""


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", [*CONVERSATIONS, CALLS], ids=["one", "several", "calls"])
def test_tools_and_calls_render_as_in_transformers(bpe_directory, tmp_path, conversation, tools):
    config = json.loads((bpe_directory / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TOOL_TEMPLATE}))
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(TOOL_TEMPLATE, {}).render(conversation, tools) == expected
    ours = Tokenizer(tmp_path)
    assert ours.encode_chat(conversation, tools) == ours.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, "{{ messages[0].tools }}{# tools #}{{ 'tools' }}"])
@pytest.mark.parametrize(("messages", "tools"), [(CONVERSATIONS[0], TOOLS), (CALLS, None)], ids=["tools", "calls"])
def test_template_without_a_place_for_tools_refuses_them(source, messages, tools):
    template = ChatTemplate(source, {})
    assert template.render(CONVERSATIONS[0], []) == template.render(CONVERSATIONS[0])
    with pytest.raises(UserError, match="does not support tools"):
        template.render(messages, tools)


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}off"
    "{% endif %}{% set local = budget | default(7) %}{{ local }}{{ strftime_now('%Y')[:0] }}{{ bos_token }}"
)


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "budget": "x"}])
def test_variables_are_those_of_transformers(bpe_directory, tmp_path, variables):
    config = json.loads((bpe_directory / "tokenizer_config.json").read_text())
    config |= {"chat_template": THINKING_TEMPLATE, "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CONVERSATIONS[0], tokenize=False, add_generation_prompt=True, **variables)
    assert (
        ChatTemplate(THINKING_TEMPLATE, {"bos_token": "<|im_start|>"}).render(CONVERSATIONS[0], None, variables)
        == expected
    )


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools", "local", "strftime_now", "bos_token", "range"])
def test_variable_that_the_template_does_not_read_is_refused(name):
    with pytest.raises(UserError, match=f"does not read '{name}'; it reads budget, enable_thinking"):
        ChatTemplate(THINKING_TEMPLATE, {}).render(CONVERSATIONS[0], None, {name: 1})


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ reasoning_effort }}", "none", "none"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "high", "True"),
        ("{{ thinking }}", "minimal", "True"),
        ("{{ reasoning_effort }} {{ enable_thinking is defined }}", "high", "high False"),
        ("{{ reasoning_effort }} {{ enable_thinking }}", "none", "none False"),
        ("unread", "low", "unread"),
        ("unread", "none", "unread"),
    ],
)
def test_reasoning_effort_becomes_what_the_template_has_for_it(bpe_directory, tmp_path, source, effort, expected):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    reader = InputProcessor(tmp_path, required=True)
    prompt, _ = parse_prompt({"messages": CONVERSATIONS[0], "reasoning_effort": effort})
    assert reader.tokenizer.decode(reader.encode(prompt)) == expected


def test_switch_of_thoughts_may_be_sent_to_a_template_that_does_not_read_it(bpe_directory, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ thinking }} {{ budget }}"}))
    reader = InputProcessor(tmp_path, required=True)

    def encode(**variables) -> str:
        prompt, _ = parse_prompt({"messages": CONVERSATIONS[0], "chat_template_kwargs": variables})
        return reader.tokenizer.decode(reader.encode(prompt))

    assert encode(enable_thinking=False, reasoning_effort="low", thinking=True, budget=5) == "True 5"
    with pytest.raises(UserError, match="does not read 'enable_thinkin'; it reads budget, thinking"):
        encode(enable_thinkin=False)


def test_past_reasoning_have_the_name_that_the_template_has(bpe_directory, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    source = "{# <|channel|><|message|> #}{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    tokenizer = Tokenizer(tmp_path)
    message = {"role": "assistant", "content": "42", "reasoning_content": "hm"}
    assert tokenizer.decode(tokenizer.encode_chat([message])) == "hmhm"


def test_template_may_look_for_tools_anywhere():
    source = "{% if mine is defined %}{% set tools = mine %}{% endif %}{% for t in tools or [] %}{{ t }}{% endfor %}"
    assert ChatTemplate(source, {}).render([], ["a"]) == "a"


def test_checkpoint_may_have_a_template_of_its_own_for_tools(bpe_directory, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    named = {"default": "no tools", "tool_use": "{{ tools | length }} tools", "rag": "rag"}
    templates = [{"name": name, "template": template} for name, template in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0])) == "no tools"
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0], TOOLS)) == "2 tools"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "file"}, "file"),
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "rag", "template": "rag"},
                        {"name": "default", "template": "default"},
                    ]
                }
            },
            "default",
        ),
    ],
)
def test_template_is_found_where_exports_put_it(bpe_directory, tmp_path, files, expected):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0])) == expected


def test_file_of_the_users_takes_the_place_of_all_templates(bpe_directory, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("the checkpoint's")
    (tmp_path / "mine.jinja").write_text("{{ 'tools' if tools else 'mine' }}")
    tokenizer = Tokenizer(tmp_path, chat_template=str(tmp_path / "mine.jinja"))
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0])) == "mine"
    assert tokenizer.decode(tokenizer.encode_chat(CONVERSATIONS[0], TOOLS)) == "tools"
    with pytest.raises(UserError, match=f"--chat-template {tmp_path}/none.jinja cannot be read"):
        Tokenizer(tmp_path, chat_template=str(tmp_path / "none.jinja"))


def test_special_tokens_may_be_written_as_objects(bpe_directory, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe_directory / "tokenizer.json").read_bytes())
    config = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<|im_start|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).encode_chat([]) == [2]


def test_without_a_template_messages_are_refused(sp):
    assert not sp.has_chat_template
    with pytest.raises(UserError, match="no chat template; send a prompt"):
        sp.encode_chat(CONVERSATIONS[0])


def test_template_may_refuse_the_messages():
    with pytest.raises(UserError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])


def test_date_is_at_hand():
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).isdigit()
