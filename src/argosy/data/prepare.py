"""`prepare` turns text into token shards, from beginning to end."""

from __future__ import annotations

import fcntl
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from argosy.config.extend import ExtendConfig
from argosy.config.schema import PrepareConfig
from argosy.data import journal as journals
from argosy.data import manifest as manifests
from argosy.data.cutting import Cutter
from argosy.data.documents import Document, DocumentReader, InputPosition
from argosy.data.engine import EncodedBatch, choose_engine
from argosy.data.journal import Journal, fingerprint
from argosy.data.manifest import NAMES_KEPT, TOKENIZER, Manifest, Shard, SplitName
from argosy.data.own_source import OWN
from argosy.data.sample import sample_texts
from argosy.data.shards import token_dtype
from argosy.data.sources import RECORDS, InputFile, find_files
from argosy.data.tokenizer import Tokenizer, train
from argosy.data.workers import Workers
from argosy.errors import ArgosyWarning, RunFailed, UserError
from argosy.files import atomic_write, made_folder

TRAINING_CHARS = 10_000_000
"""Characters that a tokenizer is trained on. That takes seconds; below 100,000 tokens, more changes little."""

COMPARED_CHARS = 500_000
"""Characters on which tokenizer engines must agree."""

BATCH_CHARS = 500_000
"""Characters sent to a worker at once: about 0.1 s of work, so that sending them costs nothing in comparison."""

REPORT_EVERY_S = 0.1

LOCK = ".prepare.lock"

Splits = dict[SplitName, tuple[Shard, ...]]


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of `prepare`."""

    stage: Literal["tokenizer", "tokens", "done"]
    """The phase: training the tokenizer, tokenizing, or finished."""
    text_bytes: int = 0
    """UTF-8 bytes of text tokenized so far."""
    total_text_bytes: int | None = None
    """Bytes in all; None if that is not known before the input is read."""
    tokens: int = 0
    documents: int = 0
    rate_bytes_per_s: float = 0.0
    """Text tokenized per second since `prepare` was called, without the work of an interrupted call before."""

    def __str__(self) -> str:
        if self.stage == "tokenizer":
            return "prepare  training the tokenizer"
        total = f"/{self.total_text_bytes / 1e6:.1f}" if self.total_text_bytes else ""
        return (
            f"prepare  {self.text_bytes / 1e6:.1f}{total} MB of text, {self.tokens / 1e6:.2f}M tokens   "
            f"{self.rate_bytes_per_s / 1e6:.1f} MB/s"
        )


Report = Callable[[PrepareProgress], None]


def prepare(
    config: PrepareConfig,
    report: Report | None = None,
    extend: ExtendConfig = ExtendConfig(),  # noqa: B008  (frozen)
) -> Manifest:
    """Tokenize `config.input` into shards in `config.out` and return their manifest.

    The result depends on the options and the input alone, not on the number of processes or interruptions (nor on the
    engine, as far as a sample can tell: see `choose_engine`).

    A folder that was prepared with the same options is returned as it is; the input is not read again and may be gone.
    If another process is preparing the same folder, this waits for it.

    Args:
        config: the options.
        report: called with the progress, at most ten times a second.
        extend: where sources of the user's are declared.

    Raises: UserError if an option or the input is wrong, or `out` holds something else; RunFailed if `out` cannot be
    written (disk full) or a tokenizer process dies. After any interruption, the same call resumes.
    """
    report = report or (lambda progress: None)
    options = _options(config, extend)
    if _is_prepared(config.out):
        return _load_prepared(config.out, options)
    found = find_files(
        config.input, config.extensions, extend.code
    )  # before `out` is created: wrong input leaves nothing behind
    files = found.files
    with _writing(config.out):
        if _is_prepared(config.out):  # another process prepared it, while this one waited
            return _load_prepared(config.out, options)
        journal = _open_journal(config, options, files)
        tokenizer = _tokenizer(config, files, bool(journal.cuts), report)
        reader = DocumentReader(
            files, config.field, config.on_bad_input, config.max_text_bytes, config.max_document_bytes
        )
        splits = _tokenize(config, files, reader, tokenizer, journal, report)
        Manifest(
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            dtype=token_dtype(tokenizer.vocab_size).name,
            options=options,
            skipped=dict(reader.tally.skipped),
            files=reader.files_read,
            files_after_limit=len(files) - reader.files_read,
            left_out=len(found.left_out),
            left_out_names=tuple(file.name for file in found.left_out[:NAMES_KEPT]),
            splits=splits,
        ).save(config.out)
        journal.remove()
        return Manifest.load(config.out)


def _tokenize(
    config: PrepareConfig,
    files: Sequence[InputFile],
    reader: DocumentReader,
    tokenizer: Tokenizer,
    journal: Journal,
    report: Report,
) -> Splits:
    """Write all documents to shards. The workers encode; this process reads and writes."""
    path, dtype = config.out / TOKENIZER, token_dtype(tokenizer.vocab_size)
    engine = choose_engine(config.engine, path, sample_texts(files, config, COMPARED_CHARS))
    meter = _Meter(journal, _total_text_bytes(files, config), report)
    with (
        Workers(_processes(config), path, engine, dtype, config.validation_fraction) as workers,
        Cutter(config.out, dtype, config.shard_tokens, journal) as cutter,
    ):
        for positions, batch in workers.encode(_batches(reader.read(journal.next))):
            cutter.add(positions, batch)
            meter.count(batch)
        if not meter.progress.documents:
            raise _no_text(config, reader)
        splits = cutter.finish(InputPosition(reader.files_read, 0, reader.tally), config.validation_fraction > 0)
    meter.finish()
    return splits


def _options(config: PrepareConfig, extend: ExtendConfig) -> dict[str, Any]:
    """Return the options on which the result depends. A given tokenizer counts by its contents, as sources' code."""
    brought = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    return {
        "input": list(config.input),
        "tokenizer": brought and brought.sha256,
        "vocab_size": None if brought else config.vocab_size,
        "field": config.field,
        "validation_fraction": config.validation_fraction,
        "max_text_bytes": config.max_text_bytes,
        "shard_tokens": config.shard_tokens,
        "on_bad_input": config.on_bad_input,
        "extensions": list(config.extensions) or None,
    } | ({"extend": extend.checksums} if any(item.startswith(OWN) for item in config.input) else {})


def _is_prepared(out: Path) -> bool:
    return (out / manifests.NAME).exists()


def _load_prepared(out: Path, options: dict[str, Any]) -> Manifest:
    manifest = Manifest.load(out)
    there = manifest.options
    changed = [key for key, value in options.items() if there.get(key) != value]
    if changed:
        listed = "; ".join(f"{key} = {there.get(key)} there, {options[key]} here" for key in changed)
        raise UserError(
            f"out = {out}: prepared already, with other options ({listed}). Choose another `out`, or delete {out}."
        )
    return manifest


def _open_journal(config: PrepareConfig, options: dict[str, Any], files: Sequence[InputFile]) -> Journal:
    """Return the journal of an interrupted `prepare` of the same input, or a new one."""
    out = config.out
    if not (out / journals.NAME).exists() and any(out.glob("*.bin")):
        raise UserError(
            f"out = {out}: holds .bin files that `prepare` did not write. Choose another `out`, delete {out}, or take "
            f"them over: argosy prepare {out} --adopt --tokenizer tokenizer.json"
        )
    journal = Journal(out, fingerprint(options, files))
    if journal.is_of_other_job:
        warnings.warn(
            f"out = {out}: an interrupted `prepare` of other options or input lay here; starting over.",
            ArgosyWarning,
            stacklevel=3,
        )
    return journal


def _tokenizer(config: PrepareConfig, files: Sequence[InputFile], is_resumed: bool, report: Report) -> Tokenizer:
    """Return the given tokenizer, or one trained on the input. From here on it is in `out`."""
    path = config.out / TOKENIZER
    if config.tokenizer:
        with atomic_write(path) as file:
            file.write(config.tokenizer.read_bytes())
    if config.tokenizer or (is_resumed and path.exists()):
        return Tokenizer.load(path)
    report(PrepareProgress("tokenizer"))
    return train(sample_texts(files, config, TRAINING_CHARS), config.vocab_size, path)


def _batches(documents: Iterable[Document]) -> Iterator[tuple[list[InputPosition], list[str]]]:
    """Yield documents in batches of BATCH_CHARS or a little more."""
    positions: list[InputPosition] = []
    texts: list[str] = []
    chars = 0
    for document in documents:
        positions.append(document.at)
        texts.append(document.text)
        chars += len(document.text)
        if chars >= BATCH_CHARS:
            yield positions, texts
            positions, texts, chars = [], [], 0
    if texts:
        yield positions, texts


def _total_text_bytes(files: Sequence[InputFile], config: PrepareConfig) -> int | None:
    """Return the bytes of text to come. Only for plain text do file sizes tell; else None."""
    sizes = [file.size for file in files if not file.compression and file.suffix not in RECORDS]
    if len(sizes) < len(files) or None in sizes:
        return None
    return min(sum(size or 0 for size in sizes), config.max_text_bytes or sys.maxsize)


def _no_text(config: PrepareConfig, reader: DocumentReader) -> UserError:
    skipped = ", ".join(f"{count} x {kind}" for kind, count in reader.tally.skipped.items())
    if reader.first_bad is not None:
        skipped += f"; first {reader.first_bad.where}: {reader.first_bad.kind}"
    return UserError(
        f"input = {list(config.input)}: there is no text in it" + (f" (skipped: {skipped})" if skipped else "") + ". "
        "Name files with text in UTF-8, and in `field` the field or column that holds it."
    )


class _Meter:
    """Counts finished work and reports it."""

    def __init__(self, journal: Journal, total_text_bytes: int | None, report: Report):
        done = [shard for cut in journal.cuts for shard in cut.shards.values()]
        self._report, self._began_s, self._reported_s = report, time.monotonic(), -REPORT_EVERY_S
        self._earlier_bytes = sum(shard.text_bytes for shard in done)
        self.progress = PrepareProgress(
            stage="tokens",
            text_bytes=self._earlier_bytes,
            total_text_bytes=total_text_bytes,
            tokens=sum(shard.tokens for shard in done),
            documents=sum(shard.documents for shard in done),
        )

    def count(self, batch: EncodedBatch) -> None:
        """Add a batch."""
        old, now_s = self.progress, time.monotonic()
        text_bytes = old.text_bytes + int(batch.text_bytes.sum())
        self.progress = replace(
            old,
            text_bytes=text_bytes,
            tokens=old.tokens + len(batch.tokens),
            documents=old.documents + len(batch.lengths),
            rate_bytes_per_s=(text_bytes - self._earlier_bytes) / max(now_s - self._began_s, 1e-9),
        )
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._report(self.progress)

    def finish(self) -> None:
        """Report that the work is finished."""
        self._report(replace(self.progress, stage="done"))


def _processes(config: PrepareConfig) -> int:
    return config.processes or len(os.sched_getaffinity(0))


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Create `out`, and lock it against other processes or wait for them. The lock of a dead process does not count."""
    try:
        with made_folder(out) as folder, (out / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder.is_kept = folder.is_kept or any(path.name != LOCK for path in out.iterdir())  # another's, meanwhile
            yield
    except OSError as error:  # errors of reading are reported elsewhere
        raise RunFailed(
            f"out = {out}: cannot be written ({error}). Free some space or get the right to write there, then repeat "
            "the command: it goes on from the last whole shard."
        ) from error
