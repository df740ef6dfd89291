"""Ask one server through every client that is installed in ENVIRONMENTS, and write the table of docs/clients.md.

    python tests/clients/run.py .clients                    the suites whose environment is there
    python tests/clients/run.py .clients --suites agents    some
    python tests/clients/run.py .clients --table            and put what came of it into docs/clients.md

``make test-clients`` makes the environments. A suite is a folder beside this file, and a client a file in it, whose
docstring says what is run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from client_service import KEY, client_service  # noqa: E402 - after the path to it

PAGE = HERE.parent.parent / "docs" / "clients.md"
TABLE = re.compile(r"(?<=<!-- table: written by tests/clients/run.py -->\n).*?(?=<!-- end of the table -->)", re.DOTALL)
SUITES = ("agents", "libraries", "load", "javascript")
LIMIT_SECONDS = 1500.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--layout", default="", help="launcher and ranks, such as mpirun:2 for two stages")
    parser.add_argument("--table", action="store_true", help="write docs/clients.md")
    args = parser.parse_args()
    launcher, _, ranks = args.layout.partition(":")
    with client_service(launcher=launcher or "single", ranks=int(ranks or 1)) as server:
        outcomes = {suite: run_suite(suite, args.environments.resolve() / suite, server.url) for suite in args.suites}
    rows = [row for suite, results in outcomes.items() for row in table_rows(suite, results)]
    table = "| client | passed | failed | left out |\n|---|---|---|---|\n" + "".join(rows)
    print(table)
    if args.table:
        PAGE.write_text(TABLE.sub(lambda match: table, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(any(results["failed"] for suite in outcomes.values() for results in suite.values()))


def run_suite(suite: str, environment: Path, url: str) -> dict[str, Counter]:
    """The outcomes of each client's tests."""
    with TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        if suite == "javascript":
            flags = ["--test", "--test-reporter=junit", f"--test-reporter-destination={report}"]
            files = sorted(environment.glob("*.test.mjs"))
            command = ["node", *flags, "--test-reporter=spec", "--test-reporter-destination=stdout", *map(str, files)]
        else:
            python = environment / "bin" / "python"
            command = [str(python), "-m", "pytest", str(HERE / suite), f"--server={url}", f"--junitxml={report}", "-v"]
        variables = os.environ | {"SERVER": url, "API_KEY": KEY}
        subprocess.run(command, env=variables, timeout=LIMIT_SECONDS, check=False)
        outcomes: dict[str, Counter] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            client = (
                Path(case.get("file", "")).name.partition(".")[0] or case.get("classname", "").rpartition("test_")[2]
            )
            children = {child.tag for child in case}
            outcome = "left out" if "skipped" in children else "failed" if children else "passed"
            outcomes.setdefault(client, Counter())[outcome] += 1
        return outcomes


def table_rows(suite: str, results: dict[str, Counter]) -> list[str]:
    return [
        f"| {client} ({suite}) | {counts['passed']} | {counts['failed']} | {counts['left out']} |\n"
        for client, counts in sorted(results.items())
    ]


if __name__ == "__main__":
    main()
