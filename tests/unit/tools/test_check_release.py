"""The check before a release: metadata of a wheel, and the headings of the changelog."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path

import pytest

import labinfer

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools/check_release.py"
METADATA = """Metadata-Version: 2.4
Name: labinfer
Version: {version}
Summary: Inference
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: {requirement}
Description-Content-Type: text/markdown

# LABInfer
"""


@pytest.fixture(scope="module")
def release():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("check_release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(folder: Path, metadata: str, *, library: str = "labinfer/native/prebuilt/kernels.so") -> Path:
    path = folder / "labinfer-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("labinfer-1.0.0.dist-info/METADATA", metadata)
        archive.writestr(library, b"")
    return path


def test_complete_wheel_passes(release, tmp_path):
    release.check_metadata(make_wheel(tmp_path, METADATA.format(version="1.0.0", requirement="torch>=2.9")), "1.0.0")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            METADATA.format(version="1.0.1", requirement="torch"),
            "the metadata say 1.0.1, and labinfer.__version__ is 1.0.0",
        ),
        (METADATA.format(version="1.0.0", requirement="torch>>2"), "requires-dist"),
        (METADATA.format(version="one", requirement="torch"), "version"),
        (METADATA.format(version="1.0.0", requirement="torch").replace("Summary: Inference\n", ""), "lack summary"),
    ],
)
def test_wrong_metadata_are_refused_by_field(release, metadata, said, tmp_path):
    with pytest.raises(SystemExit, match=said):
        release.check_metadata(make_wheel(tmp_path, metadata), "1.0.0")


def test_wheel_without_compiled_functions_is_refused(release, tmp_path):
    metadata = METADATA.format(version="1.0.0", requirement="torch")
    with pytest.raises(SystemExit, match="no compiled functions: build it with make wheel"):
        release.check_metadata(make_wheel(tmp_path, metadata, library="labinfer/kernels.cpp"), "1.0.0")


def test_changelog_of_a_release_has_an_empty_section_for_the_next_one(release):
    release.check_changelog("# Changelog\n\n## [Unreleased]\n\n## [1.0.0] - 2026-01-31\n\n- first\n", "1.0.0")
    with pytest.raises(SystemExit, match=r"should begin with ## \[Unreleased\], and then ## \[1.0.0\] - YYYY-MM-DD"):
        release.check_changelog("## [Unreleased]\n\n## [0.9.0] - 2026-01-31\n", "1.0.0")
    with pytest.raises(SystemExit, match="YYYY-MM-DD"):
        release.check_changelog("## [Unreleased]\n\n## [1.0.0]\n", "1.0.0")
    with pytest.raises(SystemExit, match="entries under Unreleased; move them to 1.0.0: - new"):
        release.check_changelog("## [Unreleased]\n\n- new\n\n## [1.0.0] - 2026-01-31\n", "1.0.0")


def test_documents_name_the_files_of_this_version():
    versions = set()
    for path in (*ROOT.glob("README*.md"), *ROOT.glob("docs/**/install.md")):
        versions |= set(re.findall(r"labinfer-(\d+\.\d+\.\d+)", path.read_text(encoding="utf-8")))
    assert versions == {labinfer.__version__}
