"""Readers of a checkpoint directory's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError


def read_json(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        UserError: the file cannot be read, or does not contain a JSON object.
    """
    return _read(path, dict, "object")


def read_list(path: Path) -> list:
    """Read a JSON list from a file.

    Raises:
        UserError: the file cannot be read, or does not contain a JSON list.
    """
    return _read(path, list, "list")


def read_optional(path: Path) -> dict:
    """Read a JSON object from a file; empty if the file does not exist. For errors see ``read_json``."""
    return read_json(path) if path.exists() else {}


def need_plain_file(path: Path) -> None:
    """Refuse a path that is not a regular file, such as a named pipe, which would block its reader forever.

    Raises:
        UserError: the path exists and is not a regular file. A missing file is not refused here.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file; give a Hugging Face model directory")


def _read(path: Path, kind: type, name: str) -> Any:
    need_plain_file(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a Hugging Face model directory") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(values, kind):
        raise UserError(f"{path} is not a JSON {name}")
    return values
