"""The examples run as they are, each where its package is installed."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT
from serving import serving

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


def run_example(*arguments: str) -> str:
    """Standard output of an example, run from the root of the repository."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=250, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def cells() -> list[str]:
    """The notebook's code."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


async def run_cells(names: dict) -> list:
    """Run the cells as a notebook does, in a running event loop; returns what each would show."""
    shown = []
    for source in cells():
        *statements, last = ast.parse(source).body
        is_value = isinstance(last, ast.Expr)
        whole = ast.Module([*statements, *([] if is_value else [last])], [])
        for code in (whole, ast.Expression(last.value) if is_value else None):
            if code is not None:
                mode = "exec" if code is whole else "eval"
                value = eval(compile(code, str(NOTEBOOK), mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
                value = await value if asyncio.iscoroutine(value) else value
        shown.append(value if is_value else None)
    return shown


def test_notebooks_cells(capsys):
    shown = asyncio.run(run_cells({}))
    assert shown[1] == "42" and json.loads(shown[3]) == {"name": "Anna", "age": 31}
    assert ["3", "34", "42"] in shown
    printed = capsys.readouterr().out
    assert "巴黎" in printed and printed.endswith(".")


def test_notebook_in_a_kernel():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()


def test_offline():
    assert "Paris" in run_example(EXAMPLES / "offline.py")


@needs("fastapi")
def test_fastapi_app(monkeypatch):
    from fastapi.testclient import TestClient

    monkeypatch.syspath_prepend(EXAMPLES)
    import fastapi_app

    with TestClient(fastapi_app.app) as client:
        assert client.get("/ask", params={"question": "17 + 25 = ?"}).text == "42"


@needs("langchain_openai")
def test_langchain_chat(server):
    first, second, third = run_example(EXAMPLES / "langchain_chat.py", f"{server.url}/v1", "demo").splitlines()
    assert first == "42" and "Paris" in second and third == "Anna is 31"


@needs("agents")
def test_agents_sdk(server):
    assert run_example(EXAMPLES / "agents_sdk.py", f"{server.url}/v1", "demo").strip()


@needs("lm_eval")
def test_lm_eval_over_a_server(server, tmp_path):
    arguments = f"model=demo,base_url={server.url}/v1/chat/completions,num_concurrent=4,tokenizer_backend=none"
    flags = ["--tasks", "labinfer_sums", "--include_path", "examples/lm_eval", "--apply_chat_template"]
    out = ["--output_path", str(tmp_path / "results")]
    run_example("-m", "lm_eval", "--model", "local-chat-completions", "--model_args", arguments, *flags, *out)
    (results,) = Path(tmp_path).rglob("results*.json")
    assert json.loads(results.read_text())["results"]["labinfer_sums"]["exact_match,none"] > 0.9


def test_every_example_has_its_test():
    tests = (
        Path(__file__),
        *(path for part in ("clients", "plugins") for path in (ROOT / "tests" / part).rglob("test_*.py")),
    )
    text = "".join(path.read_text(encoding="utf-8") for path in tests)
    for path in (*EXAMPLES.iterdir(), *(EXAMPLES / "plugins").glob("*.py")):
        assert path.stem in text or path.name in ("prompts.jsonl", "plugins", "__pycache__"), (
            f"{path.name} is run by no test"
        )
