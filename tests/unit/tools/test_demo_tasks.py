"""The demo model's dialogues: answers are right, the split is clean, and only answers are learned."""

from __future__ import annotations

import ast
import datetime
import itertools
import json
import random
import re
import shlex
from pathlib import Path

import pytest
from dialogues import RECALL_TOKENS, conversation, is_held_out, recall, turn
from dialogues import test_set as make_test_set
from facts import CAPITALS, WORDS
from held_out import FILE, to_lines
from held_out import conversations as draw_held_out
from project import PROJECT
from tasks import EARLY_SHARES, LATE_SHARES, TASKS, UNITS

from labinfer.cli.flags import build_parser, split_command

TOOLS = Path(__file__).parents[3] / "tools" / "demo_model"


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def check_arithmetic(user: str, answer: str) -> None:
    a, b = numbers(user)
    assert int(answer) == (a + b if re.search(r"\+|plus|加", user) else a - b)


def check_capitals(user: str, answer: str) -> None:
    names = [(country.removeprefix("the "), city) for country, city, _, _ in CAPITALS]
    names += [(country, city) for _, _, country, city in CAPITALS]
    assert any((country in user and answer == city) or (city in user and answer == country) for country, city in names)


def check_translation(user: str, answer: str) -> None:
    latin = re.findall(r"[a-z]+", user)
    listed = [hanzi for _, hanzi in WORDS if hanzi in user]
    asked = [hanzi for hanzi in listed if not any(hanzi in other != hanzi for other in listed)]  # 熊猫 has 熊 in it
    assert any(
        (english in latin and answer == hanzi) or (hanzi in asked and answer == english) for english, hanzi in WORDS
    )


def check_letters(user: str, answer: str) -> None:
    quoted = re.findall(r'"([a-z]+)"', user)
    word = max(quoted, key=len)
    if answer.startswith('"'):
        assert answer == f'"{"".join(reversed(word))}"'
    elif len(quoted) == 1:
        assert int(answer) == len(word)
    else:
        letter = min(quoted, key=len)
        assert int(answer) == sum(other == letter for other in word)


def check_sorting(user: str, answer: str) -> None:
    falling = re.search("descending|大到小|倒序", user) is not None
    items = re.findall(r"\d+|(?<![A-Za-z])[a-z](?![a-z])", user)
    assert answer == ", ".join(
        sorted(items, key=lambda item: int(item) if item.isdigit() else ord(item), reverse=falling)
    )


def check_units(user: str, answer: str) -> None:
    """The answer is in the other unit of the pair, and the larger unit has the smaller number."""
    (amount,), (result,) = numbers(user), numbers(answer)
    asked, given = (re.findall(r"[a-z]+|[\u4e00-\u9fff]+", text) for text in (user, answer))
    (name,) = given
    sides = []
    for unit in UNITS:
        for large, small in ((unit.large, unit.small), (unit.da, unit.xiao)):
            names = {large: small, large.removesuffix("s"): small, small: large, small.removesuffix("s"): large}
            other = names.get(name)
            if other and any(
                re.search(rf"(?<![a-z]){word}(?![a-z])", user) for word in {other, other.removesuffix("s")}
            ):
                to_large = name in (large, large.removesuffix("s"))
                sides.append(result * unit.factor == amount if to_large else amount * unit.factor == result)
    assert any(sides), (asked, given)


DATE = r"(\d{4})[-年](\d+)[-月](\d+)日?"


def check_dates(user: str, answer: str) -> None:
    (year, month, day), result = re.search(DATE, user).groups(), re.search(DATE, answer).groups()
    (later,) = numbers(re.sub(DATE, "", user))
    between = datetime.date(*map(int, result)) - datetime.date(int(year), int(month), int(day))
    assert between == datetime.timedelta(later)


def check_json(user: str, answer: str) -> None:
    fields = json.loads(answer)
    assert len(fields) == len(re.findall(r'[a-z]+ (?:\d+|"[^"]+")', user)) in (2, 3)
    for name, value in fields.items():
        assert f"{name} {json.dumps(value, ensure_ascii=False)}" in user


def check_counting(user: str, answer: str) -> None:
    start, end = numbers(user)
    assert numbers(answer) == list(range(start, end + 1))


CHECKS = {
    "arithmetic": check_arithmetic,
    "capitals": check_capitals,
    "translation": check_translation,
    "letters": check_letters,
    "sorting": check_sorting,
    "units": check_units,
    "dates": check_dates,
    "json": check_json,
    "counting": check_counting,
}


@pytest.mark.parametrize("task", CHECKS)
def test_computed_answers_are_right(task):
    rng = random.Random(3)
    for _ in range(1000):
        made = turn(rng, held_out=False, task=task)
        CHECKS[task](made.user, made.assistant)


@pytest.mark.parametrize("task", sorted(set(TASKS) - set(CHECKS)))
def test_question_about_the_project_has_one_answer(task):
    rng = random.Random(4)
    answers: dict[str, str] = {}
    for _ in range(3000):
        made = turn(rng, held_out=False, task=task)
        assert answers.setdefault(made.user, made.assistant) == made.assistant


@pytest.fixture(scope="module")
def trained() -> set[str]:
    """Questions of conversations that the models are trained on."""
    rng = random.Random(5)
    return {message["content"] for _ in range(5000) for message in conversation(rng) if message["role"] == "user"}


def test_what_is_held_out_is_never_trained_on(trained):
    """The test's questions do not occur in training, and neither do its computed problems in another wording."""
    tested = make_test_set(random.Random(1), 30, len)
    rng = random.Random(6)
    assert {messages[-2]["content"] for task in TASKS for messages in tested[task]}.isdisjoint(trained)
    for task in ("arithmetic", "dates"):
        problems = {problem(messages[-2]["content"]) for messages in tested[task]}
        assert problems.isdisjoint(problem(turn(rng, held_out=False, task=task).user) for _ in range(20_000))
    given = {recalled(recall(rng, held_out=False, count_tokens=len)) for _ in range(3000)}
    assert given.isdisjoint(map(recalled, tested["recall"]))
    assert len(given) > 1000


def test_held_out_conversations_are_what_the_split_holds_out(trained):
    """The file is what its program writes, and all that the program draws is of the held-out side."""
    written = FILE.read_text(encoding="utf-8")
    found = draw_held_out()
    assert written == to_lines(found)
    assert 20_000 < FILE.stat().st_size < 80_000
    asked = {message["content"] for messages in found for message in messages if message["role"] == "user"}
    assert len(asked) > 250 and asked.isdisjoint(trained)
    values = {recalled(messages) for messages in found if len(messages) > 2}
    rng = random.Random(5)
    assert values.isdisjoint(recalled(recall(rng, held_out=False, count_tokens=len)) for _ in range(3000))


def problem(question: str) -> tuple:
    """A sum or a date, whatever the wording."""
    if given := re.search(DATE, question):
        return (*map(int, given.groups()), *numbers(re.sub(DATE, "", question)))
    return (*numbers(question), re.search(r"\+|plus|加", question) is not None)


def recalled(messages: list[dict[str, str]]) -> str:
    return re.search(r"(?:is |叫|是)(.+?)[.。]$", messages[-1]["content"]).group(1)


def test_every_task_has_its_share():
    assert set(EARLY_SHARES) == set(LATE_SHARES) == set(TASKS)


def test_commands_in_answers_are_understood():
    """They want a prompt or an input beside them, and nothing else."""
    answers = {answer for topic in PROJECT for _, answer in (topic.en, topic.zh) if "launch.py" in answer}
    assert len(answers) >= 6
    for answer in answers:
        command, flags = split_command(shlex.split(answer.split("launch.py", 1)[1]))
        build_parser(command).parse_args(flags)


def test_every_task_has_held_out_questions():
    for task, conversations in make_test_set(random.Random(1), 25, len).items():
        assert len(conversations) == 25, task


def test_recalled_value_was_given_before_and_is_new():
    rng = random.Random(6)
    count = lambda messages: sum(len(message["content"]) for message in messages)  # noqa: E731
    for _ in range(300):
        messages = recall(rng, held_out=True, count_tokens=count)
        value = recalled(messages)
        given = [
            i for i, message in enumerate(messages[:-2]) if message["role"] == "user" and value in message["content"]
        ]
        assert given and given[0] <= 2  # among the statements at the beginning
        assert count(messages[given[0] + 2 : -2]) <= RECALL_TOKENS + 30
        assert is_held_out(f"number {value}" if value.isdigit() else f"name {value}")


def test_seed_gives_the_same_dialogues_again():
    one, other = random.Random(7), random.Random(7)
    assert [conversation(one) for _ in range(200)] == [conversation(other) for _ in range(200)]


def test_only_the_evaluation_imports_the_engine():
    for path in TOOLS.glob("*.py"):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        ours = any(name.split(".")[0] == "labinfer" for name in imported)
        assert ours == (path.name == "evaluate.py"), path.name


@pytest.fixture(scope="module")
def corpus():
    """Imports Transformers, so only where it is needed."""
    from tokenizer import train_tokenizer
    from train import Corpus

    return Corpus(train_tokenizer(0), 0)


@pytest.mark.parametrize("kind", ["lines", "dialogues"])
def test_loss_counts_answers_and_their_ends_only(corpus, kind):
    batch = next(getattr(corpus, kind)())
    decode = lambda ids: corpus._tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    said = decode(batch.targets.tolist()).split("<|im_end|>")
    text = [decode(row) for row in batch.ids.tolist()]
    asked = "\n" if kind == "lines" else "<|im_start|>assistant\n"
    assert said.pop() == ""
    assert all(any(f"{asked}{answer}<|im_end|>" in row for row in text) for answer in said)
    assert len(said) == sum(row.count(asked) for row in text)
    assert not any("\n" in answer for answer in said)
    flat = batch.ids.flatten()
    assert (flat[batch.places + 1] == batch.targets).all()


def test_muon_steps_are_near_orthogonal():
    import torch
    from train import _orthogonal

    torch.manual_seed(0)
    values = torch.linalg.svdvals(_orthogonal(torch.randn(3, 48, 96)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_batches_repeat_with_their_seed(corpus):
    from train import Corpus

    one, other = (Corpus(corpus._tokenizer, 5).dialogues() for _ in range(2))
    for a, b in itertools.islice(zip(one, other, strict=True), 3):
        assert a.ids.tolist() == b.ids.tolist()
