"""Replies as models of each format write them, for the tests of parsers and grammars."""

from __future__ import annotations

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "places": {"type": "array"},
                    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

ARGUMENTS = '{"city": "Paris", "days": 3}'
TAGS = "\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
GLM_TAGS = (
    "\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
)
MINIMAX_TAGS = '\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
DSML_TAGS = (
    '\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>'
    '\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
)
KIMI = [
    f"<|tool_call_begin|>functions.weather:{index}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    for index in (0, 1)
]
DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
DEEPSEEK_31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
HARMONY = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"

ONE_CALL = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen_xml": f"<tool_call>\n<function=weather>{TAGS}</function>\n</tool_call>",
    "glm": f"<tool_call>weather{GLM_TAGS}</tool_call>",
    "minimax": f'<minimax:tool_call>\n<invoke name="weather">{MINIMAX_TAGS}</invoke>\n</minimax:tool_call>',
    "kimi": f"<|tool_calls_section_begin|>{KIMI[0]}<|tool_calls_section_end|>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{DEEPSEEK_31}<｜tool▁calls▁end｜>",
    "deepseek_v32": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">{DSML_TAGS}</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "mistral_json": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "hunyuan": f'<tool_calls>[{{"name": "weather", "arguments": {ARGUMENTS}}}]</tool_calls>',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "llama3": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "harmony": HARMONY,
    "ernie": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
}
"""A call of ``weather`` in each format."""

TWO_CALLS = {
    "hermes": ONE_CALL["hermes"] + "\n" + ONE_CALL["hermes"],
    "qwen_xml": ONE_CALL["qwen_xml"] + "\n" + ONE_CALL["qwen_xml"],
    "glm": ONE_CALL["glm"] + "\n" + ONE_CALL["glm"],
    "minimax": f'<minimax:tool_call>\n<invoke name="weather">{MINIMAX_TAGS}</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi": f"<|tool_calls_section_begin|>{KIMI[0]}{KIMI[1]}<|tool_calls_section_end|>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{DEEPSEEK_31}{DEEPSEEK_31}<｜tool▁calls▁end｜>",
    "deepseek_v32": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">{DSML_TAGS}</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "mistral": ONE_CALL["mistral"] * 2,
    "mistral_json": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
    "hunyuan": f'<tool_calls>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]</tool_calls>',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
    "harmony": f"{HARMONY}<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}",
    "ernie": ONE_CALL["ernie"] + "\n" + ONE_CALL["ernie"],
    "gemma4": ONE_CALL["gemma4"] + "<|tool_call>call:now{}<tool_call|>",
}

THOUGHTS = {
    **dict.fromkeys(
        (
            *("hermes", "qwen_xml", "glm", "minimax", "kimi", "hunyuan", "ernie", "granite", "think"),
            *("deepseek_v3", "deepseek_v31", "deepseek_v32"),
        ),
        ("<think>\nIt < 5, so\n</think>\n\n", "It < 5, so"),
    ),
    "mistral": ("[THINK]It < 5, so[/THINK]", "It < 5, so"),
    "gemma4": ("<|channel>thought\nIt < 5, so<channel|>", "It < 5, so"),
    "harmony": ("<|channel|>analysis<|message|>It < 5, so<|end|><|start|>assistant", "It < 5, so"),
}
"""A thought in each format, and what it says."""

ANSWERS = {
    "hunyuan": ("<answer>\nIt is **2**.", "It is **2**."),
    "ernie": ("<response>\nIt is **2**.\n</response>\n", "It is **2**."),
    "granite": ("<response>It is **2**.</response>", "It is **2**."),
    "harmony": ("<|channel|>final<|message|>It is **2**.", "It is **2**."),
}
"""Content where it has delimiters of its own, and what it says."""


def replies(name: str) -> list[str]:
    """Whole replies in a format: plain ones, thoughts, calls, and all of them together."""
    thought, _ = THOUGHTS.get(name, ("", ""))
    answer, _ = ANSWERS.get(name, ("It is **2**.", ""))
    texts = ["", answer, thought, thought + answer]
    for calls in (ONE_CALL.get(name), TWO_CALLS.get(name)):
        if calls:
            texts += [calls, thought + calls]
    texts.append(
        (thought + (ONE_CALL.get(name) or answer)).replace("Paris", "北京 🦊 e\u0301").replace("It", "Été，👩‍👧")
    )
    if name not in ANSWERS and name in ONE_CALL and name != "llama3":
        texts += ["Let me look.\n" + ONE_CALL[name], thought + "Look.\n\n" + ONE_CALL[name] + "\n"]
    return texts
