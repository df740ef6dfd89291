"""Ask one server through the clients of ``CLIENTS``, and write the table of docs/clients.md.

    python tests/clients/run.py .clients                          all
    python tests/clients/run.py .clients --only dspy guidellm     some
    python tests/clients/run.py .clients --layout mpirun:2        a server on two stages
    python tests/clients/run.py .clients --table                  and put the results into docs/clients.md

``make test-clients`` makes the environments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(ROOT / "benchmarks")]

from client_service import KEY, client_service  # noqa: E402 - after the paths to it

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table: written by tests/clients/run.py -->\n", "<!-- end of the table -->"
COLUMNS = {"single:1": "one rank", "mpirun:2": "two stages"}
"""Of the table, by layout."""
HEADER = f"| client | version | asks | {' | '.join(COLUMNS.values())} |\n|---|---|---|{'---|' * len(COLUMNS)}\n"
KINDS = ("passed", "failed", "skipped")
LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Client:
    """A suite of tests for what others wrote."""

    name: str
    suite: str
    """The file beside this one, or a test of it; its folder is the environment that it needs."""
    packages: tuple[str, ...]
    """Those whose versions the table shows, as the environment's list spells them."""
    asks: str

    @property
    def environment(self) -> str:
        return self.suite.partition("/")[0]

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return re.split("/|::", self.suite)[-1].removeprefix("test_").partition(".")[0]

    @property
    def versions(self) -> str:
        """As pinned."""
        if self.environment == "javascript":
            pins = json.loads((HERE / "javascript" / "package.json").read_text(encoding="utf-8"))["dependencies"]
        else:
            lines = (HERE / self.environment / "requirements.in").read_text(encoding="utf-8").split()
            pins = {
                line.partition("==")[0].partition("[")[0]: line.partition("==")[2] for line in lines if "==" in line
            }
        return ", ".join(pins[package].rpartition("@")[2] for package in self.packages)


THREE_APIS = "chat completions, responses, messages"
CLIENTS = (
    Client(
        "openai (Python)", "agents/test_openai.py", ("openai",), "chat completions, completions, embeddings, responses"
    ),
    Client("openai (JavaScript)", "javascript/openai.test.mjs", ("openai",), "chat completions, responses"),
    Client("anthropic (Python)", "agents/test_anthropic.py", ("anthropic",), "messages"),
    Client("anthropic (JavaScript)", "javascript/anthropic.test.mjs", ("@anthropic-ai/sdk",), "messages"),
    Client("Agents SDK (Python)", "agents/test_agents_sdk.py", ("openai-agents",), "chat completions, responses"),
    Client(
        "Agents SDK (JavaScript)", "javascript/agents_sdk.test.mjs", ("@openai/agents",), "chat completions, responses"
    ),
    Client("Vercel's AI SDK", "javascript/vercel_ai_sdk.test.mjs", ("ai-5", "ai-6", "ai-7"), THREE_APIS),
    Client(
        "LangChain (OpenAI, Anthropic)",
        "agents/test_langchain.py",
        ("langchain-openai", "langchain-anthropic"),
        THREE_APIS,
    ),
    Client("LiteLLM", "libraries/test_litellm.py", ("litellm",), THREE_APIS),
    Client("pydantic-ai", "agents/test_pydantic_ai.py", ("pydantic-ai-slim",), THREE_APIS),
    Client("instructor", "libraries/test_instructor.py", ("instructor",), "chat completions"),
    Client("outlines", "agents/test_outlines.py", ("outlines",), "its OpenAI and its vLLM model"),
    Client(
        "llama-index",
        "libraries/test_llama_index.py",
        ("llama-index-llms-openai-like",),
        "chat completions, completions",
    ),
    Client("smolagents", "agents/test_smolagents.py", ("smolagents",), "chat completions"),
    Client("dspy", "libraries/test_dspy.py", ("dspy",), "chat completions"),
    Client("lm-eval", "agents/test_lm_eval.py", ("lm-eval",), "chat completions, completions"),
    Client(
        "lm-eval, `--reproducible`",
        "agents/test_lm_eval_reproducible.py",
        ("lm-eval",),
        "completions, on three layouts of its own",
    ),
    Client("lighteval", "libraries/test_lighteval.py", ("lighteval",), "chat completions, by LiteLLM"),
    Client("guidellm", "load/test_load_tools.py::test_guidellm", ("guidellm",), "chat completions"),
    Client("vLLM's vllm bench serve", "load/test_load_tools.py::test_vllm_bench", (), "chat completions, completions"),
    Client("aiperf", "load/test_load_tools.py::test_aiperf", ("aiperf",), "chat completions"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SUITE", help="names of suites, such as openai or dspy"
    )
    parser.add_argument("--layout", default="single:1", help="launcher and ranks, such as mpirun:2 for two stages")
    parser.add_argument("--table", action="store_true", help="write docs/clients.md")
    args = parser.parse_args()
    if unknown := set(args.only) - {client.key for client in CLIENTS}:
        parser.error(f"--only: no suite is called {sorted(unknown)[0]}; there are {sorted({c.key for c in CLIENTS})}")
    if args.table and args.layout not in COLUMNS:
        parser.error(f"--table has no column for --layout {args.layout}, only for {' and '.join(COLUMNS)}")
    clients = [client for client in CLIENTS if not args.only or client.key in args.only]
    launcher, _, ranks = args.layout.partition(":")
    with client_service(launcher=launcher, ranks=int(ranks or 1)) as server:
        outcomes = {client: run_suite(client, args.environments.resolve(), server.url) for client in clients}
    for client, outcome in outcomes.items():
        print(f"{client.name}: {counts(outcome)}")
    if args.table:
        write_table(args.layout, outcomes)
    sys.exit(any(outcome["failed"] or not outcome for outcome in outcomes.values()))


def run_suite(client: Client, environments: Path, url: str) -> Counter:
    """Its tests' outcomes."""
    environment = environments / client.environment
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        if client.environment == "javascript":
            for module in (HERE / "javascript").glob("*.mjs"):  # beside the packages that they import
                shutil.copy(module, environment)
            flags = ["--test", "--test-reporter=junit", f"--test-reporter-destination={report}"]
            shown = ["--test-reporter=spec", "--test-reporter-destination=stdout"]
            command = ["node", *flags, *shown, str(environment / Path(client.suite).name)]
        else:
            python = environment / "bin" / "python"
            flags = ["-rs", f"--server={url}", f"--junitxml={report}"]
            command = [str(python), "-m", "pytest", str(HERE / client.suite), *flags]
        launchers = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"SERVER": url, "API_KEY": KEY, "PATH": launchers}
        subprocess.run(command, env=os.environ | variables, timeout=LIMIT_SECONDS, check=False)
        return Counter(map(outcome_of, ElementTree.parse(report).iter("testcase")))


def write_table(layout: str, outcomes: dict[Client, Counter]) -> None:
    """This layout's counts anew in docs/clients.md; those of other layouts and clients stay."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    cells = {row[0]: row[3:] for row in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}
    rows = [list_row(client, cells.get(client.name, []), layout, outcomes.get(client)) for client in CLIENTS]
    PAGE.write_text(before + BEGIN + HEADER + "".join(rows) + END + after, encoding="utf-8")


def list_row(client: Client, cells: list[str], layout: str, outcome: Counter | None) -> str:
    known = dict(zip(COLUMNS, cells, strict=False)) | ({layout: counts(outcome)} if outcome is not None else {})
    results = " | ".join(known.get(column, "not asked") for column in COLUMNS)
    return f"| {client.name} | {client.versions or 'any'} | {client.asks} | {results} |\n"


def counts(outcome: Counter) -> str:
    return ", ".join(f"{outcome[kind]} {kind}" for kind in KINDS if outcome[kind]) or "nothing was run"


def outcome_of(case: ElementTree.Element) -> str:
    """A suite whose client cannot be imported has failed: its environment should have it."""
    skipped = case.find("skipped")
    if skipped is not None and skipped.get("message") != "collection skipped":
        return "skipped"
    return "passed" if skipped is None and case.find("failure") is None and case.find("error") is None else "failed"


if __name__ == "__main__":
    main()
