"""Chat templates that are broken, look for a way out of the sandbox, or take too much."""

from __future__ import annotations

import threading
import time
from mmap import PAGESIZE, mmap

import pytest
from jinja2 import Environment

from labinfer.base.errors import UserError
from labinfer.text import limited_rendering
from labinfer.text.chat_template import ChatTemplate


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages ", "{% endfor %}", "{{ x | no_such_filter }}"])
def test_template_that_does_not_parse_is_refused(source):
    with pytest.raises(UserError, match="does not parse"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages['__class__']['__base__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '%s' | format(messages.__class__) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% set x = messages.clear() %}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_sandbox_refuses_attribute_tricks(source):
    messages = [{"role": "user", "content": "hi"}]
    try:
        rendered = ChatTemplate(source, {}).render(messages)
    except UserError as error:
        assert "unsafe" in str(error) or "not safely callable" in str(error)
    else:
        assert rendered == ""  # an unsafe attribute reads as undefined
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ no_such_thing.field }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.index('z') }}",
        "{% for n in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_stumbles_over_is_a_user_error(source):
    with pytest.raises(UserError, match="rejects"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = f(n.x) %}{% endfor %}",
    "{% set n = namespace(x=['a']) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=3) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ 10 ** 10 ** 999 }}",
    "{{ 9 ** messages|length ** 999 ** 99 }}",
    "{{ 'a'.ljust(10 ** 11) }}{{ 'a'|center(100000000000) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ '%99999999999d'|format(1) }}",
    "{{ [1]|batch(99999999999, 'x')|list }}",
    "{% for a in range(10 ** 9) %}{% endfor %}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:>{w}}'.format('a', w='2000000000') }}",
    "{{ messages|tojson(indent=2000000000) }}",
    "{{ ('a' * 16000000)|replace('a', 'b' * 1000) }}",
    "{{ ('a' * 16000000).replace('a', 'b' * 1000) }}",
    "{{ ('a' * 16000000).join(['b'] * 1000) }}",
    "{{ (['b'] * 1000)|join('a' * 16000000) }}",
    "{{ (['b'] * 1000)|map('upper')|join('a' * 16000000) }}",
    "{{ ('\\n' * 16000000)|indent('b' * 1000) }}",
    "{{ ('%s' * 1000) % ((['a' * 16000000] * 1000)|list) }}",
    "{{ ('{0}' * 1000).format('a' * 16000000) }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_template_without_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(limited_rendering, "RENDER_SECONDS", 0.3)
    monkeypatch.setattr(limited_rendering, "RENDER_BYTES", 1 << 26)
    begin = time.process_time()
    with pytest.raises(UserError, match="the chat template (rejects|does not parse)"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert time.process_time() - begin < 3
    for _ in range(3):  # and what comes afterwards is left alone
        assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "hi"}]) == "hi"
        time.sleep(0.03)


@pytest.mark.parametrize(
    "source",
    ["{% if 1 %}" * 3000, "{{ " + "(" * 3000, "{% for x in [1] %}" * 40 + "{% endfor %}" * 40, "a" * (2 << 20)],
)
def test_template_that_cannot_be_compiled_is_refused(source):
    with pytest.raises(UserError, match="^the chat template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content ~ 1 ~ none ~ [2] }}", "<hi>1None[2]"),
        ("{% autoescape true %}{{ '<' ~ messages[0].content }}{% endautoescape %}", "&lt;&lt;hi&gt;"),
        ("{% set y %}{{ 'a' ~ 'b' }}{% endset %}{{ y ~ y }}", "abab"),
    ],
)
def test_chained_texts_are_those_of_jinja(source, text):
    messages = [{"role": "user", "content": "<hi>"}]
    assert (
        ChatTemplate(source, {}).render(messages) == text == Environment().from_string(source).render(messages=messages)
    )


def test_watch_counts_from_the_start_of_a_rendering(monkeypatch):
    """Also where its thread first runs when memory has been taken already."""
    monkeypatch.setattr(limited_rendering, "RENDER_BYTES", 1 << 26)
    late, run = threading.Event(), limited_rendering._Watch._run
    monkeypatch.setattr(limited_rendering._Watch, "_run", lambda watch: late.wait() and run(watch))

    def grow() -> None:
        with mmap(-1, 1 << 28) as memory:  # what malloc has may be memory that other tests have left
            for page in range(0, len(memory), PAGESIZE):
                memory[page] = 1
            late.set()
            while True:
                pass

    with pytest.raises(limited_rendering.RenderingEnded, match="64 MiB"):
        limited_rendering.within_limits(grow)


def test_large_numbers_of_messages_are_no_danger():
    source = "{{ messages[0].content|string }} {{ messages[0].content|tojson }} {{ '%d' % 7 }} {{ '-' * 9 }}"
    assert ChatTemplate(source, {}).render([{"content": 10**30}]) == f"{10**30} {10**30} 7 ---------"
