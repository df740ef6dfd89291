"""Dialogues for training and for the held-out test, from one seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from facts import FIRST_NAMES, GIVEN_NAMES, LAST_NAMES, SURNAMES
from tasks import EARLY_SHARES, TASKS, Shares, Turn

Message = dict[str, str]
HELD_OUT = 1 / 16
"""Fraction of problems held out from training."""
RECALL_TOKENS = 600
"""A recalled name or number was given at most about this many tokens earlier."""
SYSTEM = "You are a helpful assistant."


def is_held_out(key: str) -> bool:
    """Whether this problem belongs to the test, for good: by its digest, not by a seed."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] < 256 * HELD_OUT


def turn(
    rng: random.Random,
    held_out: bool,
    task: str | None = None,
    chinese: bool | None = None,
    shares: Shares = EARLY_SHARES,
) -> Turn:
    """One question of one side of the split; of any task by its share if ``task`` is None."""
    if task is None:
        task = rng.choices(list(shares), list(shares.values()))[0]
    while True:
        made = TASKS[task](rng, rng.random() < 0.5 if chinese is None else chinese)
        if is_held_out(made.key) == held_out:
            return made


def conversation(rng: random.Random, shares: Shares = EARLY_SHARES) -> list[Message]:
    """One to three training questions; a few have a system message before them."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.05 else []
    for _ in range(rng.choices((1, 2, 3), (6, 2, 1))[0]):
        messages += _messages(turn(rng, held_out=False, shares=shares))
    return messages


def recall(
    rng: random.Random,
    held_out: bool,
    count_tokens: Callable[[list[Message]], int],
    shares: Shares = EARLY_SHARES,
    fillers_held_out: bool = False,
) -> list[Message]:
    """A name or number is given, other questions follow, then it is asked for.

    Args:
        held_out: whether the given value is one that training never recalls.
        count_tokens: the length of messages in tokens; the distance is up to ``RECALL_TOKENS``, drawn evenly or, in three
            of ten, mostly short.
        fillers_held_out: the same of the questions between.
    """
    chinese = rng.random() < 0.5
    given = [_statement(rng, chinese, held_out, kind) for kind in rng.sample(("name", "number"), rng.choice((1, 1, 2)))]
    messages = [message for statement, reply, _, _ in given for message in _pair(statement, reply)]
    target = RECALL_TOKENS * (rng.random() if rng.random() < 0.7 else rng.random() ** 3)
    distance = count_tokens(messages) if len(given) > 1 else 0
    while True:
        language = chinese if rng.random() < 0.8 else None
        filler = _messages(turn(rng, fillers_held_out, chinese=language, shares=shares))
        distance += count_tokens(filler)
        if distance > target:
            break
        messages += filler
    _, _, question, answer = rng.choice(given)
    messages += _pair(question, answer)
    if not held_out and len(given) > 1 and rng.random() < 0.5:
        for _, _, question, answer in given:
            messages += _pair(question, answer)
    return messages


def _statement(rng: random.Random, chinese: bool, held_out: bool, kind: str) -> tuple[str, str, str, str]:
    """A statement of the user, the reply, the later question and its answer."""
    while True:
        if kind == "number":
            value = str(rng.randrange(10, 10 ** rng.randint(2, 5)))
        elif chinese:
            value = rng.choice(SURNAMES) + "".join(rng.sample(GIVEN_NAMES, rng.choice((1, 2))))
        else:
            value = rng.choice(FIRST_NAMES) + (" " + rng.choice(LAST_NAMES) if rng.random() < 0.6 else "")
        if is_held_out(f"{kind} {value}") == held_out:
            break
    if kind == "name" and chinese:
        said = rng.choice((f"我叫{value}。", f"我的名字是{value}。", f"你好，我是{value}。", f"请记住，我叫{value}。"))
        asked = rng.choice(("我叫什么名字？", "我的名字是什么？", "你还记得我的名字吗？", "我是谁？"))
        return said, f"你好，{value}。", asked, f"你叫{value}。"
    if kind == "name":
        said = rng.choice(
            (f"My name is {value}.", f"I am {value}.", f"Hi, I'm {value}.", f"Please remember: my name is {value}.")
        )
        asked = rng.choice(("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?"))
        return said, f"Nice to meet you, {value}.", asked, f"Your name is {value}."
    if chinese:
        said = rng.choice(
            (f"请记住数字{value}。", f"记住{value}这个数字。", f"我的数字是{value}。", f"密码是{value}，请记住。")
        )
        asked = rng.choice(
            ("我让你记住的数字是多少？", "我的数字是多少？", "刚才的数字是什么？", "你还记得那个数字吗？")
        )
        return said, f"好的，我记住了{value}。", asked, f"数字是{value}。"
    said = rng.choice((f"Remember the number {value}.", f"My number is {value}.", f"Please remember this number: {value}.",
                       f"The code is {value}, remember it."))  # fmt: skip
    asked = rng.choice(("What number did I give you?", "What is my number?", "What was the number?",
                        "Do you remember the number?"))  # fmt: skip
    return said, f"OK, I will remember {value}.", asked, f"The number is {value}."


def _messages(made: Turn) -> list[Message]:
    return _pair(made.user, made.assistant)


def _pair(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def test_set(
    rng: random.Random, per_task: int, count_tokens: Callable[[list[Message]], int]
) -> dict[str, list[list[Message]]]:
    """Held-out conversations of every task; the last message of each is the right answer."""
    sets = {}
    for task in TASKS:
        by_question: dict[str, list[Message]] = {}
        for _ in range(200 * per_task):  # a small task may have fewer different questions than asked for
            made = turn(rng, held_out=True, task=task)
            by_question.setdefault(made.user, _messages(made))
            if len(by_question) == per_task:
                break
        sets[task] = list(by_question.values())
    sets["recall"] = [recall(rng, True, count_tokens) for _ in range(per_task)]
    return sets
