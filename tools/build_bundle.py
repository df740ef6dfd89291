"""Build a bundle that installs LABInfer without a network: wheels, documentation, examples, checksums and a script, in one tar file.

    python tools/build_bundle.py [--wheel FILE] [--output dist] [--torch torch==VERSION] [--torch-index URL]

The wheels are those that pip, as it is configured here, takes for this Python and this machine. LABInfer's own wheel comes from
``tools/build_wheel.py``. Every file of the bundle but the list itself is in ``SHA256SUMS``.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
INCLUDED = ("README.md", "README.zh-CN.md", "CHANGELOG.md", "LICENSE", "docs", "examples", "hostfiles")
CHECKSUMS = "SHA256SUMS"
TORCH = "torch==2.13.0"


def python_version() -> str:
    """Version of this Python that a wheel's tag has, such as ``3.11``."""
    return "{}.{}".format(*sys.version_info[:2])


def wheel_version(wheel: Path) -> str:
    """Version in a wheel's file name: ``labinfer-0.1.0-py3-none-any.whl`` → ``0.1.0``."""
    return wheel.name.split("-")[1]


def download_wheels(wheel: Path, folder: Path, torch: str, torch_index: str) -> None:
    """Fill ``folder`` with LABInfer's wheel and those that it needs with its extra ``mpi``; pip fails where a package has no wheel."""
    extra_index = ["--extra-index-url", torch_index] if torch_index else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), *extra_index, torch, f"{wheel}[mpi]"], check=True)


def add_files(folder: Path, version: str) -> None:
    """Copy the documentation and the examples into the bundle's folder, and write its script."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    script = (ROOT / "tools" / "bundle" / "install.sh").read_text()
    facts = {"@PYTHON@": python_version(), "@MACHINE@": platform.machine(), "@VERSION@": version}
    for name, fact in facts.items():
        script = script.replace(name, fact)
    (folder / "install.sh").write_text(script)
    (folder / "install.sh").chmod(0o755)


def tracked_files() -> list[str]:
    """Files of ``INCLUDED`` that git tracks: a file that the user keeps beside them, such as one of API keys, is not given away."""
    listing = subprocess.run(["git", "ls-files", "-z", *INCLUDED], cwd=ROOT, capture_output=True, text=True, check=True)
    return listing.stdout.rstrip("\0").split("\0")


def write_checksums(folder: Path) -> None:
    """List the SHA-256 of every file below ``folder``, in the format of ``sha256sum``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256(path)}  {path.relative_to(folder)}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def pack(folder: Path, output: Path) -> Path:
    """Write ``folder`` into a tar file in ``output``, complete or not at all; returns the file's path."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{folder.name}.tar"
    partial = path.with_suffix(".tar.partial")
    with tarfile.open(partial, "w") as archive:
        archive.add(folder, arcname=folder.name, filter=without_owner)
    partial.replace(path)
    return path


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """``member`` without the user and group who built the bundle."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def build_bundle(wheel: Path, output: Path, torch: str, torch_index: str) -> Path:
    """Build the bundle around LABInfer's wheel; returns the path of the tar file."""
    version = wheel_version(wheel)
    tag = f"python{python_version()}-linux-{platform.machine()}"
    with tempfile.TemporaryDirectory(dir=output if output.is_dir() else None) as directory:
        folder = Path(directory) / f"labinfer-{version}-{tag}"
        folder.mkdir()
        download_wheels(wheel, folder / "wheels", torch, torch_index)
        add_files(folder, version)
        write_checksums(folder)
        return pack(folder, output)


def find_wheel(folder: Path) -> Path:
    """LABInfer's only wheel in ``folder``.

    Raises:
        SystemExit: there is none, or there are several.
    """
    wheels = sorted(folder.glob("labinfer-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(
            f"{folder} holds {len(wheels)} wheels of LABInfer, not one: run make wheel, or give --wheel FILE"
        )
    return wheels[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="LABInfer's wheel (default: the one in --output)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--torch", default=TORCH, help="torch's requirement (default: %(default)s)")
    parser.add_argument(
        "--torch-index", default="", metavar="URL", help="a further package index, which has that torch"
    )
    arguments = parser.parse_args()
    wheel = arguments.wheel or find_wheel(arguments.output)
    path = build_bundle(wheel.resolve(), arguments.output.resolve(), arguments.torch, arguments.torch_index)
    print(f"{path}: {path.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
