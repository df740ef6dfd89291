"""The files of docs/operations: their commands parse, and alerts and dashboard ask for metrics that there are."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import fields

import kubernetes_validate
import pytest
import yaml
from launchers import ROOT

from labinfer.base.errors import ExitStatus
from labinfer.cli.command_table import COMMANDS
from labinfer.cli.flags import build_parser, split_command
from labinfer.server.gateway.endpoints import API
from labinfer.server.gateway.metrics import Metrics
from labinfer.server.gateway.options import ServerOptions

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


def pod() -> dict:
    """Pod template of the Kubernetes deployment."""
    deployment, _ = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    return deployment["spec"]["template"]


def commands() -> dict[str, list[str]]:
    """Arguments of the program on every rank, by file."""
    words = {}
    for name in ("labinfer.service", "serve.sbatch", "job.sbatch"):
        text = re.sub(r"\\\n\s*", "", (FOLDER / name).read_text(encoding="utf-8"))
        (line,) = (line for line in text.splitlines() if re.search(r"^[^#]*launch\.py", line))
        words[name] = shlex.split(line.rpartition("launch.py ")[2].rstrip("& "))
    args = pod()["spec"]["containers"][0]["args"]
    words["kubernetes.yaml"] = args[args.index("labinfer") + 1 :]
    return words


@pytest.mark.parametrize(("name", "arguments"), commands().items())
def test_commands_parse(name, arguments):
    command, rest = split_command(arguments)
    assert command == ("generate" if name == "job.sbatch" else "serve")
    build_parser(command).parse_args(rest)


# Kubernetes.


def server_options(name: str) -> ServerOptions:
    """Options of the server that a file starts."""
    arguments = vars(build_parser("serve").parse_args(split_command(commands()[name])[1]))
    names = {field.name for field in fields(ServerOptions)}
    return ServerOptions(**{name: value for name, value in arguments.items() if name in names and value is not None})


def test_prometheus_can_scrape_the_annotated_pod():
    """Annotations cannot give Prometheus an API key."""
    options, template = server_options("kubernetes.yaml"), pod()
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert options.api_key_file and options.metrics_open
    ports = {port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {int(annotations["prometheus.io/port"]), options.port} == ports


def test_probes_ask_for_routes_without_a_key():
    (container,) = pod()["spec"]["containers"]
    paths = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"/ready", "/health"}
    assert paths <= {endpoint.path for endpoint in API if not endpoint.needs_key}


def test_pod_has_more_time_to_end_than_open_requests():
    assert pod()["spec"]["terminationGracePeriodSeconds"] > server_options("kubernetes.yaml").drain_timeout


def test_pod_suits_the_image_of_the_dockerfile():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (container,) = pod()["spec"]["containers"]
    assert f"--uid {container['securityContext']['runAsUser']} labinfer" in dockerfile
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"\nVOLUME {mounts['cache']}\n" in dockerfile
    assert '\nENTRYPOINT ["labinfer"]\n' in dockerfile and "command" not in container
    assert container["args"][0] in COMMANDS


def test_pods_of_the_mpi_job_suit_the_image_of_the_dockerfile():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = (ROOT / "hostfiles" / "kubernetes-mpijob.yaml").read_text(encoding="utf-8")
    config, job = yaml.safe_load_all(text)
    kubernetes_validate.validate(config, kubernetes_validate.latest_version(), strict=True)
    assert job["spec"]["sshAuthMountPath"] == "/home/labinfer/.ssh"
    assert f"HostKey {job['spec']['sshAuthMountPath']}/id_rsa\n" in config["data"]["server.conf"]
    for role in job["spec"]["mpiReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": role["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        (container,) = role["template"]["spec"]["containers"]
        assert f"--uid {container['securityContext']['runAsUser']} labinfer" in dockerfile
        volumes = {volume["name"]: volume for volume in role["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["ssh"]["configMap"]["name"] == config["metadata"]["name"]
    launcher, worker = (role["template"]["spec"]["containers"][0] for role in job["spec"]["mpiReplicaSpecs"].values())
    folder = next(mount["mountPath"] for mount in worker["volumeMounts"] if mount["name"] == "ssh")
    assert worker["args"][-1] == f"{folder}/server.conf"
    program = launcher["args"].index("/opt/labinfer/bin/labinfer")
    assert "COPY --from=build /opt/labinfer /opt/labinfer" in dockerfile
    build_parser("generate").parse_args(launcher["args"][program + 1 :])


def test_manifest_is_valid_by_the_schemas_of_kubernetes():
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    documents[1]["spec"]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="'port' was unexpected"):
        kubernetes_validate.validate(documents[1], kubernetes_validate.latest_version(), strict=True)


# systemd.


def unit_service() -> configparser.SectionProxy:
    """Section ``Service`` of the unit."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string(re.sub(r"\\\n\s*", "", (FOLDER / "labinfer.service").read_text(encoding="utf-8")))
    return parser["Service"]


def test_stopped_unit_has_not_failed_and_wrong_usage_is_not_repeated():
    service = unit_service()
    assert service["SuccessExitStatus"] == str(128 + signal.SIGTERM)
    assert service["RestartPreventExitStatus"] == str(int(ExitStatus.USAGE))
    assert float(service["TimeoutStopSec"]) > ServerOptions().drain_timeout


def need(tool: str) -> str:
    """Path of ``tool``; skips the test where it is missing."""
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


def verify(tool: str, text: str, folder) -> str:
    """Complaints of systemd about a unit, whose program is replaced by one of this machine."""
    unit = folder / "labinfer.service"
    unit.write_text(
        text.replace("/opt/labinfer/.venv/bin/python launch.py supervise", f"{sys.executable} launch.py supervise")
    )
    done = subprocess.run([tool, "verify", unit], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_systemd_accepts_the_unit(tmp_path):
    tool, text = need("systemd-analyze"), (FOLDER / "labinfer.service").read_text(encoding="utf-8")
    assert verify(tool, text, tmp_path) == ""
    assert "SucessExitStatus" in verify(tool, text.replace("SuccessExitStatus", "SucessExitStatus"), tmp_path)


# Prometheus and Grafana.


def dashboard_queries() -> list[str]:
    """PromQL of the panels, with Grafana's variables replaced."""
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [re.sub(r"\$__\w+", "5m", query).replace("$model", "demo") for query in queries]


def check_rules(tool: str, rules: list[dict], file) -> str:
    """Output of promtool about a file of rules; it fails unless they are valid."""
    file.write_text(yaml.safe_dump({"groups": [{"name": "test", "rules": rules}]}))
    done = subprocess.run([tool, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_the_alerts_and_the_queries_of_the_dashboard(tmp_path):
    tool = need("promtool")
    alerts = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    queries = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(dashboard_queries())]
    assert len(queries) > 10
    for rules in (alerts, queries):
        assert f"SUCCESS: {len(rules)} rules found" in check_rules(tool, rules, tmp_path / "rules.yml")
    with pytest.raises(AssertionError, match="could not parse expression"):
        check_rules(tool, [{"record": "wrong", "expr": "sum by (le"}], tmp_path / "rules.yml")


# Slurm.


@pytest.mark.parametrize("name", ["serve.sbatch", "job.sbatch"])
def test_bash_reads_the_batch_scripts(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True, timeout=60)
