"""A worker of `prepare`: takes tasks from the folder that all machines see, one after the other, until all are done.

It ends with the caller: on the same machine at once, elsewhere when the caller has shown no life for SILENT_S.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from argosy.data.stages import Stages, stages_of
from argosy.data.work import PrepareTask, WorkFolder, WorkState
from argosy.errors import ArgosyError
from argosy.processes.child import CHANNEL, channel_to_parent, end_with_parent

WORKER = "ARGOSY_WORKER"
"""Environment variable with a worker's name. No two workers of a folder have the same, unless one is the other, started
again by the cluster."""
BEAT_S = 1.0
SILENT_S = 60.0
"""A caller or a worker whose heartbeat stands still for so long is taken for dead."""
POLL_S, MOST_POLL_S = 0.02, 0.5


class PrepareWorker:
    """One worker; `run` returns when there is no more to do."""

    def __init__(self, folder: WorkFolder, name: str):
        self._folder, self._name = folder, name
        self._text_bytes = 0
        self._stages: Stages | None = None
        self._caller = ""
        self._last = PrepareTask("", 0)
        self._from = 0
        """Tasks of the stage before this one are done or somebody's."""

    def run(self) -> str:
        """Work until all is done or the caller is gone, and return which of the two."""
        self._folder.release_all({self._name})  # those of this worker before it was started again
        threading.Thread(target=self._beat, name="argosy-beat", daemon=True).start()
        heard, heard_s, poll_s = -1, time.monotonic(), POLL_S
        while (state := self._folder.state()) is not None and not state.is_over:
            self._caller = self._caller or state.caller
            if state.caller != self._caller:
                return "another call goes on with the work"
            if state.beat != heard:
                heard, heard_s = state.beat, time.monotonic()
            elif time.monotonic() - heard_s > SILENT_S:
                return "the caller is gone"
            if (task := self._take(state)) is None:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, MOST_POLL_S)
                continue
            poll_s = POLL_S
            self._do(task, state)
            heard_s = time.monotonic()
        return "all is done"

    def _take(self, state: WorkState) -> PrepareTask | None:
        """Claim the first task that nobody has; None if there is none now."""
        if state.stage != self._last.stage:
            self._last, self._from = PrepareTask(state.stage, 0), 0
        first, end = state.task, min(state.task + state.ahead, state.tasks)
        for number in (*range(max(first, self._from), end), *range(first, min(self._from, end))):
            task = PrepareTask(state.stage, number)
            if self._next_chunk(task, state) and self._folder.claim(task, self._name):
                self._from = number + 1
                return task
        return None

    def _next_chunk(self, task: PrepareTask, state: WorkState) -> tuple[int, int] | None:
        """Return a task's first chunk that is missing, and where it begins; None if none is, or the task failed."""
        chunk, start = (state.chunk, state.start) if task.number == state.task else (0, 0)
        while end := self._folder.end(task, chunk):
            if end[1]:
                return None
            chunk, start = chunk + 1, end[0]
        return (chunk, start) if self._folder.failure(task) is None else None

    def _do(self, task: PrepareTask, state: WorkState) -> None:
        """Do what is left of a claimed task."""
        now = self._folder.state() or state  # another may have done it before it was claimed
        try:
            missing = self._next_chunk(task, now) if (now.stage, now.is_over) == (task.stage, False) else None
            if missing is None or task.number < now.task:
                return
            self._stages = self._stages or stages_of(self._folder, self._count)
            chunk, start = missing
            for made in self._stages.make(task, now.tasks, start):
                self._folder.write(task, chunk, made, self._name)
                chunk, self._text_bytes = chunk + 1, 0
        except ArgosyError as error:
            self._folder.fail(task, type(error).__name__, str(error), self._name)
        except OSError as error:  # errors of reading are UserErrors
            self._folder.fail(task, "OSError", str(error), self._name)
        except Exception as error:
            self._folder.fail(task, "Exception", f"{type(error).__name__}: {error}", self._name)
        finally:
            self._text_bytes = 0
            self._folder.release(task)

    def _count(self, text_bytes: int) -> None:
        self._text_bytes += text_bytes

    def _beat(self) -> None:
        count = 0
        while True:
            try:
                self._folder.beat(self._name, count, self._text_bytes)
            except FileNotFoundError:
                return  # all is done
            except OSError:  # a file system that is away for a while, or a full disk, which writing results will tell
                pass
            count += 1
            time.sleep(BEAT_S)


def main() -> None:
    """`python -m argosy.data.worker FOLDER`, which an engine starts."""
    if CHANNEL in os.environ:
        end_with_parent(channel_to_parent())
    name = os.environ.get(WORKER) or f"{socket.gethostname()}-{os.getpid()}"
    try:
        PrepareWorker(WorkFolder(Path(sys.argv[1])), name).run()
    except FileNotFoundError:  # the folder is gone: all is done
        pass
    except OSError:  # the failure could not be written either: the caller, who writes there too, says why
        sys.exit(os.EX_IOERR)


if __name__ == "__main__":
    main()
