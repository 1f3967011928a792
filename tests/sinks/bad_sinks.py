"""Sinks that do what a sink must not."""

from __future__ import annotations

import time
from collections.abc import Sequence

from argosy.sinks.sink import About, Record, Sink


class Good(Sink):
    """Notes each step that it is told, and how it was closed."""

    def __init__(self, about: About):
        super().__init__(about)
        (about.folder / "good.txt").open("a").write("start\n")

    def steps(self, records: Sequence[Record]) -> None:
        self._note(" ".join(str(record["step"]) for record in records))
        self.state["told"] = self.state.get("told", 0) + len(records)

    def rewind(self, step: int) -> None:
        self._note(f"rewind {step}")

    def close(self, report: Record | None) -> None:
        self._note("close")

    def _note(self, text: str) -> None:
        with (self.about.folder / "good.txt").open("a") as file:
            file.write(f"{text}\n")


class RaisesAtStart(Sink):
    def __init__(self, about: About):
        raise RuntimeError("no server at http://user:secret@example.org")


class RaisesAtWrite(Sink):
    def steps(self, records: Sequence[Record]) -> None:
        raise ValueError("cannot write")


class RaisesAtClose(Sink):
    def close(self, report: Record | None) -> None:
        raise ValueError("cannot close")


class Hangs(Sink):
    def steps(self, records: Sequence[Record]) -> None:
        time.sleep(3600)


class HangsAtClose(Sink):
    def close(self, report: Record | None) -> None:
        time.sleep(3600)


class Floods(Sink):
    def steps(self, records: Sequence[Record]) -> None:
        held = []
        while True:
            held.append(bytes(2**24))


class Exits(Sink):
    def steps(self, records: Sequence[Record]) -> None:
        import os

        os._exit(7)
