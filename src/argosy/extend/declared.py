"""The declarations in a file of the user's, or in the module of an installed package's entry point, read from its text.

Nothing of it is run, and nothing imported but the parent packages of such a module. Entry points are those of the group
argosy.extensions, by the names that a run file gives."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from argosy.errors import near_names
from argosy.extend.register import DECORATORS, ClassRegistration, ExtensionKey, Kind, Registration, extension_key

ROOM = "argosy.extend"
MOST_CODE_BYTES = 2**20
"""No file of extensions is longer."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Declaration:
    """An extension, as its decorator says."""

    kind: Kind
    name: str
    place: str
    """FILE:LINE of the function."""
    facts: Mapping[str, Any]

    @property
    def key(self) -> ExtensionKey:
        return extension_key(self.kind, self.name, self.facts)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class CodeFile:
    """A file of the user's, and what it declares."""

    name: str
    """The file's own name, or that of the entry point."""
    path: Path
    source: bytes
    declarations: tuple[Declaration, ...]
    module: str | None = None
    """The module's name, if it belongs to an installed package."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    def sha256_for(self, source: str) -> str:
        """Return the checksum of the code that one source of text can depend on.

        That is all statements at the top level but other extensions which none of them names.
        """
        tree = ast.parse(self.source)
        imported = dict(_imported(tree))
        others = {
            node.name: node for node in tree.body if isinstance(node, Definition) and _is_other(node, imported, source)
        }
        kept = [node for node in tree.body if node not in others.values()]
        for node in kept:  # it grows by what is named
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and part.id in others:
                    kept.append(others.pop(part.id))
        lines = self.source.splitlines()
        parts = sorted((_first_line(node), node.end_lineno or 0) for node in kept)
        return hashlib.sha256(b"\n".join(line for first, last in parts for line in lines[first - 1 : last])).hexdigest()


def read_code(path: Path, name: str | None = None, module: str | None = None) -> CodeFile:
    """Read what a file declares. Raises: ValueError that names file and line, if there are any."""
    try:
        stat = path.stat()
        if not path.is_file():
            raise ValueError(f"{path}: is not a file")
        return _read(path, name or path.name, module, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except OSError as problem:
        raise ValueError(f"{path}: cannot be read ({problem.strerror})") from None


@lru_cache(maxsize=64)
def _read(path: Path, name: str, module: str | None, *_stamp: int) -> CodeFile:
    with path.open("rb") as file:
        source = file.read(MOST_CODE_BYTES + 1)
    if len(source) > MOST_CODE_BYTES:
        raise ValueError(f"{path}: is longer than {MOST_CODE_BYTES} bytes")
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    except ValueError as error:  # null bytes
        raise ValueError(f"{path}: not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}: not Python: it is nested too deeply") from None
    found = tuple(_declarations(tree, path))
    if not found:
        raise ValueError(f"{path}: declares nothing; put @extend.{' or @extend.'.join(DECORATORS)} above what it has")
    return CodeFile(name, path, source, found, module)


def _declarations(tree: ast.Module, path: Path) -> Iterator[Declaration]:
    names = dict(_imported(tree))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if not isinstance(node, Definition):
            continue
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if (kind := _kind(called, names)) is None:
                continue
            place = f"{path}:{decorator.lineno}"
            if id(node) not in top:
                raise ValueError(f"{place}: @extend.{kind} stands inside of another block; put it at the top level")
            registration = _registration(kind, decorator, place)
            _check_definition(node, registration, place)
            yield Declaration(registration.kind, registration.name or node.name, place, registration.facts)


def _is_other(node: Definition, names: Mapping[str, str], source: str) -> bool:
    """Return True if `node` is an extension of ours, and not the source of this name."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (found := _kind(called, names)) is not None:
            return (found, _registration(found, decorator, "").name or node.name) != ("source", source)
    return False


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, Definition) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what imports at the top level call things of ours -> what these are."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in ("argosy", ROOM):
                    yield (alias.asname, alias.name) if alias.asname else ("argosy", "argosy")
        elif isinstance(node, ast.ImportFrom) and node.module in ("argosy", ROOM):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _kind(called: ast.expr, names: Mapping[str, str]) -> str | None:
    """Return the last name of a decorator of ours; None if it is another's."""
    parts: list[str] = []
    while isinstance(called, ast.Attribute):
        parts.insert(0, called.attr)
        called = called.value
    if not isinstance(called, ast.Name) or called.id not in names:
        return None
    full = ".".join([names[called.id], *parts])
    return full.removeprefix(f"{ROOM}.") if full.startswith(f"{ROOM}.") else None


def _registration(kind: str, decorator: ast.expr, place: str) -> Registration[Any]:
    if kind not in DECORATORS:
        raise ValueError(f"{place}: there is no @extend.{kind}; {near_names(kind, DECORATORS, 1)}")
    if not isinstance(decorator, ast.Call):
        raise ValueError(f"{place}: @extend.{kind} needs its arguments, in parentheses")
    try:
        values = [ast.literal_eval(value) for value in decorator.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in decorator.keywords}
    except ValueError:
        raise ValueError(
            f"{place}: the arguments of @extend.{kind} must be written out (texts, numbers, True, False): they are "
            "read before the file is run"
        ) from None
    try:
        return DECORATORS[kind](*values, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: @extend.{kind}: {error}") from None


def _check_definition(node: Definition, registration: Registration[Any], place: str) -> None:
    if isinstance(registration, ClassRegistration):
        if not isinstance(node, ast.ClassDef):
            raise ValueError(f"{place}: @extend.{registration.kind} stands above a class, not {node.name}")
        return
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"{place}: @extend.{registration.kind} stands above a function (def), not {node.name}")
    spec, wanted = node.args, registration.arguments
    most = len(spec.posonlyargs) + len(spec.args)
    least = most - len(spec.defaults)
    needs_names = any(default is None for default in spec.kw_defaults)
    if not least <= wanted <= (wanted if spec.vararg else most) or needs_names:
        raise ValueError(
            f"{place}: a {registration.kind} takes {wanted} argument{'s' * (wanted > 1)}, and {node.name} takes "
            f"({ast.unparse(spec)})"
        )


ENTRY_POINTS = "argosy.extensions"


def read_package(name: str) -> CodeFile:
    """Read what the module of the entry point `name` declares; it is found, and not run (its parent packages are).

    Raises: ValueError if there is no such entry point, or its module cannot be found or read.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        hint = near_names(name, sorted(found), 1) if found else "no installed package has any"
        raise ValueError(f"{name}: there is no such entry point in the group {ENTRY_POINTS}; {hint}")
    return read_code(_source_of(found[name]), name, found[name].module)


def _source_of(point: EntryPoint) -> Path:
    try:
        spec = find_spec(point.module)
    except Exception as error:  # its parent packages are imported, and may fail in any way
        raise ValueError(f"the module {point.module} of {point.name} cannot be found ({error})") from None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"the module {point.module} of {point.name} has no file of Python source")
    return Path(spec.origin)
