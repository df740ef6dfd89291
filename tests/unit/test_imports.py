"""The import rule of docs and design, and the calls that are banned, read from the source by AST."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import labinfer

PACKAGE = Path(labinfer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAY_IMPORT = {
    "__main__": "cli",
    "cli": "server api launch planner requests text engine worker models functions comm weights observe base",
    "server": "api planner requests text engine comm observe base",
    "api": "launch requests text engine worker comm weights observe base",
    "launch": "planner engine worker models functions comm weights native observe base",
    "planner": "requests engine comm observe base",
    "requests": "text engine comm weights observe base",
    "text": "weights base",
    "engine": "observe base",
    "worker": "models functions comm observe base",
    "models": "functions comm weights base",
    "functions": "weights native base",
    "comm": "native base",
    "weights": "native observe base",
    "native": "",
    "observe": "base",
    "base": "",
}
"""Every package and what it may import beside itself, always further down this list.

``docs/structure.md`` has them in this order for readers."""
DOCUMENT = PACKAGE.parent / "docs" / "structure.md"


def part_of(module: str) -> str:
    """``labinfer.comm.wire`` → ``comm``; the package itself is ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_by(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands, types included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


IMPORTS = {path: imported_by(path) for path in FILES}
EDGES = [
    (path, part_of(name_of(path)), part_of(module))
    for path, modules in IMPORTS.items()
    for module in modules
    if module.startswith("labinfer.")
]


def test_every_part_of_the_package_has_its_place_in_the_rule():
    parts = {part_of(name_of(path)) for path in FILES} - {"__init__"}
    assert parts == set(MAY_IMPORT)
    assert len(EDGES) > 100  # the reading itself works


def test_imports_go_one_way():
    for path, importer, imported in EDGES:
        if importer != "__init__":
            assert imported in {*MAY_IMPORT[importer].split(), importer}, f"{path} imports {imported}"


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Groups of more than one node of which each leads to every other (the strongly connected components)."""

    def reached(start: str) -> set[str]:
        seen, ahead = set(), [start]
        while ahead:
            for node in arrows[ahead.pop()] - seen:
                seen.add(node)
                ahead.append(node)
        return seen

    below, found = {node: reached(node) for node in arrows}, []
    for node in arrows:
        if node in below[node] and not any(node in circle for circle in found):
            found.append({other for other in below[node] if node in below[other]})
    return found


def test_files_import_each_other_in_no_circle():
    """Imports for types only and those in functions count, too."""
    names = {name_of(path) for path in FILES}
    arrows = {name_of(path): IMPORTS[path] & names - {name_of(path), "labinfer"} for path in FILES}
    for (
        module
    ) in arrows:  # ``from labinfer.comm import wire`` needs the file, not what its package's docstring stands in
        packages = {imported for imported in arrows[module] if any(other.startswith(f"{imported}.") for other in names)}
        arrows[module] -= packages
    assert sum(map(len, arrows.values())) > 1000  # the reading itself works
    assert circles(arrows) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_rule_itself_has_no_circles():
    parts = list(MAY_IMPORT)
    for place, (part, allowed) in enumerate(MAY_IMPORT.items()):
        assert set(allowed.split()) <= set(parts[place + 1 :]), f"{part} may import what stands above it"


def test_core_imports_no_extension():
    """Imports for types only and those in functions count, too. The border is ``CORE`` and ``EXTENSIONS`` of the tool."""
    counts = runpy.run_path(str(PACKAGE.parent / "tools" / "structure_counts.py"))
    assert counts["core_arrows"](FILES) == {}
    patterns = [pattern for group in ("CORE", "EXTENSIONS") for own in counts[group].values() for pattern in own]
    assert not [pattern for pattern in patterns if not any(counts["matches"](path, [pattern]) for path in FILES)]
    core = counts["core_files"](FILES)
    assert 10_000 < counts["num_lines"](core) <= counts["MAX_CORE_LINES"]


def test_documentation_lists_the_packages_in_this_order():
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8").partition("## Ten nouns")[0], re.M)
    assert rows == [package for package in MAY_IMPORT if package != "__main__"]


def test_comm_knows_nobodys_meaning():
    transports = [path for path in FILES if path.parent == PACKAGE / "comm"]
    used = {module for path in transports for module in IMPORTS[path] if module.startswith("labinfer.")}
    above = ("labinfer.comm.group", "labinfer.comm.spmd")
    assert not [module for module in used if module.startswith(above)]
    plain = ("labinfer.base.errors", "labinfer.base.heartbeat", "labinfer.base.standard_error")
    assert not [module for module in used if module.startswith("labinfer.base") and not module.startswith(plain)]
    assert {part_of(module) for module in used} <= {"comm", "native", "base"}


def test_engine_and_worker_never_import_each_other():
    pairs = {(importer, imported) for _, importer, imported in EDGES}
    assert ("engine", "worker") not in pairs and ("worker", "engine") not in pairs


def test_engine_never_names_torch():
    paths = [*(PACKAGE / "engine").glob("*.py")]
    assert paths
    for path in paths:
        assert not [module for module in IMPORTS[path] if module.partition(".")[0] in ("torch", "numpy")], path


def test_engine_can_be_imported_without_torch():
    modules = [name_of(path) for path in sorted((PACKAGE / "engine").glob("*.py"))]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "module",
    ["labinfer", "labinfer.base.plan", "labinfer.requests.protocol", "labinfer.base.config", "labinfer.cli.main"],
)
def test_plain_data_needs_no_torch(module):
    code = f"import sys, {module}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_gateway_needs_no_torch():
    code = "import sys, labinfer.server.gateway.main\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("part", ["planner", "base"])
def test_part_can_be_imported_without_torch(part):
    modules = [name_of(path) for path in sorted((PACKAGE / part).rglob("*.py"))]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_chat_needs_no_torch():
    modules = [name_of(path) for path in sorted((PACKAGE / "cli" / "terminal").glob("*.py"))]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\nprint('torch' in sys.modules)"
    modules.append("labinfer.cli.commands.chat_with_server")
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@cache  # for two tests
def names_used(path: Path) -> set[str]:
    """``environ`` of ``os.environ``, bare names, and what ``from … import`` brings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def test_only_the_launch_environment_is_read_and_only_in_its_file():
    readers = {path for path in FILES if names_used(path) & {"environ", "environb", "getenv", "getenvb"}}
    assert readers == {PACKAGE / "comm" / "spmd" / "environment.py"}


def pickling_calls(source: str) -> list[str]:
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in ("load", "save")
        and ast.unparse(node.value) in ("torch", "np", "numpy")
    ]


def test_nothing_is_pickled():
    pickling = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path in FILES:
        assert not {module.partition(".")[0] for module in IMPORTS[path]} & pickling, path
        object_calls = {name for name in names_used(path) if "object_list" in name or name.endswith("gather_object")}
        assert not object_calls, path
        if names_used(path) & {"load", "save"}:
            assert not pickling_calls(path.read_text(encoding="utf-8")), path
    assert pickling_calls("torch.load(file)\nself.load(file)\nnp.save(file, x)") == ["torch.load", "np.save"]


def lower_case_calls(source: str) -> list[str]:
    """Calls of mpi4py's pickling methods: lower-case ones on a communicator."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr[0].islower()
        and re.match(r"(.*[._])?(comm|COMM_WORLD|COMM_SELF)\b", ast.unparse(node.func.value))
    ]


def test_mpi_is_called_by_its_upper_case_names_only():
    assert lower_case_calls((PACKAGE / "comm" / "mpi.py").read_text(encoding="utf-8")) == []
    sample = "self._comm.send(x, 1)\nMPI.COMM_WORLD.bcast(x)\nself._comm.Send(x, 1)\ncomm.Dup().allgather(x)"
    assert lower_case_calls(sample) == ["self._comm.send", "MPI.COMM_WORLD.bcast", "comm.Dup().allgather"]


def test_mpi4py_is_imported_in_one_file_only():
    users = {path for path, modules in IMPORTS.items() if any(m.partition(".")[0] == "mpi4py" for m in modules)}
    assert users == {PACKAGE / "comm" / "mpi.py"}


def test_no_file_is_called_utils():
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_no_process_group_or_communicator_lives_at_module_level():
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                called = ast.unparse(node.value.func)
                groups = ("Communicator", "new_group", "init_process_group", "Dup", "Split")
                assert not called.endswith(groups), f"{called} in {path}"
