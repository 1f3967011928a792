"""What is waited for is shown, and said once if it lasts."""

from __future__ import annotations

import pytest

from argosy.training import agreement as module
from argosy.training.agreement import Waiting


class Told:
    def __init__(self) -> None:
        self.shown: list[str] = []
        self.said: list[str] = []

    def doing(self, what: str) -> None:
        self.shown.append(what)

    def say(self, text: str, style: str = "") -> None:
        self.said.append(text)


def test_a_long_wait_is_shown_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    told = Told()
    waiting = Waiting(told)  # type: ignore[arg-type]
    waiting.is_for("no answer from server-1")
    assert told.shown == []
    for now_s[0] in (102.0, 110.0, 116.0, 130.0):
        waiting.is_for("no answer from server-1")
    waiting.ends()
    assert told.shown == ["no answer from server-1", ""]
    assert told.said == [" waiting: no answer from server-1"]


def test_a_short_wait_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    waiting = Waiting(told)  # type: ignore[arg-type]
    waiting.is_for("no answer from server-1")
    waiting.ends()
    assert told.shown == told.said == []
