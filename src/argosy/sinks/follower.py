"""The follower: the one process of a run that holds its sinks. Training never waits for it, and does not need it.

An agent supervises the follower (`follower_of`), and the follower the process of each sink (`SupervisedSink`).
"""

from __future__ import annotations

import fcntl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from argosy.config.load import load
from argosy.config.observe import SinksConfig
from argosy.config.schema import RunConfig
from argosy.credentials import redact
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.plan.cost.exact_state import DTYPE_BYTES
from argosy.plan.parameters import parameters
from argosy.processes.child import Child, Message, channel_to_parent, end_with_parent
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor, supervised
from argosy.sinks.table import file_name_of, parts_of
from argosy.sinks.worker import SINKS_FOLDER, has_all

FOLLOWER = "argosy.sinks.follower"
SINK_WORKER = "argosy.sinks.worker"
SINK_RESTARTS = RestartPolicy(most_failures=5, pause_s=60.0, growth=2.0, progress_s=600.0)
"""Each sink is tried again after 60, 120, ... s, and not after five failures of which each came in 10 minutes."""
FOLLOWER_SPARE_S = 5.0
"""Time that it may take to end, beside that of its sinks."""


def follower_of(folder: Path, run: RunConfig, events: Events) -> Supervisor | None:
    """Return the supervisor of the run's follower; None for a run without sinks, or if they know all of it.

    events: those of the process that starts it.
    """

    def ended(end: ChildEnd) -> None:
        is_again = end.again_s is not None
        events.write("follower_died", why=end.why, again=is_again)
        then = "it is started again" if is_again else "the run has no sinks any more"
        print_message(f"argosy: the process that holds the run's sinks died: {end.why}; {then}, and training goes on")

    if all(has_all(folder, name) for name in parts_of(run)):
        return None
    policy = RestartPolicy(most_failures=5, finish_s=run.observe.sink.flush_s + FOLLOWER_SPARE_S)
    return Supervisor(policy, lambda: Child(FOLLOWER, str(folder)), ended, is_wanted=False)


def tell_the_rest(folder: Path, run: RunConfig, events: Events) -> None:
    """Have the sinks of a finished run that are new, or were off at its end, told what they have not had."""
    if (follower := follower_of(folder, run, events)) is not None:
        with supervised(follower, "argosy-supervisor"):
            pass  # it is told to finish at once


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
        log = self._folder / "logs" / f"sink-{file_name_of(self.name)}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as out:  # of the last start only: a log must not grow with the tries
            arguments = (str(self._folder), self.name, str(self._limits.memory_bytes))
            return Child(SINK_WORKER, *arguments, stdout=out, stderr=out)

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
            then = "the same command again gives it the rest"
        else:
            again = "not tried again" if end.again_s is None else f"tried again in {end.again_s:.0f} s"
            then = f"it is {again}, and training goes on"
        if self._process.failures <= 1 or end.again_s is None:
            print_message(redact(f"argosy: the sink {self.name} is switched off: {why}; {then}"))


COPIES = 2
"""The model, and what is read of it at once."""
SINK_LOOK_S = 0.2
"""Time between two looks at the sinks."""
FOLLOWER_NAME = "follower"
"""Its name among those of the run's events."""


def follow(folder: Path, is_over: threading.Event) -> None:
    """Hold the sinks of the run in `folder`, until it is over and they have written the rest, or had time for it."""
    run, events = load(folder / "run.toml"), Events(folder, FOLLOWER_NAME)
    names = [name for name in parts_of(run) if not has_all(folder, name)]
    sinks = [SupervisedSink(folder, name, _limits_of(name, run), events) for name in names]
    with _alone(folder, is_over):
        while not is_over.wait(SINK_LOOK_S):
            for sink in sinks:
                sink.keep()
        for sink in sinks:
            sink.finish()
        while any(sink.is_running for sink in sinks):
            time.sleep(SINK_LOOK_S / 4)
            for sink in sinks:
                sink.keep()


def _limits_of(name: str, run: RunConfig) -> SinksConfig:
    """Return the limits of a sink's process; one that writes samples holds the model."""
    limits = run.observe.sink
    if name != "samples":
        return limits
    model_bytes = DTYPE_BYTES["fp32"] * parameters(run.model)
    return limits.model_copy(update={"memory_bytes": limits.memory_bytes + COPIES * model_bytes})


@contextmanager
def _alone(folder: Path, is_over: threading.Event) -> Iterator[None]:
    """Wait until no other follower has the run: one on a machine that was given up may not know yet that it was."""
    (folder / SINKS_FOLDER).mkdir(exist_ok=True)
    with (folder / SINKS_FOLDER / ".lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_over.wait(1.0):
                    break
        yield


def main() -> None:
    """Entry of the process; its argument is the run's folder."""
    is_over = threading.Event()
    end_with_parent(channel_to_parent(), is_over)  # its sinks notice, and end too
    follow(Path(sys.argv[1]), is_over)


if __name__ == "__main__":
    main()
