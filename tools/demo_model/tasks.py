"""The demo model's tasks: each function writes one question and its right answer, in English or Chinese.

A turn's ``key`` decides whether it is held out of training (``dialogues.is_held_out``). Where the answer is computed,
the key is the problem itself, so that a held-out problem is new in every wording and in both languages (its like, such
as the swapped sum, may be trained). Where it is known by heart, the key is the question's full text: the fact is
trained, and what is new is this wording of it, or only its opening and closing words.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from facts import CAPITALS, CITIES, FIRST_NAMES, GIVEN_NAMES, SURNAMES, WORDS
from project import CHAT, PROJECT


@dataclass(frozen=True)
class Turn:
    """One question with its answer."""

    task: str
    user: str
    assistant: str
    key: str


def arithmetic(rng: random.Random, chinese: bool) -> Turn:
    """Arithmetic turn: add or subtract numbers of up to three digits; a few differences are negative."""
    a, b = _number(rng), _number(rng)
    if rng.random() < 0.5:
        sign, word, result = "+", "加" if chinese else "plus", a + b
    else:
        if a < b and rng.random() < 0.85:
            a, b = b, a
        sign, word, result = "-", "减" if chinese else "minus", a - b
    forms = [f"{a} {sign} {b} = ?", f"{a} {sign} {b} =", f"{a}{sign}{b}=?", f"{a}{sign}{b}", f"{a} {sign} {b}"]
    if chinese:
        forms += [f"{a}{word}{b}等于多少？", f"{a}{sign}{b}等于几？", f"计算{a} {sign} {b}", f"请计算{a}{sign}{b}。"]
    else:
        forms += [
            f"What is {a} {sign} {b}?",
            f"What is {a} {word} {b}?",
            f"Calculate {a} {sign} {b}.",
            f"{a} {word} {b}?",
        ]
    return Turn("arithmetic", rng.choice(forms), str(result), f"{a}{sign}{b}")


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3)))


def capital(rng: random.Random, chinese: bool) -> Turn:
    """The capital of a country, or the country of a capital."""
    country, city, guo, shoudu = rng.choice(CAPITALS)
    short = country.removeprefix("the ")
    if chinese:
        questions, answer = [
            ([f"{guo}的首都是哪里？", f"{guo}的首都是什么？", f"{guo}首都在哪儿？", f"请问{guo}的首都是哪座城市？",
              f"哪座城市是{guo}的首都？", f"{guo}的首都", f"告诉我{guo}的首都。", f"你知道{guo}的首都吗？"], shoudu),
            ([f"{shoudu}是哪个国家的首都？", f"哪个国家的首都是{shoudu}？", f"{shoudu}是哪国的首都？",
              f"请问{shoudu}是哪个国家的首都？"], guo),
        ][rng.random() < 0.35]  # fmt: skip
    else:
        questions, answer = [
            ([f"What is the capital of {country}?", f"Capital of {country}?", f"Tell me the capital of {country}.",
              f"Which city is the capital of {country}?", f"What's the capital of {country}?",
              f"Name the capital of {country}.", f"Do you know the capital of {country}?",
              f"Which is the capital city of {country}?"], city),
            ([f"{city} is the capital of which country?", f"Which country has {city} as its capital?",
              f"Which country's capital is {city}?", f"What country is {city} the capital of?"], short),
        ][rng.random() < 0.35]  # fmt: skip
    question = rng.choice(questions)
    return Turn("capitals", question, answer, question)


def translation(rng: random.Random, chinese: bool) -> Turn:
    """Translation turn: an English word into Chinese, or a Chinese one into English."""
    english, hanzi = rng.choice(WORDS)
    if rng.random() < 0.5:
        answer = hanzi
        forms = (
            [f"{english}用中文怎么说？", f"{english}是什么意思？", f"把{english}翻译成中文", f"翻译成中文：{english}",
             f"请把{english}翻译成中文。", f"英文单词{english}的中文是什么？"]
            if chinese else
            [f"Translate to Chinese: {english}", f"Translate {english} into Chinese.", f"How do you say {english} in Chinese?",
             f"What is {english} in Chinese?", f"What is the Chinese for {english}?", f"The Chinese word for {english}?"]
        )  # fmt: skip
    else:
        answer = english
        forms = (
            [f"{hanzi}用英语怎么说？", f"{hanzi}的英文是什么？", f"把{hanzi}翻译成英文", f"翻译成英文：{hanzi}",
             f"请把{hanzi}翻译成英文。", f"{hanzi}的英语单词是什么？"]
            if chinese else
            [f"Translate to English: {hanzi}", f"Translate {hanzi} into English.", f"How do you say {hanzi} in English?",
             f"What is {hanzi} in English?", f"What is the English for {hanzi}?", f"The English word for {hanzi}?"]
        )  # fmt: skip
    question = rng.choice(forms)
    return Turn("translation", question, answer, question)


def letters(rng: random.Random, chinese: bool) -> Turn:
    """Reverse a quoted word, count its letters, or count one letter in it."""
    word = rng.choice(WORDS)[0] if rng.random() < 0.3 else _word(rng)
    word = word[:8]
    kind = rng.choices(("reverse", "length", "count"), (3, 1, 2))[0]
    if kind == "reverse":
        forms = (
            [f'把"{word}"倒过来写。', f'把"{word}"的字母倒过来', f'"{word}"反过来怎么写？', f'请反转"{word}"。']
            if chinese else
            [f'Reverse "{word}".', f'Reverse the letters of "{word}".', f'Write "{word}" backwards.',
             f'What is "{word}" spelled backwards?']
        )  # fmt: skip
        return Turn("letters", rng.choice(forms), f'"{word[::-1]}"', f"reverse {word}")
    if kind == "length":
        forms = (
            [f'"{word}"有几个字母？', f'单词"{word}"有多少个字母？', f'数一数"{word}"的字母。']
            if chinese else
            [f'How many letters are in "{word}"?', f'Count the letters in "{word}".', f'How long is "{word}"?']
        )  # fmt: skip
        return Turn("letters", rng.choice(forms), str(len(word)), f"length {word}")
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    forms = (
        [f'"{word}"里有几个"{letter}"？', f'字母"{letter}"在"{word}"里出现了几次？']
        if chinese else
        [f'How many times does "{letter}" appear in "{word}"?', f'How many "{letter}" are in "{word}"?',
         f'Count the letter "{letter}" in "{word}".']
    )  # fmt: skip
    return Turn("letters", rng.choice(forms), str(word.count(letter)), f"count {letter} {word}")


def _word(rng: random.Random) -> str:
    """A made-up word of 3 to 8 letters."""
    length = rng.randint(3, 8)
    text = ""
    while len(text) < length:
        text += rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice("aaeeiioouu") + rng.choice(("", "", *"lnrstme"))
    return text[:length]


def sorting(rng: random.Random, chinese: bool) -> Turn:
    """Sorting turn: order three to five different numbers below 100, or letters, ascending or descending."""
    count = rng.randint(3, 5)
    falling = rng.random() < 0.35
    if rng.random() < 0.25:
        items = rng.sample("abcdefghijklmnopqrstuvwxyz", count)
        kind, wei = "letters", "字母"
    else:
        items = rng.sample(range(100) if rng.random() < 0.8 else range(10), count)
        kind, wei = "numbers", "数字"
    given = ", ".join(map(str, items))
    if chinese:
        order = "从大到小" if falling else "从小到大"
        if kind == "letters":
            order = "倒序" if falling else "按字母顺序"
        forms = [f"把{given}{order}排列。", f"请将{given}{order}排序", f"{order}排列这些{wei}：{given}"]
    else:
        order = " in descending order" if falling else rng.choice((" in ascending order", ""))
        forms = [f"Sort {given}{order}.", f"Sort these {kind}{order}: {given}", f"Put {given} in order."]
        forms = forms[:2] if falling or order else forms
    answer = ", ".join(map(str, sorted(items, reverse=falling)))
    return Turn("sorting", rng.choice(forms), answer, f"sort {falling} {given}")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Two units with their names in both languages; ``large`` is at most ``largest`` in a question."""

    large: str
    small: str
    da: str
    xiao: str
    factor: int
    largest: int


UNITS = [
    Unit(large="kilometers", small="meters", da="公里", xiao="米", factor=1000, largest=99),
    Unit(large="meters", small="centimeters", da="米", xiao="厘米", factor=100, largest=99),
    Unit(large="centimeters", small="millimeters", da="厘米", xiao="毫米", factor=10, largest=99),
    Unit(large="kilograms", small="grams", da="千克", xiao="克", factor=1000, largest=99),
    Unit(large="tons", small="kilograms", da="吨", xiao="千克", factor=1000, largest=99),
    Unit(large="liters", small="milliliters", da="升", xiao="毫升", factor=1000, largest=99),
    Unit(large="hours", small="minutes", da="小时", xiao="分钟", factor=60, largest=12),
    Unit(large="minutes", small="seconds", da="分钟", xiao="秒", factor=60, largest=12),
    Unit(large="days", small="hours", da="天", xiao="小时", factor=24, largest=10),
    Unit(large="weeks", small="days", da="周", xiao="天", factor=7, largest=12),
    Unit(large="years", small="months", da="年", xiao="个月", factor=12, largest=10),
]


def units(rng: random.Random, chinese: bool) -> Turn:
    """Between two units of length, mass, volume or time, both ways; in English the value 1 takes the singular."""
    unit = rng.choice(UNITS)
    value = rng.randint(1, unit.largest)
    up = rng.random() < 0.4
    amount, result = (value * unit.factor, value) if up else (value, value * unit.factor)
    if chinese:
        source, target = (unit.xiao, unit.da) if up else (unit.da, unit.xiao)
        forms = [
            f"{amount}{source}等于多少{target}？",
            f"{amount}{source}是多少{target}？",
            f"把{amount}{source}换算成{target}。",
        ]
        answer = f"{result}{target}"
    else:
        source, target = (unit.small, unit.large) if up else (unit.large, unit.small)
        given = f"{amount} {source if amount != 1 else source[:-1]}"
        forms = [f"How many {target} are in {given}?", f"Convert {given} to {target}.", f"What is {given} in {target}?",
                 f"{given} in {target}?"]  # fmt: skip
        answer = f"{result} {target if result != 1 else target[:-1]}"
    question = rng.choice(forms)
    decimal = unit.factor % 10 == 0 and unit.factor != 60
    return Turn("units", question, answer, f"{amount} {unit.large} {up}" if decimal else question)


def date(rng: random.Random, chinese: bool) -> Turn:
    """The date 1 to 30 days later, in 2020 to 2032."""
    first = datetime.date(2020, 1, 1)
    day = first + datetime.timedelta(days=rng.randrange(13 * 365))
    later = rng.randint(1, 30)
    result = day + datetime.timedelta(days=later)
    if chinese:
        given = f"{day.year}年{day.month}月{day.day}日"
        forms = [
            f"{given}之后{later}天是哪一天？",
            f"{given}再过{later}天是几月几日？",
            f"{given}的{later}天后是哪天？",
        ]
        answer = f"{result.year}年{result.month}月{result.day}日"
    else:
        plural = "s" if later > 1 else ""
        forms = [f"What is the date {later} day{plural} after {day}?", f"What date is {later} day{plural} after {day}?",
                 f"Which day is {later} day{plural} after {day}?", f"{day} plus {later} day{plural}?"]  # fmt: skip
        answer = str(result)
    return Turn("dates", rng.choice(forms), answer, f"{day}+{later}")


def json_object(rng: random.Random, chinese: bool) -> Turn:
    """A JSON object with two or three given fields."""
    person = (
        rng.choice(SURNAMES) + rng.choice(GIVEN_NAMES) if chinese and rng.random() < 0.5 else rng.choice(FIRST_NAMES)
    )
    pool: dict[str, str | int] = {
        "name": person,
        "city": rng.choice(CITIES),
        "age": rng.randint(1, 99),
        "id": rng.randrange(1000),
        "price": rng.randrange(1, 1000),
        "color": rng.choice(("red", "blue", "green", "black", "white")),
        "word": _word(rng),
    }
    fields = {name: pool[name] for name in rng.sample(list(pool), rng.randint(2, 3))}
    text = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    if chinese:
        given = "，".join(text)
        forms = [f"输出一个JSON对象：{given}", f"用JSON表示：{given}", f"写一个JSON对象，{given}。"]
    else:
        given = ", ".join(text[:-1]) + " and " + text[-1]
        forms = [f"Write a JSON object with {given}.", f"JSON object with {given}", f"Give me JSON with {given}."]
    return Turn("json", rng.choice(forms), json.dumps(fields, ensure_ascii=False), f"json {fields}")


def counting(rng: random.Random, chinese: bool) -> Turn:
    """Count from one number to another: the long answers that a demonstration of streaming needs."""
    start = rng.randint(0, 60) if rng.random() < 0.6 else 1
    end = start + rng.randint(3, 25)
    forms = [f"从{start}数到{end}。", f"请从{start}数到{end}"] if chinese else [f"Count from {start} to {end}."]
    answer = ", ".join(map(str, range(start, end + 1)))
    return Turn("counting", rng.choice(forms), answer, f"{start} to {end}")


def project(rng: random.Random, chinese: bool) -> Turn:
    """Turn with a question about the LABInfer project."""
    return _from_list(rng, PROJECT, chinese, "project")


def chat(rng: random.Random, chinese: bool) -> Turn:
    """Greetings, thanks, what the model is, and what it cannot do."""
    return _from_list(rng, CHAT, chinese, "chat")


def _from_list(rng: random.Random, topics: list, chinese: bool, task: str) -> Turn:
    topic = rng.choice(topics)
    questions, answer = topic.zh if chinese else topic.en
    lead, end = "", ""
    question = rng.choice(questions)
    if rng.random() < 0.5:
        if chinese:
            lead = rng.choice(("请问", "你好，", "请告诉我，", "问一下，"))
        else:
            lead = rng.choice(("Please tell me: ", "Hi, ", "A question: ", "Excuse me, "))
    if rng.random() < 0.2:
        end = "谢谢。" if chinese else " Thanks."
    text = f"{lead}{question}{end}"
    return Turn(task, text, answer, text)


TASKS: dict[str, Callable[[random.Random, bool], Turn]] = {
    "arithmetic": arithmetic,
    "capitals": capital,
    "translation": translation,
    "letters": letters,
    "sorting": sorting,
    "units": units,
    "dates": date,
    "json": json_object,
    "project": project,
    "chat": chat,
    "counting": counting,
}

Shares = dict[str, float]
"""Weight of each task among the others."""

EARLY_SHARES: Shares = {
    "arithmetic": 8.0,
    "capitals": 1.0,
    "translation": 1.6,
    "letters": 1.6,
    "sorting": 1.2,
    "units": 1.0,
    "dates": 1.8,
    "json": 0.5,
    "project": 1.0,
    "chat": 0.5,
    "counting": 0.2,
}
"""Shares of the kinds of tasks in early training: mostly arithmetic, which takes the most examples."""
LATE_SHARES: Shares = {
    "arithmetic": 5.0,
    "capitals": 0.8,
    "translation": 1.2,
    "letters": 2.0,
    "sorting": 3.0,
    "units": 0.8,
    "dates": 5.0,
    "json": 0.7,
    "project": 0.8,
    "chat": 0.4,
    "counting": 0.3,
}
"""Shares of the kinds of tasks in late training, with more tasks that build on arithmetic."""
