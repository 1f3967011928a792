"""The folder through which a `prepare` and its workers share work, on one machine or many.

    OUT/.prepare/
      job.json, input.json      what is to be made: options, and the input's files and pieces
      state.json                what the caller wants now: the stage, and the first chunk that it waits for
      results/STAGE-TASK-CHUNK  what a worker has made of a part of a task; whole, with a checksum, or not there
      results/STAGE-TASK.claim  who is at it: a hint, so that no two do the same
      results/STAGE-TASK.failed why it cannot be done
      workers/NAME              a worker's heartbeat, and how far it is in its task
      logs/                     what workers print

A task is one piece of the input in most stages. Its results are cut into chunks of bounded size. They depend on the job
and the task alone, so it does no harm if two workers do the same task: the second replaces a file by the same bytes. No
lock is needed, only exclusive creation and renames, which network file systems have.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from argosy.files import write_unsynced

WORK_FOLDER = ".prepare"
RESULTS, WORKERS, LOGS, JOB, INPUT, STATE = "results", "workers", "logs", "job.json", "input.json", "state.json"

Arrays = Mapping[str, npt.NDArray[Any]]


class PrepareTask(NamedTuple):
    """One unit of work that a worker takes."""

    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage}-{self.number:07d}"


@dataclass(frozen=True)
class Chunk:
    """A part of what a task gives."""

    facts: dict[str, Any]
    """Counts and the like, for JSON."""
    arrays: Arrays
    end: int
    """Texts of the task's piece that were read up to here."""
    is_last: bool


@dataclass(frozen=True)
class WorkState:
    """The caller's wish: a stage, and its first task without results."""

    caller: str
    """Another for each call of `prepare`."""
    beat: int = 0
    """Grows while the caller lives."""
    stage: str = ""
    tasks: int = 0
    """Number of tasks of the stage."""
    task: int = 0
    chunk: int = 0
    start: int = 0
    """The first chunk that the caller has not got yet: its task, its number, and where in the piece it begins."""
    ahead: int = 0
    """Tasks from `task` on that may be done now."""
    is_over: bool = False


class DamagedResult(Exception):
    """A result does not match its checksum: the machine lost power, or the disk is failing."""


class WorkFolder:
    """The folder; see above."""

    def __init__(self, path: Path):
        self.path = path

    def make(self, job: Mapping[str, Any], files: Sequence[Any], pieces: Sequence[Any]) -> None:
        """Make the folder, or go on with one of the same job; what is left of workers that are gone is removed."""
        if self.path.exists() and self._fingerprint() != job["fingerprint"]:
            self.remove()
        for name in (RESULTS, WORKERS, LOGS):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for left in (*self._results("*.claim"), *self._results("*.failed"), *self._results("*.new")):
            left.unlink(missing_ok=True)
        for left in (self.path / WORKERS).iterdir():
            left.unlink(missing_ok=True)
        write_unsynced(self.path / INPUT, json.dumps([files, pieces]).encode())
        write_unsynced(self.path / JOB, json.dumps(job).encode())

    def job(self) -> dict[str, Any]:
        return dict(json.loads((self.path / JOB).read_bytes()))

    def input(self) -> tuple[list[Any], list[Any]]:
        """Return the input's files and pieces, as they were given to `make`."""
        files, pieces = json.loads((self.path / INPUT).read_bytes())
        return files, pieces

    def remove(self) -> None:
        """Remove all of it. A worker that still writes does not matter: it ends then."""
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                Path(folder, name).unlink(missing_ok=True)
            with suppress(OSError):
                Path(folder).rmdir()

    def _fingerprint(self) -> str | None:
        try:
            return str(self.job()["fingerprint"])
        except (OSError, ValueError, KeyError):
            return None

    # ---- state and heartbeats -----------------------------------------------------------------------------------

    def say(self, state: WorkState) -> None:
        write_unsynced(self.path / STATE, json.dumps(asdict(state)).encode())

    def state(self) -> WorkState | None:
        """Return what the caller wants; None if the folder is gone."""
        try:
            return WorkState(**json.loads((self.path / STATE).read_bytes()))
        except (OSError, ValueError):
            return None

    def beat(self, worker: str, count: int, text_bytes: int) -> None:
        """Write a worker's heartbeat. text_bytes: text of its task that it has worked at."""
        write_unsynced(self.path / WORKERS / worker, json.dumps([count, text_bytes]).encode())

    def beats(self) -> dict[str, tuple[int, int]]:
        """Return the heartbeat of each worker, and the text of the task that it is at."""
        found = {}
        for path in (self.path / WORKERS).iterdir():
            with suppress(OSError, ValueError):
                count, text_bytes = json.loads(path.read_bytes())
                found[path.name] = (count, text_bytes)
        return {name: beat for name, beat in found.items() if not name.endswith(".new")}

    # ---- claims -------------------------------------------------------------------------------------------------

    def claim(self, task: PrepareTask, worker: str) -> bool:
        """Take a task. Return False if another has it."""
        try:
            with (self.path / RESULTS / f"{task}.claim").open("x") as file:
                file.write(worker)
        except FileExistsError:
            return False
        return True

    def release(self, task: PrepareTask) -> None:
        """Give a task back, or say that it is done."""
        (self.path / RESULTS / f"{task}.claim").unlink(missing_ok=True)

    def release_all(self, workers: set[str]) -> None:
        """Give back what these workers have claimed, which are gone; and what has no name, of one that was killed
        before it could write its own."""
        for path in self._results("*.claim"):
            with suppress(OSError):
                if path.read_text() in {"", *workers}:
                    path.unlink(missing_ok=True)

    # ---- results ------------------------------------------------------------------------------------------------

    def write(self, task: PrepareTask, number: int, chunk: Chunk, worker: str) -> None:
        """Write a chunk of a task's results. Raises: OSError."""
        body = [array.tobytes() for array in chunk.arrays.values()]
        check = 0
        for data in body:
            check = zlib.crc32(data, check)
        head = {
            "facts": chunk.facts,
            "end": chunk.end,
            "is_last": chunk.is_last,
            "crc32": check,
            "arrays": [[name, array.dtype.str, array.size] for name, array in chunk.arrays.items()],
        }
        parts = (json.dumps(head).encode() + b"\n", *body)
        write_unsynced(self._chunk(task, number), *parts, by=worker)

    def end(self, task: PrepareTask, number: int) -> tuple[int, bool] | None:
        """Return where a chunk ends in its piece, and whether it is the last; None if it is not there."""
        try:
            with self._chunk(task, number).open("rb") as file:
                head = json.loads(file.readline())
            return int(head["end"]), bool(head["is_last"])
        except (OSError, ValueError, KeyError):
            return None

    def read(self, task: PrepareTask, number: int) -> Chunk:
        """Read a chunk. Raises: DamagedResult; OSError."""
        data = self._chunk(task, number).read_bytes()
        try:
            head, end, _ = data.partition(b"\n")
            length = len(head) + len(end)
            chunk = _parsed(head, memoryview(data)[length:])
            if zlib.crc32(memoryview(data)[length:]) != json.loads(head)["crc32"]:
                raise DamagedResult
            return chunk
        except (ValueError, KeyError):
            raise DamagedResult from None

    def mapped(self, task: PrepareTask, number: int) -> Chunk:
        """Return a chunk that the caller has checked, without reading all of it. Raises: OSError."""
        path = self._chunk(task, number)
        with path.open("rb") as file:
            head = file.readline()
        return _parsed(head, np.memmap(path, np.uint8, "r").data[len(head) :])

    def mapped_all(self, task: PrepareTask) -> Iterator[Chunk]:
        """Yield all chunks of a task, as `mapped`."""
        number, is_last = 0, False
        while not is_last:
            chunk = self.mapped(task, number)
            yield chunk
            number, is_last = number + 1, chunk.is_last

    def drop(self, task: PrepareTask, number: int) -> None:
        self._chunk(task, number).unlink(missing_ok=True)

    def fail(self, task: PrepareTask, kind: str, why: str, worker: str) -> None:
        """Write why a task cannot be done. kind: the error's class."""
        write_unsynced(self.path / RESULTS / f"{task}.failed", json.dumps([kind, why]).encode(), by=worker)

    def failure(self, task: PrepareTask) -> tuple[str, str] | None:
        """Return why a task cannot be done: the error's class and text; None if it has not failed."""
        try:
            kind, why = json.loads((self.path / RESULTS / f"{task}.failed").read_bytes())
        except FileNotFoundError:
            return None
        return kind, why

    def _chunk(self, task: PrepareTask, number: int) -> Path:
        return self.path / RESULTS / f"{task}-{number:05d}"

    def _results(self, pattern: str) -> Iterator[Path]:
        return (self.path / RESULTS).glob(pattern)


def _parsed(head: bytes, body: memoryview) -> Chunk:
    """Return a chunk from the first line of its file and what follows."""
    facts, arrays = json.loads(head), {}
    for name, dtype, size in facts["arrays"]:
        array = np.frombuffer(body, np.dtype(dtype), size) if size else np.empty(0, dtype)
        arrays[name], body = array, body[array.nbytes :]
    return Chunk(facts["facts"], arrays, facts["end"], facts["is_last"])
