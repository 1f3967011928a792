"""One sink, held from outside: its process is started, watched, ended when it hangs, started again within bounds."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from argosy.config.observe import SinksConfig
from argosy.credentials import redact
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.processes.channel import Gone, Message
from argosy.processes.child import Child

WORKER = "argosy.sinks.worker"
AGAIN_S = 60.0
"""A sink that failed is tried again after this, then after twice as long, ..."""
MOST_TRIES = 5
"""... until it has failed so often in a row: then it stays off."""
FINE_S = 600.0
"""A sink that has worked for so long starts with a new count of failures."""


class HeldSink:
    """Holds the process of one sink. Nothing here waits for it."""

    def __init__(self, folder: Path, name: str, limits: SinksConfig, events: Events, again_s: float = AGAIN_S):
        self.name = name
        self._folder, self._limits, self._events, self._again_s = folder, limits, events, again_s
        self._child: Child | None = None
        self._started_s = self._alive_s = 0.0
        self._tries = 0
        self._start_at_s: float | None = 0.0
        """When it is to be started; None while it runs, and once it stays off."""
        self._is_over = False

    @property
    def is_running(self) -> bool:
        """True while there is a process."""
        return self._child is not None

    def keep(self, now: float) -> None:
        """Start it if that is due, hear what it says, end it if it hangs. Call this a few times a second."""
        if self._child is not None:
            self._hear(now)
            if self._child is not None and now - self._alive_s > self._limits.timeout_s:
                self._fail(now, f"it has done nothing for {self._limits.timeout_s:g} s")
        elif self._start_at_s is not None and now >= self._start_at_s:
            self._start(now)

    def finish(self, now: float) -> None:
        """Have it write the rest and end. One that is off is started once more for that, if it may be."""
        if self._child is None and self._start_at_s is not None:
            self._start(now)
        self._is_over, self._start_at_s = True, None
        self._say_finish()

    def end(self, why: str) -> None:
        """End it now, if it runs."""
        if self._child is not None:
            self._child.kill()
            self._child = None
            self._say_off(why, None)

    def _start(self, now: float) -> None:
        log = self._folder / "logs" / f"sink-{self.name.replace(':', '.').replace('/', '.')}.log"
        self._start_at_s = None
        self._started_s = self._alive_s = now
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("wb") as out:  # of the last start only: a log must not grow with the tries
                arguments = (str(self._folder), self.name, str(self._limits.memory_bytes))
                self._child = Child(WORKER, *arguments, stdout=out, stderr=out)
        except OSError as problem:
            self._fail(now, str(problem))

    def _say_finish(self) -> None:
        if self._child is not None:
            with suppress(Gone):  # `keep` finds out how it ended
                self._child.channel.send("finish")

    def _hear(self, now: float) -> None:
        assert self._child is not None
        try:
            for message in self._child.channel.take():
                self._note(message, now)
        except Gone:
            if self._child is not None:
                self._fail(now, f"its process ended: {self._child.reap()}")

    def _note(self, message: Message, now: float) -> None:
        assert self._child is not None
        self._alive_s = now
        match message["kind"]:
            case "started":
                self._events.write("sink_started", sink=self.name, pid=self._child.pid, state=message["state"])
            case "failed":
                self._fail(now, message["why"])
            case "done":
                self._child.kill()
                self._child = None

    def _fail(self, now: float, why: str) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
        self._tries = 1 if now - self._started_s > FINE_S else self._tries + 1
        again_s = self._again_s * 2 ** (self._tries - 1)
        if self._is_over or self._tries >= MOST_TRIES:
            self._say_off(why, None)
            return
        self._start_at_s = now + again_s
        self._say_off(why, again_s)

    def _say_off(self, why: str, again_s: float | None) -> None:
        self._events.write("sink_off", sink=self.name, why=redact(why), again_s=again_s)
        if self._is_over:
            then = "it gets the rest when the run goes on"
        else:
            again = "not tried again" if again_s is None else f"tried again in {again_s:.0f} s"
            then = f"it is {again}, and training goes on"
        if self._tries <= 1 or again_s is None:
            print_message(redact(f"argosy: the sink {self.name} is switched off: {why}; {then}"))
