"""Errors, one class for each remedy; the exit code of `argosy` follows from the class."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from argosy.credentials import redact

if TYPE_CHECKING:
    from pydantic import ValidationError


def counted(count: int, what: str, plural: str = "s", form: str = "") -> str:
    """Return "1 file", or "3 files"; with the form "," also "1,000 files"."""
    return f"{count:{form}} {what}{'' if count == 1 else plural}"


def a_kind(value: object) -> str:
    """Return the kind of a value as JSON and Python have it, with its article: "an int", "a list", "null"."""
    name = type(value).__name__
    return "null" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def encodable(text: str) -> str:
    """Return text that can be encoded: a lone surrogate, as a file's name may have, becomes a question mark."""
    return text.encode(errors="replace").decode()


def some_of(names: Sequence[object], most: int, others: str = "more") -> str:
    """Return the first of these, at most so many, and how many others there are: "a, b and 3 more"."""
    left = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {left} {others}" if left > 0 else "")


def near_names(name: str, names: Collection[str], most: int = 3) -> str:
    """Return the second half of a message about an unknown name: the nearest names, or all if none is near."""
    from difflib import get_close_matches  # few commands meet a wrong name

    names = sorted(names) if isinstance(names, set | frozenset) else names  # whose order differs from run to run
    near = get_close_matches(name.lower(), names, n=most)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}."


class ArgosyError(Exception):
    """Base of every error that Argosy raises on purpose: its text is a sentence that ends with what to do."""

    exit_code = 1

    def __init__(self, message: str = ""):
        super().__init__(redact(message))  # it may quote a library, and that the URL it was given


class UserError(ArgosyError):
    """The user's input is wrong: nothing was written, and the text names file, key, value and remedy."""

    exit_code = 2


class RunFailed(ArgosyError):
    """The run started and could not go on; the same command would fail again."""

    exit_code = 1


class DataError(ArgosyError):
    """The prepared data are damaged: a shard is cut off, was changed, or belongs to another tokenizer."""

    exit_code = 65  # EX_DATAERR of sysexits.h, as the others


class UnfitNode(ArgosyError):
    """A node health check found that this machine computes wrong results; the run goes on elsewhere, if it can."""

    exit_code = 69  # EX_UNAVAILABLE


class Poisoned(ArgosyError):
    """The same crash came twice at the same step: a restart does not help, and no machine is at fault."""

    exit_code = 70  # EX_SOFTWARE


class StorageError(ArgosyError):
    """The state could not be saved, or no checkpoint can be read: the disk is full, gone or failing."""

    exit_code = 74  # EX_IOERR


class Retryable(ArgosyError):
    """The run lost processes or machines too often; its checkpoints are whole: try again later."""

    exit_code = 75  # EX_TEMPFAIL


class Interrupted(ArgosyError):
    """A signal stopped the run after its state was saved; the exit code is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ArgosyWarning(UserWarning):
    """Something works, but not as well as it could; the text says what to change."""

    def __init__(self, message: str):
        super().__init__(redact(message))


PLACE = re.compile(
    r"(?P<file>(?!-)([^\s:]*[/.][^\s:]*|[^\s:]+(?=: (no such|not a |neither |a file))))(:(?P<line>\d+)(:\d+)?)?: "
)
SETTING = re.compile(r"(?P<key>(--)?[A-Za-z][\w.-]*) = (?P<value>\"[^\"]*\"|'[^']*'|[^\s,;:]*[^\s,;:.])")
OPTION_IN_MESSAGE = re.compile(r"(?P<key>--[A-Za-z][\w.-]*)(?:(?: (?P<value>[^\s:]+))?:)? ")
"""An option at the beginning of a message, with or without its value."""
REMEDY_IN_MESSAGE = re.compile(r"(?:[.:!?] (?=[A-Z`])|; (?=did you mean|there are:))")


@dataclass(frozen=True)
class ErrorDocument:
    """An error as a program reads it: its text, and what of file, line, key and value the text names."""

    error: str
    """The whole message."""
    exit_code: int
    file: str | None = None
    line: int | None = None
    key: str | None = None
    """A key of the file, or an option."""
    value: str | None = None
    remedy: str | None = None
    """The thing to do: the message from its second sentence on, or what is near to a wrong name."""


def record_of_error(error: ArgosyError) -> ErrorDocument:
    text = str(error)
    place, end = PLACE.match(text), REMEDY_IN_MESSAGE.search(text)
    first_line, _, _ = text.partition("\n")  # what follows quotes a file
    setting = SETTING.search(first_line) or OPTION_IN_MESSAGE.match(text)
    return ErrorDocument(
        error=text,
        exit_code=error.exit_code,
        file=place["file"] if place else None,
        line=int(place["line"]) if place and place["line"] else None,
        key=setting["key"] if setting else None,
        value=setting["value"] if setting else None,
        remedy=text[end.end() :] if end else None,
    )


FINAL_BIT = 64
"""A worker process adds this to the exit code of an error that a restart would only meet again."""


def error_of(exit_code: int, text: str) -> ArgosyError:
    """Return the error of another process that ended with this exit code; RunFailed if no class has it."""
    kinds: tuple[type[ArgosyError], ...] = (UserError, DataError, UnfitNode, Poisoned, StorageError, Retryable)
    return next((kind for kind in kinds if kind.exit_code == exit_code), RunFailed)(text)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run with its state saved; its exit code is 128 and the number. SLURM is often asked for
USR1 before the time of a job is over; HUP comes when the terminal is closed, or the connection to it lost."""


def heeded(numbers: Iterable[int]) -> list[int]:
    """Return these signals, but for a SIGHUP that is ignored: `nohup` has a program go on without its terminal."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Have these signals, as far as they are `heeded`, call `handler` in this block (main thread only); their handlers
    are those of before then.
    """
    before = {number: signal.signal(number, handler) for number in heeded(numbers)}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


EXIT_CODES = {
    0: "done",
    1: "failed: the message says why; the same command would fail again",
    UserError.exit_code: "wrong input: nothing was written",
    DataError.exit_code: 'damaged data: restore the shard, or set data.on_bad_shard = "skip"',
    UnfitNode.exit_code: "this machine computes wrong results: take it out of service",
    Poisoned.exit_code: "the same crash at the same step, twice",
    StorageError.exit_code: "the disk: the state could not be saved, or no checkpoint can be read",
    Retryable.exit_code: "processes or machines were lost: the same command goes on",
    129: "stopped as its terminal was closed (SIGHUP), with the state saved: the same command goes on",
    130: "stopped by Ctrl-C, with the state saved: the same command goes on",
    138: "stopped by SIGUSR1, with the state saved: the same command goes on",
    143: "stopped by SIGTERM, with the state saved: the same command goes on",
}
"""The exit codes of `argosy`, for scripts."""


def first_error(problem: ValidationError) -> str:
    """Return the first thing that is wrong with a record, in a line: its key, if it has one, and what pydantic says."""
    first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(str(part)[:60] for part in first["loc"])
    return f"{key}: {first['msg'][:200]}" if key else first["msg"][:200]


def missing_extra(package: str, extra: str, what_for: str) -> UserError:
    """Return the error for an optional package that is not installed; it names the extra that installs it."""
    return UserError(f"{what_for} needs the package `{package}`. Install it: pip install 'argosy[{extra}]'")


def imported(module: str, extra: str, what_for: str) -> Any:
    """Return a module of an optional package. Raises: UserError, as of `missing_extra`."""
    try:
        return import_module(module)
    except ImportError:
        raise missing_extra(module.partition(".")[0], extra, what_for) from None
