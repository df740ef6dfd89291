"""For all real launches: a checkpoint, and one launch of many commands."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from golden import golden
from launchers import Finished, run


@pytest.fixture(scope="session")
def model() -> str:
    """A checkpoint for tests that need just any."""
    return str(golden("qwen2-tied").directory)


@pytest.fixture
def without_matplotlib(tmp_path) -> dict[str, str]:
    """The environment of a process for which there is no matplotlib."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys\n\nsys.modules['matplotlib'] = None\n")
    return {"PYTHONPATH": str(tmp_path / "hidden")}


@pytest.fixture(scope="session")
def refuse_together(tmp_path_factory) -> Callable[[dict[str, list[str]]], dict[str, Finished]]:
    """How commands end that are to be refused, by name: two ranks under mpirun take one after another."""

    def refuse(cases: dict[str, list[str]]) -> dict[str, Finished]:
        directory = tmp_path_factory.mktemp("refused")
        (directory / "cases.json").write_text(json.dumps(list(cases.values())))
        done = run("mpirun", 2, "tests/cluster/refusals_driver.py", directory, timeout=240)
        ended = {}
        for number, name in enumerate(cases):
            files = [directory / f"{number}.{rank}.json" for rank in (0, 1)]
            assert all(file.exists() for file in files), f"{name!r} ended the ranks\n{done.text}"
            results = [json.loads(file.read_text()) for file in files]
            assert len({result["status"] for result in results}) == 1, (name, results)
            text = "".join((directory / f"{number}.{rank}.txt").read_text(errors="replace") for rank in (0, 1))
            seconds = max(result["seconds"] for result in results)
            ended[name] = Finished(results[0]["status"], "", text, seconds, seconds)
        assert done.returncode == 0, done.text
        return ended

    return refuse
