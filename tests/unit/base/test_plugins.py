"""Plugins: where they are looked for, how they are loaded, and what ranks must agree on."""

from __future__ import annotations

import sys

import msgspec
import pytest

from labinfer.base import plugins
from labinfer.base.errors import UserError
from labinfer.base.plugins import Plugins, PluginSource, find_plugin, named_plugins, share_plugins
from labinfer.base.registry import Registry

GOOD = """import registering
registering.REGISTRY.register("batch_policy", NAME)(lambda state: None)
"""


@pytest.fixture
def own(monkeypatch):
    """Plugins of their own registry, which files reach as ``registering.REGISTRY``."""
    module = type(sys)("registering")
    module.REGISTRY = Registry()
    monkeypatch.setitem(sys.modules, "registering", module)
    return Plugins(module.REGISTRY)


def write(folder, name: str, text: str = GOOD):
    path = folder / f"{name}.py"
    path.write_text(text.replace("NAME", repr(name)))
    return path


@pytest.mark.parametrize(
    "arguments, found",
    [
        ("--plugin a.py --prompt x --plugin=b", ["a.py", "b"]),
        ("serve --plugin a --plugin a", ["a"]),
        ("--prompt x --plugin", []),
        ("supervise -- mpirun --plugin a", []),
    ],
)
def test_plugins_are_named_before_flags_are_parsed(arguments, found):
    assert named_plugins(arguments.split()) == found


def test_file_is_known_by_its_contents(tmp_path, own):
    first, second = find_plugin(str(write(tmp_path, "one"))), find_plugin(str(write(tmp_path, "two")))
    assert (first.name, len(first.digest), first.is_file) == ("one", 16, True) and first.digest != second.digest
    own.load([first, second])
    assert [own._registry.added_by(plugin.name) for plugin in own.loaded] == [
        [("batch_policy", "one")],
        [("batch_policy", "two")],
    ]
    assert own.identities() == [f"one@{first.digest}", f"two@{second.digest}"]
    own.load([first])  # for a second model of the process
    assert len(own.loaded) == 2


def test_name_is_looked_for_in_lab(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "LAB", tmp_path)
    path = write(tmp_path, "idea")
    assert find_plugin("idea").path == str(path)


def test_name_is_looked_for_among_entry_points(tmp_path, monkeypatch, own):
    (tmp_path / "some_package.py").write_text(GOOD.replace("NAME", "'packaged'"))
    info = tmp_path / "some_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[labinfer.plugins]\nnice = some_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = find_plugin("nice")
    assert (source.name, source.is_file) == ("some_package", False)
    own.load([source])
    assert own._registry.added_by(own.loaded[0].name) == [("batch_policy", "packaged")]
    assert find_plugin("some_package") == source  # by the module's name, too


def test_digest_of_a_package_covers_all_its_files(tmp_path, monkeypatch):
    (folder := tmp_path / "a_package").mkdir()
    for name in ("__init__", "part"):
        write(folder, name, "x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = find_plugin("a_package").digest
    write(folder, "part", "x = 2\n")
    assert find_plugin("a_package").digest != before


@pytest.mark.parametrize(
    "given, text",
    [
        ("missing.py", "--plugin missing.py: missing.py cannot be read: No such file or directory"),
        ("no_such_thing", "no file lab/no_such_thing.py, no entry point of labinfer.plugins and no Python module"),
        ("json.", "no Python module of this name"),
        ("empty.py", "empty.py is empty"),
        ("folder.py", "cannot be read: Is a directory"),
    ],
)
def test_plugin_that_cannot_be_found_is_refused(given, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UserError, match=text):
        find_plugin(given)


@pytest.mark.parametrize(
    "code, text",
    [
        ("import registering\n\n1 / 0\n", r"broken.py, line 3: ZeroDivisionError: division by zero"),
        ("x = (\n", r"broken.py, line 1: SyntaxError: '\(' was never closed"),
        ("import no_such_module_here\n", r"broken.py, line 1: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", r"broken.py, line 1: SystemExit: 3"),
        (
            GOOD + GOOD,
            r"broken.py, line 4: register\('batch_policy', 'broken'\): the name is already registered by broken",
        ),
        ("x = 1\n", r"registers nothing; decorate a function or class with @register"),
    ],
)
def test_error_of_a_plugin_names_file_and_line(code, text, tmp_path, own):
    source = find_plugin(str(write(tmp_path, "broken", code)))
    with pytest.raises(UserError, match=text) as caught:
        own.load([source])
    assert "\n" not in str(caught.value) and not own.loaded
    assert "broken" not in own._registry.names("batch_policy")


def test_another_file_of_the_same_name_is_refused(tmp_path, own):
    own.load([find_plugin(str(write(tmp_path, "one")))])
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="has the same name as .*rename one, or start a new process"):
        own.load([find_plugin(str(write(tmp_path / "other", "one", GOOD + "x = 1\n")))])


def describe(rank: int) -> str:
    return f"rank {rank} on host{rank}"


def test_ranks_agree_on_plugins(tmp_path, monkeypatch):
    """Two ranks, one after the other: what rank 0 sent is given to rank 1, and rank 1's digests are changed."""
    path = write(tmp_path, "idea")
    write(tmp_path, "a_module", "x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    names, sent = [str(path), "a_module"], []

    def gather_alone(data: bytes) -> list[bytes]:
        sent.append(data)
        return [data]

    sources = share_plugins(names, 0, gather_alone, describe)
    path.unlink()  # rank 1 needs no copy
    answers = iter([[sent[0], b""], [sent[1], sent[1]]])
    assert share_plugins(names, 1, lambda data: next(answers), describe) == sources

    for digest, text in (("", "rank 1 on host1 has no module a_module; install"), ("0" * 16, "has another version")):
        answers = iter([[sent[0], b""], [sent[1], sent[1].replace(sources[1].digest.encode(), digest.encode())]])
        if not digest:
            answers = iter([[sent[0], b""], [sent[1], msgspec.msgpack.encode([sources[0].digest, ""])]])
        with pytest.raises(UserError, match=text):
            share_plugins(names, 0, lambda data, answers=answers: next(answers), describe)


def test_plugin_that_rank_0_lacks_is_refused_on_all():
    sent = []
    with pytest.raises(UserError, match="cannot be read"):
        share_plugins(["missing.py"], 0, lambda data: sent.append(data) or [data], describe)
    with pytest.raises(UserError, match="cannot be read"):
        share_plugins(["missing.py"], 1, lambda data: [sent[0], b""], describe)


PROCESSOR = """import registering
from labinfer import SamplingParameter
width = SamplingParameter(default=0.0, least=0.0, most=9.0, help="how wide")
registering.REGISTRY.register("logits_processor", NAME, parameter=width)(lambda logits_V, value, row: None)
registering.REGISTRY.register("logits_processor", "free")(lambda logits_V, value, row: None)
"""


def test_gateway_knows_parameters_without_importing_the_plugin(tmp_path, own):
    own.load([find_plugin(str(write(tmp_path, "width", PROCESSOR)))])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(own.loaded), type=list[PluginSource])
    sent = [msgspec.structs.replace(source, code=b"1 / 0") for source in sent]
    gateway = Plugins(Registry())
    gateway.adopt(sent)
    entries = gateway._registry.plugged_in("logits_processor")
    assert [*entries] == ["width"] and type(entries["width"].details["parameter"].default) is float
    assert entries["width"].details == own._registry.entry("logits_processor", "width").details
    assert gateway.identities() == own.identities()


def test_code_that_computes_is_that_of_plugins_with_layers_formats_or_functions(own, tmp_path):
    assert own.computing_code() == []
    plain, computing = write(tmp_path, "plain"), GOOD.replace("batch_policy", "weight_format")
    own.load([find_plugin(str(plain)), find_plugin(str(write(tmp_path, "computing", computing)))])
    assert own.computing_code() == [f"computing@{own.loaded[1].digest}"]


def test_code_that_computes_may_be_of_this_program(own, tmp_path, monkeypatch):
    """Known by its file, as a plugin is; what was typed at a prompt is another one each time."""
    write(tmp_path, "own_format", "def read(settings): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own._registry.register("weight_format", "filed")(__import__("own_format").read)
    before = own.computing_code()
    assert len(before) == 1 and own.computing_code() == before
    write(tmp_path, "own_format", "def read(settings): return 1\n")
    assert own.computing_code() != before
    own._registry.register("weight_format", "typed")(eval("lambda settings: None"))
    assert own.computing_code() != own.computing_code()


def test_error_of_a_part_names_file_and_line(own, tmp_path):
    own.load([find_plugin(str(write(tmp_path, "late", GOOD + "def fail():\n    return 1 / 0\n")))])
    fail = sys.modules["labinfer_plugin_late"].fail
    with pytest.raises(UserError, match=r"^--plugin late: .*late.py, line 4: ZeroDivisionError: division by zero$"):
        with own.blame("late"):
            fail()
    for other in ("", "this program"):
        with pytest.raises(ZeroDivisionError), own.blame(other):
            fail()


def test_package_is_found_without_running_it(tmp_path, monkeypatch, own):
    (folder := tmp_path / "raising_package").mkdir()
    write(folder, "__init__", "raise OSError('not now')\n")
    write(folder, "part")
    monkeypatch.syspath_prepend(tmp_path)
    source = find_plugin("raising_package.part")
    with pytest.raises(UserError, match=r"__init__.py, line 1: OSError: not now"):
        own.load([source])
    write(folder, "__init__", "x = 1\n")
    assert find_plugin("raising_package.part").digest != source.digest  # a part's digest is that of its package
    own.load([find_plugin("raising_package.part")])
    assert own.loaded[0].name == "raising_package.part"
