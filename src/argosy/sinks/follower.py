"""The follower: the one process of a run that holds its sinks. Training never waits for it, and does not need it."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.config.load import load
from argosy.config.observe import SinksConfig
from argosy.config.schema import RunConfig
from argosy.observe.events import Events
from argosy.plan.workload import parameters
from argosy.processes.channel import Channel
from argosy.processes.child import channel_to_parent, messages
from argosy.sinks.processes import SupervisedSink
from argosy.sinks.table import parts_of
from argosy.sinks.worker import FOLDER

FP32_BYTES = 4
COPIES = 2
"""The model, and what is read of it at once."""
SINK_LOOK_S = 0.2
"""Time between two looks at the sinks."""
PROCESS = "follower"
"""Its name among those of the run's events."""


def follow(folder: Path, is_over: threading.Event) -> None:
    """Hold the sinks of the run in `folder`, until it is over and they have written the rest, or had time for it."""
    run, events = load(folder / "run.toml"), Events(folder, PROCESS)
    sinks = [SupervisedSink(folder, name, _limits_of(name, run), events) for name in parts_of(run)]
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
    """Return what a sink may take: who writes samples holds the model."""
    limits = run.observe.sink
    if name != "samples":
        return limits
    model_bytes = FP32_BYTES * parameters(run.model)
    return limits.model_copy(update={"memory_bytes": limits.memory_bytes + COPIES * model_bytes})


@contextmanager
def _alone(folder: Path, is_over: threading.Event) -> Iterator[None]:
    """Wait until no other follower has the run: one on a machine that was given up may not know yet that it was."""
    (folder / FOLDER).mkdir(exist_ok=True)
    with (folder / FOLDER / ".lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_over.wait(1.0):
                    break
        yield


def _listen(channel: Channel, is_over: threading.Event) -> None:
    for message in messages(channel):
        if message["kind"] == "finish":
            is_over.set()
    os._exit(1)  # its sinks notice, and end too


def main() -> None:
    """Entry of the process; its argument is the run's folder."""
    channel, is_over = channel_to_parent(), threading.Event()
    threading.Thread(target=_listen, args=(channel, is_over), name="argosy-parent", daemon=True).start()
    follow(Path(sys.argv[1]), is_over)


if __name__ == "__main__":
    main()
