"""The corpus that every machine with Argosy has: the Python sources of the standard library and of torch."""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

from argosy.errors import UserError

PREFIX = "builtin:"
PYTHON = "builtin:python"


def builtin_files(item: str) -> list[Path]:
    """Return the files of a builtin corpus, in a fixed order.

    Raises: UserError if `item` is not a builtin corpus, or this Python has no sources.
    """
    if item != PYTHON:
        raise UserError(f"input = {item}: there is no such builtin corpus. Use {PYTHON}, or name files or folders.")
    files = _standard_library() + _torch()
    if not files:
        raise UserError(f"input = {item}: this Python comes without its .py sources. Name files or folders instead.")
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages"}
    return [path for path in sorted(root.rglob("*.py")) if not outside.intersection(path.relative_to(root).parts)]


def _torch() -> list[Path]:
    """Find the .py files of torch without importing it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return []
    return sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
