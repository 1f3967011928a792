"""Processes that tokenize while the main process reads and writes. Results come back in the order of the texts.

They are started as new processes. A fork of a process with threads may hang, and multiprocessing would import the
caller's __main__, and torch with it, in each. A worker lives as long as its standard input is open, so none outlives
the main process, however that one ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np

from argosy.data.engine import EncodedBatch, Encoder, EngineName
from argosy.errors import RunFailed

AHEAD = 3
"""Batches queued for a worker: the one that it encodes, and enough to wait for longer ones of other workers."""

Tag = TypeVar("Tag")


class Workers:
    """A number of tokenizer processes; a context manager, which ends them."""

    def __init__(self, processes: int, tokenizer: Path, engine: EngineName, dtype: np.dtype[Any], fraction: float):
        arguments = pickle.dumps((tokenizer, engine, dtype, fraction))
        self._processes = [_start() for _ in range(processes)]
        for process in self._processes:
            _send(process, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # data still buffered for a worker that has ended
                process.__exit__(None, None, None)

    def encode(self, batches: Iterable[tuple[Tag, Sequence[str]]]) -> Iterator[tuple[Tag, EncodedBatch]]:
        """Encode the batches, which are taken from the iterator ahead, and yield them with their tags, in order.

        Raises: RunFailed if a worker dies or fails.
        """
        waiting: deque[tuple[Tag, subprocess.Popen[bytes]]] = deque()
        for number, (tag, texts) in enumerate(batches):
            process = self._processes[number % len(self._processes)]
            _send(process, pickle.dumps(list(texts), protocol=5))
            waiting.append((tag, process))
            if len(waiting) >= AHEAD * len(self._processes):
                yield _receive(*waiting.popleft())
        while waiting:
            yield _receive(*waiting.popleft())


def _start() -> subprocess.Popen[bytes]:
    own_threads = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = (
        os.environ | own_threads | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    )
    command = [sys.executable, "-P", "-c", "from argosy.data.workers import serve; serve()"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # ctrl-C is for the main process, which ends the workers
    )


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(message)
        process.stdin.flush()
    except BrokenPipeError:
        raise _died(process) from None


def _receive(tag: Tag, process: subprocess.Popen[bytes]) -> tuple[Tag, EncodedBatch]:
    assert process.stdout is not None
    try:
        answer = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _died(process) from None
    if isinstance(answer, str):
        raise RunFailed(f"a tokenizer process failed: {answer}. Try engine = huggingface, or another tokenizer")
    return tag, answer


def _died(process: subprocess.Popen[bytes]) -> RunFailed:
    return RunFailed(
        f"a tokenizer process died (exit code {process.wait()}; -9 often means that memory ran out). Repeat the "
        "command, and it goes on where it was; fewer `processes` take less memory"
    )


def serve() -> None:
    """Run a worker: encode batches from standard input, one after the other, to standard output."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # a stray print must not get into the answers
    encoder = Encoder(*pickle.load(sys.stdin.buffer))
    inbox: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, inbox), daemon=True).start()
    while (texts := inbox.get()) is not None:
        try:
            answer: EncodedBatch | str = encoder.encode(texts)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the main process has ended, so there is no one to tell


def _listen(requests: BinaryIO, inbox: queue.SimpleQueue[list[str] | None]) -> None:
    """Read batches at once, so that the two sides never both wait for the other to read."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            inbox.put(pickle.load(requests))
    inbox.put(None)
