"""Importing code of the user's, in a process that needs it: a worker, the reader of a source, a sink's process."""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from argosy.errors import UserError
from argosy.extend.declared import CodeFile, Declaration
from argosy.extend.register import Kind, registered_by
from argosy.extend.trust import check_approved


@dataclass(frozen=True)
class Extension:
    """A declared extension with its function."""

    declared: Declaration
    function: Callable[..., Any]


def load_code(code: Sequence[CodeFile]) -> list[Extension]:
    """Import the files, each once in a process, and return all that they declare, in order.

    Raises: UserError that names file and line, if one raises an error, registers other than it declares, or is not
    approved (`extend.trust`).
    """
    return [extension for file in code for extension in _load(file)]


def find(code: Sequence[CodeFile], kind: Kind, name: str) -> Extension:
    """Import the file that declares `name`, and return that extension. Raises: UserError."""
    for file in code:
        if any((d.kind, d.name) == (kind, name) for d in file.declarations):
            return next(e for e in _load(file) if (e.declared.kind, e.declared.name) == (kind, name))
    raise UserError(f"there is no {kind} {name!r} in extend.files or extend.packages.")


def _load(file: CodeFile) -> list[Extension]:
    module = _module(file)
    registered = registered_by(module.__name__)
    functions: dict[tuple[str, ...], Callable[..., Any]] = {
        (r.kind, r.name, str(r.facts.get("point", ""))): r.function for r in registered
    }
    declared = {declaration.key: declaration for declaration in file.declarations}
    if missing := [d for key, d in declared.items() if key not in functions]:
        raise UserError(f"{missing[0].place}: the {missing[0]} is declared, but importing the file does not define it.")
    if hidden := [key for key in functions if key not in declared]:
        raise UserError(
            f"{file.path}: registers a {' '.join(hidden[0]).strip()} that its text does not show. Write each extension "
            "as a decorator above its function, at the top level."
        )
    return [Extension(declaration, functions[key]) for key, declaration in declared.items()]


def _module(file: CodeFile) -> ModuleType:
    identity = hashlib.sha256(f"{file.path}\0{file.sha256}".encode()).hexdigest()
    name = file.module or f"argosy_extend_{file.path.stem}_{identity[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    check_approved([file])
    try:
        if file.module:
            return importlib.import_module(file.module)
        module = ModuleType(name)
        module.__file__ = str(file.path)
        sys.modules[name] = module  # dataclasses and pickles look for it there
        exec(compile(file.source, str(file.path), "exec"), module.__dict__)  # the very bytes that were checked
    except Exception as error:
        sys.modules.pop(name, None)
        raise UserError(f"{where(error, file.path)}: {type(error).__name__}: {error}. Mend the file.") from None
    return module


def where(error: BaseException, path: Path | str) -> str:
    """Return FILE:LINE of the last line of `path` that `error` came through, or just the file."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
    return f"{path}:{line}" if line else str(path)
