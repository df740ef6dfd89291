"""Check the wheel in dist/ before a release: its metadata, the changelog, and how it runs in an empty environment.

    python tools/check_release.py [--wheels FOLDER] [--torch torch==VERSION] [--torch-index URL]

Ends with the command that tags the release.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from packaging.metadata import Metadata  # noqa: E402

import labinfer  # noqa: E402

SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.M)
REQUIRED_FIELDS = (
    "summary",
    "description",
    "description_content_type",
    "license_files",
    "requires_python",
    "requires_dist",
)
"""Required fields of a wheel: those of its metadata that a package index shows."""


def check_metadata(wheel: Path, version: str) -> None:
    """Check that a package index would accept a wheel, and that it is complete.

    Raises:
        SystemExit: the metadata is invalid or incomplete, or the wheel has no compiled functions.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        data = archive.read(metadata_name)
    try:
        metadata = Metadata.from_email(data, validate=True)
    except Exception as error:  # noqa: BLE001 - a group of all errors, whose class depends on the Python version
        raise SystemExit(f"{wheel.name}: {'; '.join(map(str, getattr(error, 'exceptions', [error])))}") from None
    if missing := [field for field in REQUIRED_FIELDS if not getattr(metadata, field)]:
        raise SystemExit(f"{wheel.name}: the metadata lack {', '.join(missing)}")
    if str(metadata.version) != version:
        raise SystemExit(f"{wheel.name}: the metadata say {metadata.version}, and labinfer.__version__ is {version}")
    if not any(name.endswith(".so") for name in names):
        raise SystemExit(f"{wheel.name} has no compiled functions: build it with make wheel")


def check_changelog(text: str, version: str) -> None:
    """Check that the changelog begins with an empty section for what comes next, and then has a dated one for ``version``.

    Raises:
        SystemExit: it does not.
    """
    sections = list(SECTION.finditer(text))
    if [section[1] for section in sections[:2]] != ["Unreleased", version] or not sections[1][2]:
        raise SystemExit(f"CHANGELOG.md should begin with ## [Unreleased], and then ## [{version}] - YYYY-MM-DD")
    if entries := text[sections[0].end() : sections[1].start()].strip():
        raise SystemExit(f"CHANGELOG.md has entries under Unreleased; move them to {version}: {entries[:80]}")


def install(wheel: Path, environment: Path, torch: str, options: list[str]) -> None:
    """Install the wheel with MPI into a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *options, torch, f"{wheel}[mpi]"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", metavar="FOLDER", help="install from these wheels, without a network")
    parser.add_argument("--torch", default="torch", help="torch's requirement (default: %(default)s)")
    parser.add_argument("--torch-index", metavar="URL", help="a further package index, which has that torch")
    arguments = parser.parse_args()
    version = labinfer.__version__
    wheel = ROOT / "dist" / f"labinfer-{version}-py3-none-any.whl"
    if not wheel.exists():
        raise SystemExit(f"{wheel} does not exist: run make wheel")
    check_metadata(wheel, version)
    check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    print(f"{wheel.name}: metadata and changelog are right", flush=True)
    options = ["--no-index", "--find-links", arguments.wheels] if arguments.wheels else []
    options += ["--extra-index-url", arguments.torch_index] if arguments.torch_index else []
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory) / "environment"
        install(wheel, environment, arguments.torch, options)
        subprocess.run([sys.executable, str(ROOT / "tools" / "smoke_test.py"), str(environment)], check=True)
    print(f'{wheel.name} is ready: git tag --annotate v{version} --message "LABInfer {version}"')


if __name__ == "__main__":
    main()
