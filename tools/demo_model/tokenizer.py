"""A byte-level BPE tokenizer for the demo models, trained on their own dialogues, and the chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path

from dialogues import Message, conversation
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 3072
TRAINING_DIALOGUES = 60_000

PATTERN = "|".join(
    (
        r"[A-Za-z](?=[A-Za-z]*[\"”])",  # a word in quotes is read letter by letter, so that it can be reversed or counted
        r"\p{Han}",
        r"\p{N}",  # digit by digit, as Qwen2 has it
        r" ?(?:(?!\p{Han})\p{L})+",
        r" ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?",  # with the space before a number, so that numbers look the same everywhere
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'Functions that can be called, as JSON, one in a line:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}"
    "{{ '</tools>\\nTo call a function, write its name and an object with its arguments, in this form for each call:\\n' }}"
    """{{ '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}"""
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|im_start|>' + message['role'] }}"
    "{% if message['content'] %}{{ '\\n' + message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] %}"
    """{{ '\\n<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) }}"""
    """{{ ', "arguments": ' + (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"""
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen2's, without its default system message. Tools are listed in the system message, and calls and results have the form
of Qwen2.5 and Hermes (see ``labinfer/text/tool_calls.py``); training has none of them."""


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn the merges from training dialogues."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        f"{message['role']}\n{message['content']}" for _ in range(TRAINING_DIALOGUES) for message in conversation(rng)
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render(messages: list[Message]) -> str:
    """The conversation as the chat template writes it."""
    return "".join(f"{IM_START}{message['role']}\n{message['content']}{IM_END}\n" for message in messages)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Save ``tokenizer`` as the files that Transformers and the engine load."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Else AutoTokenizer takes Qwen2's own way to split texts instead of the one in tokenizer.json.
        "auto_map": {"AutoTokenizer": [None, "TokenizersBackend"]},
        "chat_template": CHAT_TEMPLATE,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
