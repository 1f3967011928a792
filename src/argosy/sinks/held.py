"""One sink, supervised: its process is started, ended when it hangs, and started again within bounds."""

from __future__ import annotations

from pathlib import Path

from argosy.config.observe import SinksConfig
from argosy.credentials import redact
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.processes.channel import Message
from argosy.processes.child import Child
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor

WORKER = "argosy.sinks.worker"
MOST_FAILURES, PAUSE_S, GROWTH, PROGRESS_S = 5, 60.0, 2.0, 600.0
"""The policy of restarts: after 60, 120, ... seconds, and none after five failures of which each came in 10 minutes."""


class SupervisedSink:
    """The process of one sink, as the follower sees it. Nothing here waits for it."""

    def __init__(self, folder: Path, name: str, limits: SinksConfig, events: Events, pause_s: float = PAUSE_S):
        self.name = name
        self._folder, self._limits, self._events = folder, limits, events
        policy = RestartPolicy(
            MOST_FAILURES, pause_s, GROWTH, PROGRESS_S, silent_s=limits.timeout_s, finish_s=limits.flush_s
        )
        self._process = Supervisor(policy, self._start, self._ended, self._hear)
        self.keep = self._process.keep
        self._is_over = False

    @property
    def is_running(self) -> bool:
        """True while there is a process."""
        return self._process.is_running

    def finish(self) -> None:
        """Have it write the rest and end. One that is off is started once more for that, if it may be."""
        self._is_over = True
        if not self._process.is_running and not self._process.is_given_up:
            self._process.start()
        self._process.tell_to_finish()

    def _start(self) -> Child:
        log = self._folder / "logs" / f"sink-{self.name.replace(':', '.').replace('/', '.')}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as out:  # of the last start only: a log must not grow with the tries
            arguments = (str(self._folder), self.name, str(self._limits.memory_bytes))
            return Child(WORKER, *arguments, stdout=out, stderr=out)

    def _hear(self, message: Message) -> None:
        match message["kind"]:
            case "started":
                self._events.write("sink_started", sink=self.name, pid=self._process.pid, state=message["state"])
            case "failed":
                self._process.fail(message["why"])

    def _ended(self, end: ChildEnd) -> None:
        why = end.why if end.was_killed else f"its process ended: {end.why}"
        self._events.write("sink_off", sink=self.name, why=redact(why), again_s=end.again_s)
        if self._is_over:
            then = "it gets the rest when the run goes on"
        else:
            again = "not tried again" if end.again_s is None else f"tried again in {end.again_s:.0f} s"
            then = f"it is {again}, and training goes on"
        if self._process.failures <= 1 or end.again_s is None:
            print_message(redact(f"argosy: the sink {self.name} is switched off: {why}; {then}"))
