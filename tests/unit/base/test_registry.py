"""The registry: parts by kind and name, shipped ones imported late, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from labinfer.base.errors import UserError
from labinfer.base.kinds import KINDS, Kind
from labinfer.base.registry import REGISTRY, Names, Registry


@dataclass
class Plain:
    number: int = 1


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, listed in KINDS.items() for name in listed.shipped])
def test_shipped_part_is_where_the_list_says(kind, name):
    assert callable(REGISTRY.find(kind, name))


@pytest.mark.parametrize("kind", KINDS)
def test_contract_of_each_kind_is_written_where_the_list_says(kind):
    module, _, attribute = KINDS[kind].contract.partition(":")
    __import__(module)
    contract = getattr(sys.modules[module], attribute)
    source = Path(sys.modules[module].__file__).read_text(encoding="utf-8")
    after = source.partition(f"\n{attribute} = ")[2] or source.partition(f"class {attribute}")[2]
    assert contract is not None and '"""' in after.split("\n\n\n")[0], f"{attribute} has no docstring"


def test_names_of_kinds_cost_no_import():
    code = "import sys, labinfer.base.registry as r\nr.REGISTRY.names('batch_policy')\n"
    code += "print([name for name in sys.modules if name == 'torch' or name.startswith('labinfer.engine')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def registry():
    return Registry({"tool": Kind(contract="x:y", shipped={"len": "builtins:len"}, details=("help",))})


def test_registered_part_is_found_beside_shipped_ones(registry):
    @registry.register("tool", "own", help="text")
    def own(): ...

    assert registry.names("tool") == ("len", "own")
    assert registry.find("tool", "own") is own and registry.find("tool", "len") is len
    assert registry.entry("tool", "own").details == {"help": "text"} and [*registry.plugged_in("tool")] == ["own"]


@pytest.mark.parametrize(
    "kind, name, part, details, text",
    [
        ("toool", "a", len, {}, "unknown kind; kinds: tool"),
        ("tool", "len", max, {}, "as shipped with LABInfer; choose another"),
        ("tool", "two words", len, {}, "a name must have no spaces"),
        ("tool", "", len, {}, "a name must have no spaces"),
        ("tool", "a", 3, {}, "decorates 3; decorate a function or a class"),
        ("tool", "a", len, {"hint": 1}, "'hint' is not a detail of this kind, which has: help"),
    ],
)
def test_wrong_registration_is_refused(registry, kind, name, part, details, text):
    with pytest.raises(UserError, match=text):
        registry.register(kind, name, **details)(part)
    assert registry.names("tool") == ("len",)


def test_class_of_another_contract_is_refused():
    with pytest.raises(UserError, match="needs a subclass of labinfer.engine.pipeline_schedule.PipelineSchedule"):
        REGISTRY.register("pipeline_schedule", "mine")(dict)
    assert "mine" not in REGISTRY.names("pipeline_schedule")


@pytest.mark.parametrize(
    "kind, name, details, text",
    [
        ("scheduling_policy", "mine", {"prefill_key": 3}, "prefill_key must be a function"),
        ("command", "mine", {"options": dict}, "options must be a tuple of dataclasses"),
        ("command", "mine", {"options": (Plain,)}, "the field number of Plain must be made with option"),
        ("command", "mine", {"help": 3}, "help must be a string"),
        ("command", "help", {}, "is reserved on the command line"),
    ],
)
def test_wrong_details_are_refused(kind, name, details, text):
    with pytest.raises(UserError, match=text):
        REGISTRY.register(kind, name, **details)(lambda *arguments: 0)
    assert name not in REGISTRY.names(kind)


def test_unknown_name_lists_what_there_is(registry):
    with pytest.raises(UserError, match="unknown tool 'sort'; available: len"):
        registry.find("tool", "sort")


def test_name_taken_by_a_plugin_is_said_so(registry):
    with registry.registering_for("first"):
        registry.register("tool", "own")(max)
    with pytest.raises(UserError, match="already registered by first; choose another one"):
        registry.register("tool", "own")(min)


def test_parts_of_what_raises_do_not_stay(registry):
    with pytest.raises(ZeroDivisionError), registry.registering_for("broken"):
        registry.register("tool", "own")(max)
        1 / 0  # noqa: B018
    assert registry.names("tool") == ("len",)


def test_choices_of_an_option_follow_the_registry(add_part):
    choices = Names("batch_policy", "auto")
    assert tuple(choices)[:2] == ("auto", "balanced") and "mine" not in choices
    add_part("batch_policy", "mine", len)
    assert "mine" in choices and choices[-1] == "mine"
