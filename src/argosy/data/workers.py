"""Processes that tokenize while the main process reads and writes. Results come back in the order of the texts.

A worker is killed at the end, and ends with the main process however that one ends.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from argosy.data.engine import EncodedBatch, Encoder, EngineName
from argosy.errors import RunFailed
from argosy.processes.channel import Channel, Gone
from argosy.processes.child import Child, channel_to_parent, messages

AHEAD = 3
"""Batches queued for a worker: the one that it encodes, and enough to wait for longer ones of other workers."""
OWN_THREADS = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of a worker: the workers share the cores, so the libraries in each take one thread."""

Tag = TypeVar("Tag")


class Workers:
    """A number of tokenizer processes; a context manager, which ends them."""

    def __init__(self, processes: int, tokenizer: Path, engine: EngineName, dtype: np.dtype[Any], fraction: float):
        self._dtype = dtype
        # A worker may be at a long batch, and this process at a slow disk: neither gives the other up.
        self._processes = [Child(__name__, environment=OWN_THREADS, send_timeout_s=math.inf) for _ in range(processes)]
        for process in self._processes:
            _send(process, "encoder", tokenizer=str(tokenizer), engine=engine, dtype=dtype.str, fraction=fraction)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()

    def encode(self, batches: Iterable[tuple[Tag, Sequence[str]]]) -> Iterator[tuple[Tag, EncodedBatch]]:
        """Encode the batches, which are taken from the iterator ahead, and yield them with their tags, in order.

        Raises: RunFailed if a worker dies or fails.
        """
        waiting: deque[tuple[Tag, Child]] = deque()
        for number, (tag, texts) in enumerate(batches):
            process = self._processes[number % len(self._processes)]
            _send(process, "texts", data=[text.encode(errors="surrogatepass") for text in texts])
            waiting.append((tag, process))
            if len(waiting) >= AHEAD * len(self._processes):
                yield self._receive(*waiting.popleft())
        while waiting:
            yield self._receive(*waiting.popleft())

    def _receive(self, tag: Tag, process: Child) -> tuple[Tag, EncodedBatch]:
        try:
            answer = process.channel.receive()
        except Gone:
            raise _died(process) from None
        if answer["kind"] == "failed":
            raise RunFailed(
                f"a tokenizer process failed: {answer['why']}. Try engine = huggingface, or another tokenizer."
            )
        tokens, lengths, text_bytes, held_out = answer["data"]
        return tag, EncodedBatch(
            np.frombuffer(tokens, self._dtype),
            np.frombuffer(lengths, np.int64),
            np.frombuffer(text_bytes, np.int64),
            np.frombuffer(held_out, np.bool_),
        )


def _send(process: Child, kind: str, **facts: Any) -> None:
    try:
        process.channel.send(kind, **facts)
    except Gone:
        raise _died(process) from None


def _died(process: Child) -> RunFailed:
    return RunFailed(
        f"a tokenizer process died ({process.reap()}; SIGKILL often means that memory ran out). Repeat the command, "
        "and it goes on from the last whole shard; fewer `processes` take less memory."
    )


def main() -> None:
    """Run a worker: encode batches, one after the other."""
    channel = channel_to_parent(send_timeout_s=math.inf)
    told = channel.receive()
    inbox: queue.SimpleQueue[list[memoryview]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    encoder = Encoder(Path(told["tokenizer"]), told["engine"], np.dtype(told["dtype"]), told["fraction"])
    with suppress(Gone):
        while True:
            _answer(channel, encoder, [str(text, "utf-8", "surrogatepass") for text in inbox.get()])


def _answer(channel: Channel, encoder: Encoder, texts: list[str]) -> None:
    """Send the encoded texts, or why there are none. Raises: Gone."""
    try:
        batch = encoder.encode(texts)
    except Exception as error:
        channel.send("failed", why=f"{type(error).__name__}: {error}")
        return
    arrays = (batch.tokens, batch.lengths, batch.text_bytes, batch.held_out)
    channel.send("encoded", data=[array.data for array in arrays])


def _listen(channel: Channel, inbox: queue.SimpleQueue[list[memoryview]]) -> None:
    """Read batches at once, so that the two sides never both wait for the other to read."""
    for message in messages(channel):
        inbox.put(message["data"])
    os._exit(1)  # the main process has ended, so there is no one to tell


if __name__ == "__main__":
    main()
