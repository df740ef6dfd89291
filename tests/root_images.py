"""RootImage: runs the instructions of a Dockerfile or an Apptainer recipe in root folders by chroot, without a container engine (Linux, root)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hosts import may_make_hosts
from installed import run

RELEASE, MIRROR = "trixie", "http://deb.debian.org/debian"
"""Debian release of ``debian:trixie-slim``."""
ENTER = """
set -e
ip link set lo up 2>/dev/null || :
root=$1 wheels=$2 user=$3
shift 3
mount --types proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$wheels" "$root/mnt"
exec chroot --userspec="$user" "$root" /usr/bin/env --ignore-environment "$@"
"""
needs_root_images = pytest.mark.skipif(
    not may_make_hosts() or not shutil.which("debootstrap"), reason="needs root, unshare and debootstrap"
)


def make_base(folder: Path) -> Path:
    """A minimal Debian in ``folder``, which uses this machine's resolver."""
    run(["debootstrap", "--variant=minbase", RELEASE, folder, MIRROR])
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
    return folder


def python_of(base: Path) -> str:
    """Version of Python that Debian would install, such as ``3.13``."""
    shown = run(["chroot", base, "apt-cache", "show", "python3"])
    return ".".join(re.search(r"^Version: (\d+)\.(\d+)", shown, re.M).groups())


class RootImage:
    """A root folder, a user and environment variables.

    Args:
        root: folder that is changed.
        wheels: folder that is at ``/mnt`` inside. pip installs from it alone.
    """

    def __init__(self, root: Path, wheels: Path):
        self.root, self._wheels = root, wheels
        self.user, self.variables = "root", {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.folder, self.entry, self.command, self.health = "/", [], [], []

    @classmethod
    def copied(cls, base: Path, root: Path, wheels: Path) -> RootImage:
        run(["cp", "--archive", base, root])
        return cls(root, wheels)

    def run(self, script: str, *, network: bool = True, **variables: str) -> str:
        """Run a shell script inside; returns its output. Without ``network`` only the loopback device is up."""
        pip = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "/mnt",
            "PIP_NO_COMPILE": "1",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        environment = (
            pip | self.variables | {"HOME": "/root" if self.user == "root" else f"/home/{self.user}"} | variables
        )
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"]), "sh", "-c"]
        inside = [f"{name}={value}" for name, value in environment.items()]
        words = [*enter, ENTER, "sh", self.root, self._wheels, self.user, *inside]
        return run([*words, "sh", "-c", f"cd {shlex.quote(self.folder)} && {script}"])


def build_docker(
    file: Path, context: Path, base: Path, folder: Path, wheels: Path, arguments: Mapping[str, str]
) -> RootImage:
    """Run the instructions of a Dockerfile; returns the image of the last stage.

    Args:
        context: folder that COPY takes files from, except for what git ignores.
        base: root folder that stands for every image of FROM.
        arguments: build arguments, as ``docker build --build-arg``.
    """
    stages: dict[str, RootImage] = {}
    for word, rest in instructions(file):
        if word == "FROM":
            given = {}
            image = RootImage.copied(base, folder / f"stage{len(stages)}", wheels)
            stages[rest.rpartition(" AS ")[2]] = image
        elif word == "ARG" and stages:
            name, _, default = rest.partition("=")
            given[name] = arguments.get(name, default.strip('"'))
        elif word == "RUN":
            image.run(rest, **given)
        elif word == "COPY":
            copy_into(image, rest, context, stages)
        elif word == "ENV":
            name, _, value = rest.partition("=")
            image.variables[name] = value
        elif word == "USER":
            image.user = rest
        elif word == "WORKDIR":
            image.folder = rest
        elif word == "HEALTHCHECK":
            image.health = json.loads(rest.partition(" CMD ")[2])
        elif word == "ENTRYPOINT":
            image.entry = json.loads(rest)
        elif word == "CMD":
            image.command = json.loads(rest)
        elif word not in ("ARG", "VOLUME", "EXPOSE"):
            raise AssertionError(f"{file}: {word} is not known here")
    return image


def instructions(file: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments, lines that go on joined."""
    text = re.sub(r"\\\n\s*", "", file.read_text(encoding="utf-8"))
    lines = [line.strip() for line in text.splitlines()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def copy_into(image: RootImage, words: str, context: Path, stages: Mapping[str, RootImage]) -> None:
    *options, source, target = words.split()
    to = image.root / target.lstrip("/")
    if options:
        (stage,) = (stages[option.removeprefix("--from=")] for option in options)
        run(["cp", "--archive", "--link", stage.root / source.lstrip("/"), to])
    else:
        copy_sources(context, [source], to)


def copy_sources(context: Path, paths: Sequence[str], target: Path) -> None:
    """Copy files that git knows, or would add, below ``paths``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=context,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (context / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(context / name, target / name)


def build_apptainer(
    file: Path, context: Path, base: Path, folder: Path, wheels: Path, arguments: Mapping[str, str]
) -> RootImage:
    """Run the ``%post`` section of a recipe, after its ``%files`` have been copied; see ``build_docker``."""
    sections = recipe_sections(file)
    defaults = dict(line.split("=", 1) for line in sections["arguments"])
    image = RootImage.copied(base, folder / "apptainer", wheels)
    for line in sections["files"]:
        source, target = line.split()
        copy_sources(context, [source], image.root / target.removesuffix(source).strip("/"))
    script = "\n".join(["set -e", *sections["post"]])
    for name, value in (defaults | arguments).items():
        script = script.replace("{{ " + name + " }}", value)
    assert "{{" not in script
    image.run(f"{{ {script}\n}}")
    (line,) = sections["environment"]
    image.variables["PATH"] = line.removeprefix("export PATH=").replace("$PATH", image.variables["PATH"])
    return image


def recipe_sections(file: Path) -> dict[str, list[str]]:
    """Lines of each section of an Apptainer recipe."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            lines = sections[line[1:].strip()] = []
        elif line.strip() and not line.startswith("#"):
            lines.append(line.strip())
    return sections
