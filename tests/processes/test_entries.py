"""Modules and functions that processes are started with are named in strings, which no import checks: this does."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import argosy
from argosy.processes.child import ForkEntry

PACKAGE = Path(argosy.__file__).parent


USES_PROCESSES = ("argosy.processes.child", "argosy.engines.engine")


@cache
def modules_that_use_processes() -> list[tuple[dict[str, str], list[ast.Call]]]:
    """Of each such module of the package its constant strings by name, and its calls."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in USES_PROCESSES):
            continue  # parsing all would take ten times as long
        known = {"__name__": ".".join(("argosy", *path.relative_to(PACKAGE).with_suffix("").parts))}
        calls, imports = [], set()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(str(value))):
                    known[name] = value
                case ast.ImportFrom(module=str(module)):
                    imports.add(module)
                case ast.Call():
                    calls.append(node)
        if imports.intersection(USES_PROCESSES):
            modules.append((known, calls))
    return modules


def named(callee: str) -> Iterator[list[str]]:
    """Arguments of the calls of `callee` in all modules that use processes; a constant stands for its string."""
    for known, calls in modules_that_use_processes():
        for call in calls:
            match call:
                case (
                    ast.Call(func=ast.Name("partial"), args=[ast.Name(name), *words], keywords=keywords)
                    | ast.Call(func=ast.Name(name), args=words, keywords=keywords)
                ) if name == callee:
                    words = words + [keyword.value for keyword in keywords if keyword.arg == "module"]
                    if texts := [text for word in words if (text := _text(word, known)) is not None]:
                        yield texts


def _text(word: ast.expr, known: dict[str, str]) -> str | None:
    match word:
        case ast.Constant(str(value)):
            return value
        case ast.Name(name) if name in known:
            return known[name]
        case ast.Name(name):  # another module's constant
            value = getattr(importlib.import_module(known["__name__"]), name, None)
            return value if isinstance(value, str) else None
    return None


# Not parameters: each of the processes that run tests would look for them when it collects these.
def test_every_entry_of_a_forked_process_is_a_function_without_arguments():
    entries = [ForkEntry(*words) for words in named("ForkEntry")]
    for entry in entries:
        assert not inspect.signature(entry.resolve()).parameters, entry
    assert {entry.module.removeprefix("argosy.") for entry in entries} == {
        "supervise.worker", "parallel.world", "resilience.node_check", "probe.probe", "parallel.apply",
        "inference.members", "compiler",
    }  # fmt: skip


def test_every_module_that_is_started_has_a_main():
    children = {words[0] for callee in ("Child", "ProgramJob") for words in named(callee)}
    assert importlib.util.find_spec("argosy.__main__") is not None
    for module in children - {"argosy"}:  # which is the command itself
        found = importlib.import_module(module)
        assert not inspect.signature(found.main).parameters, module
        assert 'if __name__ == "__main__":\n    main()' in inspect.getsource(found), module
    assert {module.removeprefix("argosy.") for module in children} == {
        "processes.fork_server", "checkpoint.writer", "data.worker", "supervise.coordinator",
        "resilience.replanner", "sinks.follower", "sinks.worker", "sync.process",
        "training.server.main", "argosy",
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [ForkEntry("argosy.parallel.worlt"), ForkEntry("argosy.parallel.world", "mian")], ids=str
)
def test_a_misspelt_entry_is_an_error(wrong):
    with pytest.raises((ImportError, AttributeError)):
        wrong.resolve()
