"""The files of docs/operations: their commands parse, and alerts and dashboard ask for metrics that there are."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from launchers import ROOT

from labinfer.cli.main import build_parser, split_command
from labinfer.server.gateway.metrics import Metrics

FOLDER = ROOT / "docs" / "operations"


def exposed_metrics() -> set[str]:
    """Names of the samples that ``/metrics`` may have."""
    metrics = Metrics(["demo"], max_model_len=1024)
    names = set()
    for family in metrics._registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_metrics_exist(name):
    used = set(re.findall(r"(?:vllm|labinfer):\w+", (FOLDER / name).read_text(encoding="utf-8")))
    assert len(used) > 5
    assert used <= exposed_metrics()


def test_alerts_have_what_prometheus_asks_for():
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all({"expr", "for", "labels", "annotations"} < set(rule) for rule in rules)


def test_panels_of_the_dashboard_do_not_overlap():
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def commands() -> dict[str, list[str]]:
    """What follows launch.py for every rank, by file."""
    words = {}
    for name in ("labinfer.service", "serve.sbatch", "job.sbatch"):
        text = re.sub(r"\\\n\s*", "", (FOLDER / name).read_text(encoding="utf-8"))
        (line,) = (line for line in text.splitlines() if re.search(r"^[^#]*launch\.py", line))
        words[name] = shlex.split(line.rpartition("launch.py ")[2].rstrip("& "))
    deployment, _ = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    words["kubernetes.yaml"] = args[args.index("launch.py") + 1 :]
    return words


@pytest.mark.parametrize(("name", "arguments"), commands().items())
def test_commands_parse(name, arguments):
    command, rest = split_command(arguments)
    assert command == ("generate" if name == "job.sbatch" else "serve")
    build_parser(command).parse_args(rest)
