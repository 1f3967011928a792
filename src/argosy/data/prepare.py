"""`prepare` turns text into token shards, from beginning to end."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from argosy.config.data import DataConfig, FiltersConfig, PrepareConfig, row_kind
from argosy.config.extend import ExtendConfig
from argosy.config.launch import LaunchOptions
from argosy.data import manifest as manifests
from argosy.data.chat_template import ChatTemplate
from argosy.data.crew import Meter, PrepareProgress, Report, Workers
from argosy.data.cutting import Cutter, DocumentPosition, Journal, fingerprint
from argosy.data.documents import DOCUMENTS_PIECE_BYTES, InputPiece, Tally, cut_input, sample_texts
from argosy.data.filters import Filters, absolute, key_maker, list_checksums, parts_of
from argosy.data.manifest import BEGIN_OPTION, NAMES_KEPT, TEMPLATE, TOKENIZER, Manifest, RowFormat, Shard, SplitName
from argosy.data.packing import Packer
from argosy.data.shards import token_dtype
from argosy.data.sources import RECORDS, Input, InputFile, checksums_of, find_files
from argosy.data.tokenizer import Tokenizer, choose_engine, tokenizer_file, train, usage_of
from argosy.data.work import LOGS, WORK_FOLDER, PrepareTask, WorkFolder
from argosy.data.worker import DUPLICATES_OUTPUT, KEYS_OUTPUT, TOKENS_OUTPUT, WORKER_VARIABLE, PrepareJob, Stages
from argosy.engines.engine import Engine, ProgramJob
from argosy.engines.table import engine_for_programs
from argosy.errors import RunFailed, UserError, encodable
from argosy.extend.loading import approve, environment
from argosy.files import MadeFolder, atomic_write, made_folder
from argosy.plan.hardware.local_machine import cores_here

TRAINING_CHARS = 10_000_000
"""Characters that a tokenizer is trained on. That takes seconds; below 100,000 tokens, more changes little."""

COMPARED_CHARS = 500_000
"""Characters on which tokenizer engines must agree."""

BATCH_CHARS = 500_000
"""Characters that a worker encodes in one call: enough for its threads, few enough to show how far it is."""

RESULT_BYTES = 8_000_000
"""Text of one file of results."""

PREPARE_LOCK = ".prepare.lock"

WORKER_OPTIONS = {
    "cpus_per_node": "--cpus",
    **{name: f"--{name}" for name in ("time", "account", "partition", "address", "extra")},
}
"""Field of a worker's job -> its option."""

Splits = dict[SplitName, tuple[Shard, ...]]


def prepare(
    config: PrepareConfig,
    report: Report | None = None,
    extend: ExtendConfig = ExtendConfig(),  # noqa: B008  (frozen)
    machines: LaunchOptions = LaunchOptions(),  # noqa: B008  (frozen)
) -> Manifest:
    """Tokenize `config.input` into shards in `config.out` and return their manifest.

    The result depends on the options and the input alone, not on the number of workers, machines or interruptions (nor
    on the engine, as far as a sample can tell: see `choose_engine`).

    A folder that was prepared with the same options is returned as it is; the input is not read again and may be gone.
    If another process is preparing the same folder, this waits for it.

    Args:
        config: the options.
        report: called with the progress, at most ten times a second.
        extend: where sources of the user's are declared; these files are approved, and run.
        machines: where the workers run. All of them must see `out`, and the input where it is not a URL.

    Raises: UserError if an option or the input is wrong, `out` holds something else, or nothing can be written there;
    RunFailed if the disk fills on the way, or workers die again and again. After any interruption, the same call
    resumes.
    """
    report = report or (lambda progress: None)
    approve(extend.code)
    config = _with_row_length(config)
    options = _options(config, extend)
    if _is_prepared(config.out):
        return _load_prepared(config.out, options, extend)
    # Before `out` is created: wrong input leaves nothing behind.
    engine, wanted, found = _checked(config, extend, machines)
    with _writing(config.out) as kept:
        if _is_prepared(config.out):  # another process prepared it, while this one waited
            return _load_prepared(config.out, options, extend)
        pieces = cut_input(found.files, DOCUMENTS_PIECE_BYTES)
        journal = _open_journal(config, options, found.files, pieces)
        kept.is_kept = kept.is_kept or bool(journal.cuts)
        tokenizer = _tokenizer(config, found.files, bool(journal.cuts), report)
        job = _job(config, extend, tokenizer, found.files, journal)
        folder = WorkFolder(config.out.absolute() / WORK_FOLDER)
        folder.make(job.as_json(), [file.as_found for file in found.files], [astuple(piece) for piece in pieces])
        meter = Meter(journal, _total_text_bytes(found.files, config), report)
        count = max(1, min(wanted, len(pieces)))
        job_of = partial(_worker_job, folder, machines, count)
        with Workers(folder, engine, job_of, count, meter.look) as workers:
            if config.filters.duplicates != "keep":
                _find_duplicates(len(pieces), workers, meter)
            stages = Stages(job, folder, found.files, pieces)
            splits = _tokenize(job, stages, len(pieces), journal, workers, meter, tokenizer.eod_id)
            workers.finish()
        meter.finish()
        folder.remove()
        end = journal.next
        Manifest(
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            dtype=job.dtype,
            options=options,
            skipped=dict(end.before.skipped),
            skipped_at=end.before.places,
            dropped=dict(sorted(end.before.dropped.items())),
            files=end.files,
            files_after_limit=len(found.files) - end.files,
            left_out=len(found.left_out),
            left_out_names=tuple(encodable(file.name) for file in found.left_out[:NAMES_KEPT]),
            other_splits=len(found.other_splits),
            truncated=end.before.truncated,
            rows=_row_format(config),
            splits=splits,
        ).save(config.out)
        journal.remove()
        return Manifest.load(config.out)


def _find_duplicates(pieces: int, workers: Workers, meter: Meter) -> None:
    """Have workers find out which documents came before. What they found earlier is taken as it is."""
    keys = 0
    for task, _, chunk in workers.results(KEYS_OUTPUT, pieces, ahead=pieces):
        keys += len(chunk.arrays["keys"])
        meter.compared(task.number / pieces)
    parts = parts_of(keys)
    for _ in workers.results(DUPLICATES_OUTPUT, parts, ahead=parts):
        pass
    meter.compared(1.0)


def _with_row_length(config: PrepareConfig) -> PrepareConfig:
    """Return the options of conversations with what follows from others. Raises: UserError."""
    if not config.has_conversations:
        return config
    if config.tokenizer is None:
        raise UserError(
            f"tokenizer = none: objective = {config.objective} takes conversations, which are written with the "
            "tokenizer and chat template of a model. Name a run, or a folder from Hugging Face."
        )
    ChatTemplate.load(config.tokenizer, config.chat_template)
    seq_len = config.seq_len or DataConfig.model_fields["seq_len"].default
    return config.model_copy(update={"seq_len": seq_len})


def _tokenize(
    job: PrepareJob,
    stages: Stages,
    pieces: int,
    journal: Journal,
    workers: Workers,
    meter: Meter,
    filler: int,
) -> Splits:
    """Write all documents to shards: workers make tokens of them, and this process puts those in order."""
    config, at = job.config, journal.next
    limit = config.max_text_bytes or sys.maxsize
    tally, start, skip, files = at.before, at.start, at.document, at.files
    waiting = deque[tuple[PrepareTask, int]]()  # results that are not in finished shards yet
    packer = partial(Packer, config.seq_len, filler) if config.has_conversations else lambda: None
    with Cutter(config.out, np.dtype(job.dtype), config.shard_tokens, journal, packer) as cutter:
        for task, number, chunk in workers.results(TOKENS_OUTPUT, pieces, at.piece, at.chunk, at.start):
            waiting.append((task, number))
            batch, counts, files = stages.batch(task.number, chunk, start, limit - tally.text_bytes)
            cutter.add(_positions(DocumentPosition(task.number, number, start, skip, tally)), batch.after(skip))
            while waiting and (waiting[0][0].number, waiting[0][1]) < (journal.next.piece, journal.next.chunk):
                stages.folder.drop(*waiting.popleft())
            meter.count(batch.after(skip))
            tally = tally + counts
            start, skip = 0 if chunk.is_last else chunk.end, 0
            if tally.text_bytes >= limit:
                break
        if not meter.progress.documents:
            raise _no_text(config, tally)
        return cutter.finish(DocumentPosition(pieces, before=tally, files=files), config.validation_fraction > 0)


def _positions(first: DocumentPosition) -> Callable[[int], DocumentPosition]:
    """Return the function from a document's number, counted from `first`, to its position."""
    return lambda number: replace(first, document=first.document + number)


def _job(
    config: PrepareConfig, extend: ExtendConfig, tokenizer: Tokenizer, files: Sequence[InputFile], journal: Journal
) -> PrepareJob:
    path = config.out / TOKENIZER
    return PrepareJob(
        fingerprint=f"{journal.job} {tokenizer.sha256}",
        config=config.model_copy(
            update={
                "out": config.out.absolute(),
                "tokenizer": None,
                "filters": absolute(config.filters),
                "chat_template": "",
            }
        ),
        extend=extend,
        engine="huggingface"
        if config.has_conversations
        else choose_engine(config.engine, path, sample_texts(files, config, COMPARED_CHARS)),
        dtype="int32" if config.has_conversations else token_dtype(tokenizer.vocab_size).name,
        chunk_bytes=RESULT_BYTES,
        batch_chars=BATCH_CHARS,
    )


def would_prepare(config: PrepareConfig, extend: ExtendConfig, machines: LaunchOptions) -> list[str]:
    """Return what `prepare` would do, in words that go on from "would"; nothing is written, no code of the user's runs.

    Raises: UserError, as `prepare` before it begins.
    """
    config = _with_row_length(config)
    options = _options(config, extend)
    if _is_prepared(config.out):
        _load_prepared(config.out, options, extend)
        return []
    _, wanted, found = _checked(config, extend, machines)
    size = _total_text_bytes(found.files, config)
    text = "" if size is None else f", {size / 1e6:.1f} MB of text"
    pieces = len(cut_input(found.files, DOCUMENTS_PIECE_BYTES))
    return [
        f"read {len(found.files)} files{text}",
        "train no tokenizer" if config.tokenizer else f"train a tokenizer of {config.vocab_size} tokens on them",
        f"tokenize them with {max(1, min(wanted, pieces))} workers ({machines.on}) into {config.out}",
    ]


def _checked(config: PrepareConfig, extend: ExtendConfig, machines: LaunchOptions) -> tuple[Engine, int, Input]:
    """Return the engine, how many workers are wanted, and the input. Raises: UserError if one of them is wrong."""
    engine = engine_for_programs("workers of `prepare`", machines, WORKER_OPTIONS)
    wanted, is_of_chats = _workers_wanted(config, machines), config.has_conversations
    _check_filters(config.filters)
    _check_tokenizer_there(config)
    return engine, wanted, find_files(config.input, config.extensions, extend.code, config.fields, is_of_chats)


def _workers_wanted(config: PrepareConfig, machines: LaunchOptions) -> int:
    """Return how many workers to start. Raises: UserError if only the user can say."""
    if machines.on != "local" and not config.processes:
        raise UserError(
            f"processes = 0: with --on {machines.on}, say how many workers to start, e.g. --processes 16. Each takes a "
            "core, and as many as the cluster has room for run at once."
        )
    return config.processes or cores_here()


def _worker_job(folder: WorkFolder, machines: LaunchOptions, workers: int, name: str) -> ProgramJob:
    cpus = machines.cpus_per_node or 1
    threads = max(1, cores_here() // workers if machines.on == "local" else cpus)
    asked = {**machines.for_engine(), "cpus_per_node": cpus}
    return ProgramJob(
        title="argosy-prepare",
        module="argosy.data.worker",
        words=(str(folder.path),),
        log=folder.path / LOGS / f"{name}.out",
        work_dir=Path.cwd(),
        environment={
            WORKER_VARIABLE: name,
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "RAYON_NUM_THREADS": str(threads),  # workers share the cores: one alone, with one big file, takes all
            "OMP_NUM_THREADS": "1",
            **environment(),
        },
        is_tied=True,
        **asked,
    )


def _options(config: PrepareConfig, extend: ExtendConfig) -> dict[str, Any]:
    """Return the options on which the result depends. A given tokenizer counts by its contents, as sources' code."""
    brought = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    return (
        {
            "input": list(config.input),
            "tokenizer": brought and brought.sha256,
            "vocab_size": None if brought else config.vocab_size,
            "field": config.field[0] if len(set(config.field)) == 1 else list(config.field),
            "validation_fraction": config.validation_fraction,
            "max_text_bytes": config.max_text_bytes,
            "shard_tokens": config.shard_tokens,
            "on_bad_input": config.on_bad_input,
            "extensions": list(config.extensions) or None,
            "filters": _filter_options(config.filters),
        }
        | _row_options(config)
        | ({BEGIN_OPTION: brought.begin_ids} if brought and brought.begin_ids and not config.has_conversations else {})
        | ({"own_sources": sums} if (sums := checksums_of(config.input, extend.code)) else {})
    )


def _row_options(config: PrepareConfig) -> dict[str, Any]:
    """Return the options of conversations; {} for text. The template counts by its contents."""
    if not config.has_conversations or config.tokenizer is None:
        return {}
    template = ChatTemplate.load(config.tokenizer, config.chat_template)
    sha256 = hashlib.sha256(template.text.encode()).hexdigest()
    return {"rows": row_kind(config.objective or ""), "seq_len": config.seq_len, "chat_template": sha256}


def _row_format(config: PrepareConfig) -> RowFormat | None:
    """Return how rows of conversations are laid out; None for text."""
    if not config.has_conversations:
        return None
    return RowFormat(seq_len=config.seq_len, kind=row_kind(config.objective or ""))


def _filter_options(config: FiltersConfig) -> dict[str, Any] | None:
    """Return what was changed of the table; None if nothing was. Lists count by their contents. Raises: UserError."""
    if config == FiltersConfig():
        return None
    changed = config.model_dump(mode="json", exclude_defaults=True)
    return changed | ({"lists": sums} if (sums := list_checksums(config)) else {})


def _check_filters(config: FiltersConfig) -> None:
    """Load what the filters need. Raises: UserError if that is missing or wrong."""
    Filters(config)
    if config.duplicates != "keep":
        key_maker(config)


def _is_prepared(out: Path) -> bool:
    return os.path.exists(out / manifests.DATA_MANIFEST)  # noqa: PTH110  - Path.exists raises where nobody may look


def _load_prepared(out: Path, options: dict[str, Any], extend: ExtendConfig) -> Manifest:
    manifest = Manifest.load(out)
    there, options = manifest.options, {"rows": None, **options}  # text has no rows
    changed = [key for key, value in options.items() if there.get(key) != value]
    # Nothing was put before documents earlier.
    changed = [key for key in changed if key != BEGIN_OPTION or key in there]
    if "own_sources" in changed and there.get("extend") == extend.checksums:  # as it was noted before
        changed.remove("own_sources")
    if changed:
        listed = "; ".join(f"{key} = {there.get(key)} there, {options[key]} here" for key in changed)
        raise UserError(
            f"out = {out}: prepared already, with other options ({listed}). Choose another `out`, or delete {out}."
        )
    return manifest


def _open_journal(
    config: PrepareConfig, options: dict[str, Any], files: Sequence[InputFile], pieces: Sequence[InputPiece]
) -> Journal:
    """Return the journal of an interrupted `prepare` of the same input, or a new one. Raises: UserError."""
    out = config.out
    if not (out / manifests.CUTTING_JOURNAL).exists() and any(out.glob("*.bin")):
        raise UserError(
            f"out = {out}: holds .bin files that `prepare` did not write. Choose another `out`, delete {out}, or take "
            f"them over: argosy prepare {out} --adopt --tokenizer tokenizer.json"
        )
    return Journal(out, fingerprint(options, files, pieces))


def _check_tokenizer_there(config: PrepareConfig) -> None:
    """Raises: UserError if `out` has the tokenizer of something else, such as a run or a model."""
    path, given = config.out / TOKENIZER, config.tokenizer
    is_same = given is not None and tokenizer_file(given).resolve() == path.resolve()
    if os.path.exists(path) and not is_same and not (config.out / PREPARE_LOCK).exists():  # noqa: PTH110
        raise UserError(f"out = {config.out}: `prepare` would replace its {TOKENIZER}. Choose another `out`.")


def _tokenizer(config: PrepareConfig, files: Sequence[InputFile], is_resumed: bool, report: Report) -> Tokenizer:
    """Return the given tokenizer, or one trained on the input. From here on it is in `out`."""
    path = config.out / TOKENIZER
    if config.tokenizer:
        with atomic_write(path) as file:
            file.write(tokenizer_file(config.tokenizer).read_bytes())
        for name, text in _usage(config).items() if config.has_conversations else ():
            with atomic_write(config.out / name) as file:
                file.write(text)
    if config.tokenizer or (is_resumed and path.exists()):
        return Tokenizer.load(path)
    report(PrepareProgress("tokenizer"))
    return train(sample_texts(files, config, TRAINING_CHARS), config.vocab_size, path)


def _usage(config: PrepareConfig) -> dict[str, bytes]:
    """Return the files beside the tokenizer, with the chat template that the conversations are written with."""
    assert config.tokenizer is not None
    template = ChatTemplate.load(config.tokenizer, config.chat_template)
    return {**usage_of(config.tokenizer), TEMPLATE: template.text.encode()}


def _total_text_bytes(files: Sequence[InputFile], config: PrepareConfig) -> int | None:
    """Return the bytes of text to come. Only for plain text do file sizes tell; else None."""
    sizes = [file.size for file in files if not file.compression and file.suffix not in RECORDS]
    if len(sizes) < len(files) or None in sizes:
        return None
    return min(sum(size or 0 for size in sizes), config.max_text_bytes or sys.maxsize)


def _no_text(config: PrepareConfig, tally: Tally) -> UserError:
    named = ", ".join(config.input)
    skipped = ", ".join(f"{count} x {kind}" for kind, count in tally.skipped.items())
    for kind, (first, *_) in list(tally.places.items())[:1]:
        skipped += f"; first {first}: {kind}"
    dropped = ", ".join(f"{count} x {why}" for why, count in tally.dropped.items())
    if config.has_conversations:
        why = "; ".join(filter(None, (skipped, dropped))) or "it is empty"
        remedy = " Mend the first." if skipped else ""
        remedy += f" Raise seq_len = {config.seq_len}, or shorten them." if tally.dropped else ""
        return UserError(f"{named}: no conversation is left of it ({why}).{remedy or ' Name another file.'}")
    if tally.dropped:
        return UserError(f"{named}: all text was left out ({dropped}). Relax the filters.")
    return UserError(
        f"{named}: there is no text in it" + (f" (skipped: {skipped})" if skipped else "") + ". "
        "Name files with text in UTF-8, and in `field` the field or column that holds it."
    )


@contextmanager
def _writing(out: Path) -> Iterator[MadeFolder]:
    """Create and lock `out`, or wait for who has the lock. Raises: UserError if that fails, RunFailed after it."""
    is_locked = False
    try:
        with made_folder(out) as folder, (out / PREPARE_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder.is_kept = folder.is_kept or any(
                path.name != PREPARE_LOCK for path in out.iterdir()
            )  # another's, meanwhile
            is_locked = True
            yield folder
    except OSError as error:  # errors of reading are reported elsewhere
        wrong = f"out = {out}: cannot be written ({error})."
        if not is_locked:
            raise UserError(f"{wrong} Name a folder that you may write to.") from error
        remedy = "Free some space, then repeat the command: it goes on from the last whole shard."
        raise RunFailed(f"{wrong} {remedy}") from error
