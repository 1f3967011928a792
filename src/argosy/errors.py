"""What goes wrong, told apart by who can mend it; the exit code of `argosy` follows from the class."""

from __future__ import annotations


class ArgosyError(Exception):
    """Base of every error that Argosy raises on purpose: its text is a sentence that ends in what to do."""

    exit_code = 1


class UserError(ArgosyError):
    """The user's input is wrong: nothing was written, and the text names file, key, value and remedy."""

    exit_code = 2


class RunFailed(ArgosyError):
    """The run started and could not go on (a worker kept crashing, the disk is full, ...)."""

    exit_code = 1


class Interrupted(ArgosyError):
    """A signal stopped the run after its state was saved; the exit code is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ArgosyWarning(UserWarning):
    """Something works, but not as well as it could; the text says what to change."""


FINAL = 64
"""A worker process adds this to the exit code of an error that a restart would only meet again."""


def missing_extra(package: str, extra: str, what_for: str) -> UserError:
    """The error for an optional package that is not installed, naming the extra that brings it."""
    return UserError(f"{what_for} needs the package `{package}`. Install it: pip install 'argosy[{extra}]'")
