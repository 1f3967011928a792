"""Approving code of the user's, and importing it where it is needed: in a worker, a source's reader, a sink's process.

A run's own files are imported only if this user knows them, by their checksums: its folder may come from somebody
else, and `argosy generate` on it must not run what lies there. Starting a run (`argosy train`, `sweep`, `prepare
--extend`) approves the files that it names; all other commands ask. Approvals are kept in one file of the user's. Child
processes, on machines with another home too, get those of this process by an environment variable.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from argosy.errors import UserError
from argosy.extend.declared import CodeFile, Declaration
from argosy.extend.register import Kind, registered_by
from argosy.files import atomic_write, read_with_owner, state_folder

APPROVED = "ARGOSY_APPROVED_CODE"
"""Environment variable: checksums that this process or its parent has approved, with commas between them."""
APPROVED_FILE = "approved-code"
"""File in the user's folder for state, with a checksum and a path on each line."""
MOST_APPROVED, LONGEST_APPROVAL = 10_000, 256
"""Lines that are kept, the newest ones, and their characters."""


def approve(code: Iterable[CodeFile]) -> None:
    """Let this user's processes import these files, now and later. Without a home to write in, only this process and
    its children may."""
    new = {file.sha256: file.path for file in _files(code) if file.sha256 not in _of_environment()}
    if not new:
        return
    os.environ[APPROVED] = ",".join([*sorted(_of_environment()), *new])
    with suppress(OSError, RuntimeError):
        _write(new)


def check_approved(code: Iterable[CodeFile], trust_code: bool = False) -> None:
    """Raise UserError that names a file which this user has not approved; with `trust_code`, approve it instead."""
    if trust_code:
        approve(code)
        return
    for file in _files(code):
        if file.sha256 not in _of_environment() and file.sha256 not in _of_user():
            raise UserError(
                f"{file.path}: code of the run (sha256 {file.sha256[:12]}...) which you have neither trained with nor "
                "approved, and which would run with your rights. Read it; if you trust it, give --trust-code (in "
                "Python: trust_code=True), which approves it for good."
            )


def environment() -> dict[str, str]:
    """Return what a child process on another machine needs in its environment to import what is approved here."""
    return {APPROVED: os.environ[APPROVED]} if APPROVED in os.environ else {}


def _files(code: Iterable[CodeFile]) -> Sequence[CodeFile]:
    """Return those that a run brings along: installed packages are the user's choice already."""
    return [file for file in code if file.module is None]


def _of_environment() -> set[str]:
    return set(filter(None, os.environ.get(APPROVED, "").split(",")))


def _of_user() -> set[str]:
    with suppress(OSError, RuntimeError):
        return {line.split()[0] for line in _lines(_path())}
    return set()


def _path() -> Path:
    """Return the file's place. Raises: RuntimeError if the user has no home."""
    return state_folder() / APPROVED_FILE


def _lines(path: Path) -> list[str]:
    """Return the lines of the file, none if others may write it: then it approves nothing. Raises: OSError."""
    text, whose = read_with_owner(path, MOST_APPROVED * LONGEST_APPROVAL)
    return [] if whose else [line for line in text.decode(errors="replace").splitlines() if line.strip()]


def _write(new: dict[str, Path]) -> None:
    """Add to the file, whole. Raises: OSError; RuntimeError."""
    path = _path()
    if new.keys() <= _of_user():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other runs may begin now
        lines = _lines(path) if path.exists() else []
        lines += [f"{sha256}  {str(place)!r}"[: LONGEST_APPROVAL - 1] for sha256, place in new.items()]
        with atomic_write(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write("".join(f"{line}\n" for line in lines[-MOST_APPROVED:]).encode(errors="replace"))


@dataclass(frozen=True)
class Extension:
    """A declared extension with its function."""

    declared: Declaration
    function: Callable[..., Any]

    def raised(self, error: BaseException) -> str:
        """Return what the user is told of an error that the function raised, with the line of it."""
        place = where(error, self.declared.place.rpartition(":")[0])
        return f"{place}: the {self.declared} raised {type(error).__name__}: {error}"


def load_code(code: Sequence[CodeFile]) -> list[Extension]:
    """Import the files, each once in a process, and return all that they declare, in order.

    Raises: UserError that names file and line, if one raises an error, registers other than it declares, or is not
    approved.
    """
    return [extension for file in code for extension in _load(file)]


def find(code: Sequence[CodeFile], kind: Kind, name: str) -> Extension:
    """Import the file that declares `name`, and return that extension. Raises: UserError."""
    for file in code:
        if any((d.kind, d.name) == (kind, name) for d in file.declarations):
            return next(e for e in _load(file) if (e.declared.kind, e.declared.name) == (kind, name))
    raise UserError(f"there is no {kind} {name!r} in extend.files or extend.packages.")


def _load(file: CodeFile) -> list[Extension]:
    functions = registered_by(_module(file).__name__)
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
