"""Dockerfile, Apptainer recipe, Compose file and their Slurm script: they agree with each other, and their commands parse."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml
from launchers import ROOT
from root_images import instructions, recipe_sections

from labinfer.cli.flags import build_parser, split_command
from labinfer.native.targets import TARGETS
from labinfer.weights.hubs import HUBS

OPERATIONS = ROOT / "docs" / "operations"


def docker_arguments() -> dict[str, str]:
    words = [rest for word, rest in instructions(ROOT / "Dockerfile") if word == "ARG"]
    return {name: value.strip('"') for name, _, value in (word.partition("=") for word in words)}


def recipe_arguments() -> dict[str, str]:
    return dict(line.split("=", 1) for line in recipe_sections(OPERATIONS / "labinfer.def")["arguments"])


def test_both_images_and_the_makefile_install_the_same_torch():
    (makefile,) = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    (bundle,) = re.findall(r'^TORCH = "(.*)"$', (ROOT / "tools/build_bundle.py").read_text(), re.M)
    assert docker_arguments()["TORCH"] == recipe_arguments()["TORCH"] == makefile == bundle
    assert docker_arguments()["TORCH_INDEX"] == recipe_arguments()["TORCH_INDEX"]


@pytest.mark.parametrize("arguments", [docker_arguments, recipe_arguments])
def test_images_have_functions_for_all_processors(arguments):
    assert arguments()["TARGETS"] == ",".join(target.name for target in TARGETS)


def test_image_does_not_run_as_root_and_has_a_health_check():
    words = dict(instructions(ROOT / "Dockerfile"))
    assert words["USER"] == "labinfer"
    assert "127.0.0.1:8000/health" in words["HEALTHCHECK"] and words["EXPOSE"] == "8000"


def served_commands() -> dict[str, list[str]]:
    """Arguments of LABInfer in each file."""
    words = dict(instructions(ROOT / "Dockerfile"))
    compose = yaml.safe_load((OPERATIONS / "compose.yaml").read_text())["services"]["labinfer"]
    assert compose["command"][:2] == ["supervise", "--"]
    script = re.sub(r"\\\n\s*", "", (OPERATIONS / "apptainer.sbatch").read_text())
    (job,) = (line for line in script.splitlines() if line.startswith("srun"))
    return {
        "Dockerfile": yaml.safe_load(words["CMD"]),
        "compose.yaml": compose["command"][compose["command"].index("labinfer") + 1 :],
        "apptainer.sbatch": shlex.split(job.rpartition(" labinfer ")[2]),
    }


@pytest.mark.parametrize(("name", "arguments"), served_commands().items())
def test_commands_in_containers_parse(name, arguments):
    command, rest = split_command(arguments)
    assert command == ("generate" if name == "apptainer.sbatch" else "serve")
    build_parser(command).parse_args(rest)


def test_compose_file_gives_shared_memory_and_a_known_hub():
    service = yaml.safe_load((OPERATIONS / "compose.yaml").read_text())["services"]["labinfer"]
    assert service["shm_size"] == "1gb" and service["init"] is True
    assert service["environment"]["LABINFER_HUB"].removeprefix("${LABINFER_HUB:-").rstrip("}") in HUBS
    assert service["volumes"] == ["cache:/home/labinfer/.cache"]
