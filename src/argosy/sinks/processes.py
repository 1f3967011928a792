"""The processes of a run's sinks, supervised: the follower, by an agent; and each sink, by the follower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from argosy.config.observe import SinksConfig
from argosy.config.schema import RunConfig
from argosy.credentials import redact
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.processes.channel import Message
from argosy.processes.child import Child
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor
from argosy.sinks.table import parts_of

FOLLOWER = "argosy.sinks.follower"
WORKER = "argosy.sinks.worker"
SINK_RESTARTS = RestartPolicy(most_failures=5, pause_s=60.0, growth=2.0, progress_s=600.0)
"""Each sink is tried again after 60, 120, ... s, and not after five failures of which each came in 10 minutes."""
SPARE_S = 5.0
"""Time that it may take to end, beside that of its sinks."""


def follower_of(folder: Path, run: RunConfig, events: Events) -> Supervisor | None:
    """Return the supervisor of the run's follower; None for a run without sinks.

    events: those of the process that starts it.
    """

    def ended(end: ChildEnd) -> None:
        is_again = end.again_s is not None
        events.write("follower_died", why=end.why, again=is_again)
        then = "it is started again" if is_again else "the run has no sinks any more"
        print_message(f"argosy: the process that holds the run's sinks died: {end.why}; {then}, and training goes on")

    if not parts_of(run):
        return None
    policy = RestartPolicy(most_failures=5, finish_s=run.observe.sink.flush_s + SPARE_S)
    return Supervisor(policy, lambda: Child(FOLLOWER, str(folder)), ended, is_wanted=False)


class SupervisedSink:
    """The process of one sink, as the follower sees it. Nothing here waits for it."""

    def __init__(
        self, folder: Path, name: str, limits: SinksConfig, events: Events, policy: RestartPolicy = SINK_RESTARTS
    ):
        self.name = name
        self._folder, self._limits, self._events = folder, limits, events
        policy = replace(policy, silent_s=limits.timeout_s, finish_s=limits.flush_s)
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
