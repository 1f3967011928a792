"""A worker of `prepare`: takes tasks from the folder that all machines see, one after the other, until all are done.

What it makes of a task, stage by stage, depends on the job and the task alone. It ends with the caller: on the same
machine at once, elsewhere when the caller has shown no life for WORKER_SILENT_S.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from pydantic import TypeAdapter

from argosy.config.data import PrepareConfig, TokenizerEngine
from argosy.config.extend import ExtendConfig
from argosy.data.chat_encoder import TRUNCATED, ChatDocuments, ChatEncoder
from argosy.data.documents import Document, DocumentReader, Drops, InputPiece, Tally, refused
from argosy.data.filters import Filters, as_arrays, bounds, key_maker, repeated, within
from argosy.data.manifest import TOKENIZER
from argosy.data.sources import InputFile, file_again
from argosy.data.tokenizer import EncodedBatch, Encoder
from argosy.data.work import Chunk, PrepareTask, WorkFolder, WorkState
from argosy.errors import ArgosyError
from argosy.processes.child import CHANNEL, channel_to_parent, end_with_parent

KEYS_OUTPUT, DUPLICATES_OUTPUT, TOKENS_OUTPUT = "keys", "duplicates", "tokens"
"""The stages. keys: each piece is filtered, and what stays gets keys by which duplicates are found; duplicates: a task
for each part of all keys; tokens: documents become tokens, a task for each piece. The first two only where duplicates
are left out."""
EXACT_DUPLICATE, NEAR_DUPLICATE = "duplicate", "near-duplicate"


@dataclass(frozen=True)
class PrepareJob:
    """The job of a `prepare`, as job.json has it."""

    fingerprint: str
    config: PrepareConfig
    extend: ExtendConfig
    engine: TokenizerEngine
    dtype: str
    """The dtype of tokens."""
    chunk_bytes: int
    """UTF-8 bytes of text of a chunk, about."""
    batch_chars: int
    """Characters that are encoded in one call."""

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return dict(TypeAdapter(PrepareJob).dump_python(self, mode="json"))


class InputFiles(Sequence[InputFile]):
    """The input's files, opened again where they are used: a worker needs few of them."""

    def __init__(self, found: Sequence[Sequence[Any]], extend: ExtendConfig):
        self._found, self._code = found, extend

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, number: int) -> InputFile: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[InputFile]: ...
    def __getitem__(self, number: int | slice) -> InputFile | Sequence[InputFile]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return file_again(self._found[number], self._code.code)


class Stages:
    """Makes the results of tasks. Cheap to make; what a stage needs is loaded at its first task."""

    def __init__(
        self,
        job: PrepareJob,
        folder: WorkFolder,
        files: Sequence[InputFile],
        pieces: Sequence[InputPiece],
        count: Callable[[int], None] = lambda text_bytes: None,
    ):
        """`count` is told of each part of a task that is done, by its bytes of text."""
        self.folder = folder
        self._job, self._files, self._pieces, self._count = job, files, pieces, count
        self._filters: Filters | None = None
        self._encoder: Encoder | ChatEncoder | None = None
        self._documents: ChatDocuments | None = None
        self._keys_of: Callable[[str], list[int]] | None = None

    def make(self, task: PrepareTask, tasks: int, start: int) -> Iterator[Chunk]:
        """Yield the results of one of a stage's `tasks`, from text `start` of its piece on. Raises: UserError."""
        if task.stage == KEYS_OUTPUT:
            yield from self._keys(task.number, start)
        elif task.stage == DUPLICATES_OUTPUT:
            yield self._duplicates(task.number, tasks)
        else:
            yield from self._tokens(task.number, start)

    def _reader(
        self, drops: Drops | None, max_text_bytes: int | None = None, config: PrepareConfig | None = None
    ) -> DocumentReader:
        config = config or self._job.config
        if config.has_conversations and self._documents is None:
            self._documents = ChatDocuments(Path(config.out), config)
        return DocumentReader(self._files, config, drops, max_text_bytes, self._documents)

    def _token_reader(
        self, piece: int, max_text_bytes: int | None, config: PrepareConfig | None = None
    ) -> DocumentReader:
        """Return a reader of the documents that are to become tokens."""
        has_keys = self._job.config.filters.duplicates != "keep"
        return self._reader(self._dropped_before(piece) if has_keys else self._filter(), max_text_bytes, config)

    def _filter(self) -> Drops | None:
        if self._filters is None:
            self._filters = Filters(self._job.config.filters)
        return self._filters or None

    def _dropped_before(self, piece: int) -> Drops:
        """Return what the stages before have found out about a piece, instead of finding it out again."""
        marks = dict[int, str]()
        for chunk in self.folder.mapped_all(PrepareTask(KEYS_OUTPUT, piece)):
            marks |= {int(number): why for number, why in chunk.facts["marks"]}
        parts = int(self.folder.mapped(PrepareTask(DUPLICATES_OUTPUT, 0), 0).facts["parts"])
        for part in range(parts):
            found = self.folder.mapped(PrepareTask(DUPLICATES_OUTPUT, part), 0).arrays
            first, end = np.searchsorted(found["pieces"], [piece, piece + 1])
            for number, exact in zip(found["numbers"][first:end], found["exact"][first:end], strict=True):
                known = marks.get(int(number))
                marks[int(number)] = EXACT_DUPLICATE if exact or known == EXACT_DUPLICATE else NEAR_DUPLICATE
        return lambda text, url, number: marks.get(number, "")

    def batch(self, number: int, chunk: Chunk, start: int, most_bytes: int) -> tuple[EncodedBatch, Tally, int]:
        """Return the documents of a chunk of tokens, counts, and how many files are read by then.

        start: where the chunk begins in its piece. most_bytes: of text; what is too much is cut off: the text is read
        again up to there, and of its tokens those of the last document are made again, which may be cut.
        """
        batch = _joined([EncodedBatch(**chunk.arrays)] if chunk.arrays else [], self._job.dtype)
        tally = Tally(
            int(batch.text_bytes.sum()),
            Counter(chunk.facts["skipped"]),
            {kind: tuple(places) for kind, places in chunk.facts["places"].items()},
            Counter(chunk.facts["dropped"]),
            chunk.facts.get("truncated", 0),
        )
        if tally.text_bytes < most_bytes:
            if self._job.config.on_bad_input == "refuse" and tally.places:
                kind, (first, *_) = next(iter(tally.places.items()))
                raise refused(kind, first)
            return batch, tally, self._pieces[number].end
        reader = self._token_reader(number, most_bytes)
        documents = list(reader.read(self._pieces[number], start))
        whole = max(0, len(documents) - 1)
        kept = _joined([batch.before(whole), self._encode(documents[whole:])], self._job.dtype)
        return kept, reader.tally, reader.files_read

    def _encode(self, documents: Sequence[Document]) -> EncodedBatch:
        """Encode documents, a batch after the other."""
        batches = []
        for texts in _batches(documents, self._job.batch_chars):
            batches.append(self._encode_batch(texts))
            self._count(int(batches[-1].text_bytes.sum()))
        return _joined(batches, self._job.dtype)

    def _encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        job = self._job
        if self._encoder is None:
            tokenizer, held_out = Path(job.config.out) / TOKENIZER, job.config.validation_fraction
            if job.config.has_conversations:
                has_mismatched = job.config.objective == "kto"
                self._encoder = ChatEncoder(tokenizer, job.config.seq_len, held_out, has_mismatched)
            else:
                self._encoder = Encoder(tokenizer, job.engine, np.dtype(job.dtype), held_out)
        return self._encoder.encode(texts)

    def _keys(self, number: int, start: int) -> Iterator[Chunk]:
        """Yield which texts of a piece are left out, and the keys of the others."""
        self._keys_of = self._keys_of or key_maker(self._job.config.filters)
        marks, filters = list[tuple[int, str]](), self._filter()

        def drops(text: str, url: str, number: int) -> str:
            if why := filters(text, url, number) if filters else "":
                marks.append((number, why))
            return why

        for documents, end, is_last in self._chunks(self._reader(drops), number, start):
            keys = []
            for document in documents:
                keys.append((document.number, self._keys_of(document.text)))
                self._count(len(document.text))
            facts = {"marks": [mark for mark in marks if mark[0] < end]}
            marks[:] = [mark for mark in marks if mark[0] >= end]
            yield Chunk(facts, as_arrays(keys), end, is_last)

    def _duplicates(self, part: int, parts: int) -> Chunk:
        """Return the documents that one before shares a key with, of this part of the keys."""
        least, most = bounds(part, parts)
        found = repeated(
            (piece, within(chunk.arrays, least, most))
            for piece in range(len(self._pieces))
            for chunk in self.folder.mapped_all(PrepareTask(KEYS_OUTPUT, piece))
        )
        return Chunk({"parts": parts}, found, 0, True)

    def _tokens(self, number: int, start: int) -> Iterator[Chunk]:
        limit = self._job.config.max_text_bytes  # no chunk is needed further; what cuts a character leaves 3 bytes less
        config = self._job.config  # what is beyond the limit over all pieces is not known here, and must not be refused
        config = config.model_copy(update={"on_bad_input": "skip"}) if limit else config
        reader = self._token_reader(number, limit and limit + 3, config)
        for documents, end, is_last in self._chunks(reader, number, start):
            arrays = vars(self._encode(documents))
            yield Chunk(self._facts(reader), arrays, end, is_last)

    def _chunks(self, reader: DocumentReader, number: int, start: int) -> Iterator[tuple[list[Document], int, bool]]:
        """Yield a piece's documents in chunks, each with its end and whether it is the last."""
        held, size = list[Document](), 0
        for document in reader.read(self._pieces[number], start):
            if size >= self._job.chunk_bytes:
                yield held, document.number, False
                held, size = [], 0
            held.append(document)
            size += len(document.text.encode())
        yield held, reader.number, True

    def _facts(self, reader: DocumentReader) -> dict[str, Any]:
        """Return what was counted since the last call."""
        tally, reader.tally = reader.tally, Tally()
        if isinstance(self._encoder, ChatEncoder):
            counts, self._encoder.counts = self._encoder.counts, Counter()
            tally.truncated = counts.pop(TRUNCATED, 0)
            tally.dropped += counts
        return {
            "skipped": dict(tally.skipped),
            "places": tally.places,
            "dropped": dict(tally.dropped),
            "truncated": tally.truncated,
        }


def stages_of(folder: WorkFolder, count: Callable[[int], None]) -> Stages:
    job = TypeAdapter(PrepareJob).validate_python(folder.job())
    files, pieces = folder.input()
    return Stages(job, folder, InputFiles(files, job.extend), [InputPiece(*piece) for piece in pieces], count)


def _joined(batches: Sequence[EncodedBatch], dtype: str) -> EncodedBatch:
    none = EncodedBatch(np.empty(0, dtype), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
    return EncodedBatch(
        **{name: np.concatenate([getattr(batch, name) for batch in batches or [none]]) for name in vars(none)}
    )


def _batches(documents: Sequence[Document], most_chars: int) -> Iterator[list[str]]:
    texts, chars = list[str](), 0
    for document in documents:
        texts.append(document.text)
        chars += len(document.text)
        if chars >= most_chars:
            yield texts
            texts, chars = [], 0
    if texts:
        yield texts


WORKER_VARIABLE = "ARGOSY_WORKER"
"""Environment variable with a worker's name. No two workers of a folder have the same, unless one is the other, started
again by the cluster."""
WORKER_BEAT_S = 1.0
WORKER_SILENT_S = 60.0
"""A caller or a worker whose heartbeat stands still for so long is taken for dead."""
TASK_POLL_S, MOST_TASK_POLL_S = 0.02, 0.5


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
        heard, heard_s, poll_s = -1, time.monotonic(), TASK_POLL_S
        while (state := self._folder.state()) is not None and not state.is_over:
            self._caller = self._caller or state.caller
            if state.caller != self._caller:
                return "another call goes on with the work"
            if state.beat != heard:
                heard, heard_s = state.beat, time.monotonic()
            elif time.monotonic() - heard_s > WORKER_SILENT_S:
                return "the caller is gone"
            if (task := self._take(state)) is None:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, MOST_TASK_POLL_S)
                continue
            poll_s = TASK_POLL_S
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
                if not self._is_called():
                    return
                self._folder.write(task, chunk, made, self._name)
                chunk, self._text_bytes = chunk + 1, 0
        except Exception as error:
            kind, why = type(error).__name__, str(error)
            if isinstance(error, OSError):  # errors of reading are UserErrors
                kind = "OSError"
            elif not isinstance(error, ArgosyError):
                kind, why = "Exception", f"{kind}: {why}"
            if self._is_called():
                self._folder.fail(task, kind, why, self._name)
        finally:
            self._text_bytes = 0
            self._folder.release(task)

    def _is_called(self) -> bool:
        """Return False if the caller is gone for another, whose job in this folder may be another too."""
        state = self._folder.state()
        return state is not None and state.caller == self._caller

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
            time.sleep(WORKER_BEAT_S)


def main() -> None:
    """`python -m argosy.data.worker FOLDER`, which an engine starts."""
    if CHANNEL in os.environ:
        end_with_parent(channel_to_parent())
    name = os.environ.get(WORKER_VARIABLE) or f"{socket.gethostname()}-{os.getpid()}"
    try:
        PrepareWorker(WorkFolder(Path(sys.argv[1])), name).run()
    except FileNotFoundError:  # the folder is gone: all is done
        pass
    except OSError:  # the failure could not be written either: the caller, who writes there too, says why
        sys.exit(os.EX_IOERR)


if __name__ == "__main__":
    main()
