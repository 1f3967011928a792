"""What a member of a world ended with is raised in the process that started it."""

from __future__ import annotations

import signal

import pytest

from argosy.errors import Interrupted, RunFailed, UserError
from argosy.launch.local_world import MemberFailure, interrupted_by_signals
from argosy.parallel.encoding import ErrorRecord


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (MemberFailure(2, "exit code 3", 0.0), RunFailed, "process 2 of the probe ended: exit code 3."),
        (MemberFailure(0, "", 0.0, record=ErrorRecord.of(UserError("set it"))), UserError, "set it"),
        (
            MemberFailure(1, "", 0.0, record=ErrorRecord.of(ZeroDivisionError("by nothing"))),
            RunFailed,
            "process 1 of the probe ended: ZeroDivisionError: by nothing.",
        ),
    ],
)
def test_an_error_of_argosy_is_raised_as_it_is_and_others_are_told(
    failure: MemberFailure, kind: type[Exception], text: str
) -> None:
    error = failure.error("the probe")
    assert type(error) is kind
    assert str(error).startswith(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_interrupt_the_block_alone(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped by {number.name}"), interrupted_by_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before
