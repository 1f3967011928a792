"""Extensions of installed packages: entry points in the group argosy.extensions, by the names that a run file gives."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from argosy.extend.declared import CodeFile, read_code

GROUP = "argosy.extensions"


def read_package(name: str) -> CodeFile:
    """Read what the module of the entry point `name` declares; it is found, and not run (its parent packages are).

    Raises: ValueError if there is no such entry point, or its module cannot be found or read.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        near = get_close_matches(name, found, n=1)
        there = f"there are: {', '.join(sorted(found))}" if found else "no installed package has any"
        hint = f"did you mean {near[0]}?" if near else there
        raise ValueError(f"{name}: there is no such entry point in the group {GROUP}; {hint}")
    return read_code(_source_of(found[name]), name, found[name].module)


def _source_of(point: EntryPoint) -> Path:
    try:
        spec = find_spec(point.module)
    except Exception as error:  # its parent packages are imported, and may fail in any way
        raise ValueError(f"the module {point.module} of {point.name} cannot be found ({error})") from None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"the module {point.module} of {point.name} has no file of Python source")
    return Path(spec.origin)
