from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.config.data import PrepareConfig
from argosy.config.extend import ExtendConfig
from argosy.config.launch import LaunchOptions
from argosy.data import prepare as module
from argosy.data import worker
from argosy.data.crew import PrepareProgress
from argosy.data.documents import InputPiece
from argosy.data.manifest import DATA_MANIFEST, TOKENIZER, Manifest, verify
from argosy.data.prepare import prepare, would_prepare
from argosy.data.shards import TokenSource
from argosy.data.sources import find_files
from argosy.data.tokenizer import Tokenizer, train
from argosy.data.work import WORK_FOLDER, Chunk, WorkFolder, WorkState
from argosy.data.worker import TOKENS_OUTPUT, PrepareJob
from argosy.engines.engine import Job
from argosy.engines.local import Local
from argosy.engines.record import LaunchedJob
from argosy.errors import RunFailed, UserError
from data.conftest import TEXTS
from tokenizers_with_marks import begun_tokenizer
from waiting import PATIENT_S

DOCUMENTS = [f"{text}# {i * i}\n" * (i % 7 + 1) for i, text in enumerate(TEXTS)]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_CHARS", 2000)
    monkeypatch.setattr(module, "RESULT_BYTES", 2000)
    monkeypatch.setattr(module, "DOCUMENTS_PIECE_BYTES", 5000)


@pytest.fixture
def config(tmp_path: Path, tokenizer_json: Path, small_batches: None) -> PrepareConfig:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(DOCUMENTS):
        (folder / f"{i:03}.txt").write_text(text)
    for name in ("099-broken\udcff.txt", "\udcff.png"):  # names need not be UTF-8
        (folder / name).write_bytes(b"\xff")
    return PrepareConfig(
        input=(str(folder),),
        out=tmp_path / "out",
        tokenizer=tokenizer_json,
        validation_fraction=0.1,
        shard_tokens=1500,
        processes=1,
        engine="huggingface",
    )


def changed(config: PrepareConfig, **options: Any) -> PrepareConfig:
    return config.model_copy(update=options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_text_comes_back_from_the_shards(config: PrepareConfig) -> None:
    manifest = prepare(config)
    tokenizer, found = Tokenizer.load(config.out / TOKENIZER), []
    for split in ("train", "validation"):
        source = TokenSource(config.out, split)
        ids = source.tokens(0, len(source)).tolist()
        while ids:
            end = ids.index(manifest.eod_id)
            found.append(tokenizer.decode(ids[:end]))
            ids = ids[end + 1 :]
    assert sorted(found) == sorted(DOCUMENTS)
    assert manifest.text_bytes("train") + manifest.text_bytes("validation") == sum(len(d.encode()) for d in DOCUMENTS)
    assert manifest.documents("validation") > 5 and len(manifest.splits["train"]) > 3
    assert manifest.skipped_at["broken UTF-8"][0].endswith("/099-broken?.txt, byte 0")
    assert manifest.left_out_names[0].endswith("/?.png")
    assert manifest.skipped == {"broken UTF-8": 1} and verify(config.out) == manifest


def test_result_does_not_depend_on_the_number_of_processes(config: PrepareConfig, tmp_path: Path) -> None:
    prepare(config)
    prepare(changed(config, out=tmp_path / "three", processes=3))
    assert contents(config.out) == contents(tmp_path / "three")


@pytest.mark.parametrize("batches", [6, *(pytest.param(batches, marks=pytest.mark.slow) for batches in (1, 20))])
def test_interrupted_and_resumed_is_byte_identical(config: PrepareConfig, tmp_path: Path, batches: int) -> None:
    """Interrupted over and over, each time after so many batches, until it comes to the end."""
    trained = changed(config, tokenizer=None, vocab_size=300, out=tmp_path / "whole")
    prepare(trained)
    interrupted = changed(trained, out=tmp_path / "interrupted")
    meter_count, runs = module.Meter.count, 0
    for runs in range(40):
        counted = iter(range(batches + runs))  # a little further each time: a shard may take more batches

        def count(meter: Any, batch: Any, counted: Iterator[int] = counted) -> None:
            if next(counted, None) is None:
                raise KeyboardInterrupt
            meter_count(meter, batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Meter, "count", count)
            try:
                prepare(interrupted)
                break
            except KeyboardInterrupt:
                assert not (interrupted.out / "manifest.json").exists()
    assert runs > 0 and contents(tmp_path / "whole") == contents(interrupted.out)


def test_what_is_prepared_is_not_prepared_again(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config)
    monkeypatch.setattr(module, "find_files", None)
    assert prepare(changed(config, processes=7, engine="auto")) == first


def test_other_options_on_the_same_folder_are_refused(config: PrepareConfig) -> None:
    prepare(config)
    with pytest.raises(UserError, match=r"other options \(shard_tokens = 1500 there, 9 here\)\. Choose another `out`"):
        prepare(changed(config, shard_tokens=9))


def test_the_tokenizer_of_a_run_or_a_model_is_not_replaced(config: PrepareConfig, tokenizer_json: Path) -> None:
    config.out.mkdir()
    (config.out / TOKENIZER).write_text("{}")
    with pytest.raises(UserError, match=r"`prepare` would replace its tokenizer\.json\. Choose another `out`\."):
        prepare(config)
    with pytest.raises(UserError, match="would replace its"):
        would_prepare(config, ExtendConfig(), LaunchOptions())
    assert contents(config.out) == {TOKENIZER: b"{}"}
    (config.out / TOKENIZER).write_bytes(tokenizer_json.read_bytes())
    assert prepare(changed(config, tokenizer=config.out)).vocab_size


def test_documents_of_before_keep_beginning_with_nothing(
    config: PrepareConfig, tokenizer_json: Path, tmp_path: Path
) -> None:
    """Data that were prepared before BOS was written are taken as they are; a new folder has it."""
    begun = begun_tokenizer(tokenizer_json, tmp_path / "begun.json")
    config = changed(config, tokenizer=begun)
    manifest = prepare(config)
    assert manifest.options["begin"] == Tokenizer.load(begun).begin_ids
    first = TokenSource(config.out, "train").tokens(0, 1)
    assert first.tolist() == manifest.options["begin"]
    path = config.out / DATA_MANIFEST
    facts = json.loads(path.read_text())
    del facts["options"]["begin"]
    path.write_text(json.dumps(facts))
    assert "begin" not in prepare(config).options


def test_foreign_shards_are_not_overwritten(config: PrepareConfig) -> None:
    config.out.mkdir()
    (config.out / "train-00000.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match="did not write"):
        prepare(config)
    assert (config.out / "train-00000.bin").read_bytes() == b"precious"


def test_shards_of_other_input_are_kept(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    Path(config.input[0], "000.txt").write_text("something else")
    before = {path.name for path in config.out.iterdir()}
    with pytest.raises(UserError, match=r"of other options or other input has finished .* shards here"):
        prepare(config)
    assert before == {path.name for path in config.out.iterdir()}


def test_progress_is_reported_to_the_end(config: PrepareConfig) -> None:
    seen: list[PrepareProgress] = []
    manifest = prepare(changed(config, tokenizer=None, vocab_size=300), seen.append)
    assert [seen[0].stage, seen[1].stage, seen[-1].stage] == ["tokenizer", "tokens", "done"]
    assert seen[-1].tokens == manifest.tokens("train") + manifest.tokens("validation")
    assert seen[-1].text_bytes + 1 == seen[-1].total_text_bytes  # one byte was no text
    assert seen[-1].rate_bytes_per_s > 0 and "MB/s" in str(seen[-1])


def test_stops_at_max_text_bytes(config: PrepareConfig) -> None:
    manifest = prepare(changed(config, max_text_bytes=5000))
    assert manifest.text_bytes("train") + manifest.text_bytes("validation") in range(4997, 5001)


@pytest.mark.parametrize("limit", [3, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (601, 2500, 9001))])
def test_the_limit_ends_at_the_same_byte_for_all_workers_pieces_and_chunks(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    (tmp_path / "texts" / "000.txt").write_text("ü" * 300)  # a limit may cut a character
    made = {}
    for workers, sizes in {1: (10**6, 10**6), 2: (5000, 2000), 3: (900, 300)}.items():
        monkeypatch.setattr(module, "DOCUMENTS_PIECE_BYTES", sizes[0])
        monkeypatch.setattr(module, "RESULT_BYTES", sizes[1])
        out = tmp_path / f"{workers}"
        prepare(changed(config, out=out, processes=workers, max_text_bytes=limit))
        made[workers] = contents(out)
    assert made[1] == made[2] == made[3]
    manifest = Manifest.load(out)
    assert manifest.text_bytes("train") + manifest.text_bytes("validation") in range(limit - 3, limit + 1)


def test_no_validation_if_none_is_wanted(config: PrepareConfig) -> None:
    assert prepare(changed(config, validation_fraction=0.0)).splits["validation"] == ()


def test_input_without_text_is_refused(config: PrepareConfig) -> None:
    only_broken = (str(Path(config.input[0], "*-broken*")),)
    with pytest.raises(UserError, match=r"there is no text in it \(skipped: 1 x broken UTF-8; first .*099-broken.*\)"):
        prepare(changed(config, input=only_broken))
    with pytest.raises(UserError, match="there is no text in it"):
        prepare(changed(config, input=only_broken, tokenizer=None))


@pytest.mark.parametrize("most_bytes", [None, sum(map(len, DOCUMENTS)) * 2])
def test_broken_input_stops_if_refused(config: PrepareConfig, most_bytes: int | None) -> None:
    with pytest.raises(UserError, match=r"099-broken.\.txt, byte 0: broken UTF-8"):
        prepare(changed(config, on_bad_input="refuse", max_text_bytes=most_bytes))


def test_broken_input_that_no_text_is_taken_after_is_not_refused(config: PrepareConfig) -> None:
    limit = len("".join(DOCUMENTS[:99]).encode()) - 10
    found = prepare(changed(config, on_bad_input="refuse", max_text_bytes=limit))
    assert sum(found.text_bytes(split) for split in found.splits) in range(limit - 3, limit + 1)


def test_wrong_options_leave_nothing_behind(config: PrepareConfig, tmp_path: Path) -> None:
    endless = tmp_path / "endless.json"
    endless.write_text((config.tokenizer or Path()).read_text().replace("<|endoftext|>", "<pad>"))
    for wrong in (changed(config, input=("nowhere.txt",)), changed(config, tokenizer=endless)):
        with pytest.raises(UserError):
            prepare(wrong)
    assert not config.out.exists()


def test_a_folder_that_cannot_be_written_is_wrong_input(config: PrepareConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"file/data: cannot be written .* Name a folder that you may write to"):
        prepare(changed(config, out=tmp_path / "file" / "data"))
    with pytest.raises(UserError, match=r"cannot be written \(.*File name too long"):
        prepare(changed(config, out=tmp_path / ("a" * 300)))


def test_full_disk_is_told_and_gone_on_from(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(RunFailed, match=r"cannot be written \(.*No space left.*Free some space"):
            prepare(config)
    assert prepare(config) == verify(config.out)


def test_workers_that_die_are_replaced(config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(config)
    killed = []

    def start_and_kill(engine: Local, job: Job) -> LaunchedJob:
        started = start(engine, job)
        if len(killed) < 2:
            killed.append(started.id)
            kill(started)
        return started

    start = Local.start
    monkeypatch.setattr(Local, "start", start_and_kill)
    assert prepare(changed(config, out=tmp_path / "killed")) == whole and len(killed) == 2


def test_workers_that_die_again_and_again_are_told(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_kill(engine: Local, job: Job) -> LaunchedJob:
        started = start(engine, job)
        kill(started)
        return started

    start = Local.start
    monkeypatch.setattr(Local, "start", start_and_kill)
    with pytest.raises(RunFailed, match=r"3 workers ended early \(signal SIGKILL.*Repeat the command"):
        prepare(config)


def kill(job: LaunchedJob) -> None:
    os.kill(int(job.id.partition("@")[0]), signal.SIGKILL)


def test_a_damaged_result_is_made_again(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = prepare(config)
    damaged = changed(config, out=tmp_path / "damaged")
    with monkeypatch.context() as patch:
        patch.setattr(module.Meter, "count", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(damaged)
    for result in (damaged.out / WORK_FOLDER / "results").glob("tokens-*-?????"):
        data = result.read_bytes()
        result.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert prepare(damaged) == whole


SCRIPT = """
import json, sys
from argosy.config.data import PrepareConfig
from argosy.data import crew, prepare as module
module.BATCH_CHARS = module.RESULT_BYTES = 2000
module.DOCUMENTS_PIECE_BYTES = 5000
crew.REPORT_EVERY_S = 0
def report(progress):
    print(progress.stage, flush=True)
    if progress.stage == "tokens" and progress.documents > 100:
        sys.stdin.read()  # hold still until the test has killed us
module.prepare(PrepareConfig(**json.loads(sys.argv[1])), report)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_signal_leaves_a_resumable_folder_and_no_orphan(config: PrepareConfig, tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    for _ in range(8):  # reports; by then shards are finished
        assert process.stdout.readline()
    workers = children(process.pid)
    process.send_signal(number)
    process.communicate(timeout=PATIENT_S)
    assert workers and all(ends_soon(worker) for worker in workers)
    resumed = prepare(config)
    assert resumed.identity == prepare(changed(config, out=tmp_path / "whole")).identity


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def ends_soon(pid: int) -> bool:
    """Return True if a process ends within ten seconds; a zombie that its new parent has not reaped counts too."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_each_input_has_a_field_of_its_own_in_one_command(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    (tmp_path / "a.jsonl").write_text('{"content": "from lines", "body": "not this"}\n' * 50)
    pq.write_table(pa.table({"body": ["from columns"] * 50, "content": ["nor this"] * 50}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("from a file")
    inputs = tuple(str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c.txt"))
    same = {"vocab_size": 300, "validation_fraction": 0.0, "processes": 1}
    mixed = prepare(PrepareConfig(input=inputs, field=("content", "body", "text"), out=tmp_path / "out", **same))
    lines = [*["from lines"] * 50, *["from columns"] * 50, "from a file"]
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    alone = prepare(PrepareConfig(input=(str(tmp_path / "all.jsonl"),), out=tmp_path / "alone", **same))
    assert mixed.splits == alone.splits
    assert "--field content --field body --field text" in mixed.prepare_command(tmp_path)
    with pytest.raises(ValueError, match="field names 2 fields for 3 places of input; give one for all"):
        PrepareConfig(input=inputs, field=("content", "body"))


def test_a_worker_on_a_full_disk_ends_without_a_traceback(tmp_path: Path) -> None:
    limit = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)); "
    code = limit + "runpy.run_module('argosy.data.worker', run_name='__main__')"
    (tmp_path / "a.txt").write_text("text " * 1000)
    folder = WorkFolder(tmp_path / "work")
    config = PrepareConfig(input=(str(tmp_path / "a.txt"),), out=tmp_path, tokenizer=None)
    train(["text " * 1000], 300, tmp_path / "tokenizer.json")
    (file,) = find_files(config.input).files
    job = PrepareJob("", config, ExtendConfig(), "huggingface", "uint16", 1000, 1000)
    folder.make(job.as_json(), [file.as_found], [astuple(InputPiece(0, 1))])
    folder.say(WorkState("caller", stage=TOKENS_OUTPUT, tasks=1, ahead=1))
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, timeout=PATIENT_S, check=False
    )
    assert (done.returncode, done.stderr) == (os.EX_IOERR, "")


def test_a_worker_of_a_job_that_another_has_taken_the_place_of_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WorkFolder(tmp_path / "work")

    def make(*_: object) -> Iterator[Chunk]:
        folder.make({"fingerprint": "of other options"}, [], [])
        folder.say(WorkState("another"))
        yield Chunk({}, {}, 0, True)

    folder.make({"fingerprint": ""}, [], [])
    folder.say(WorkState("caller", stage=TOKENS_OUTPUT, tasks=1, ahead=1))
    monkeypatch.setattr(worker, "stages_of", lambda *_: SimpleNamespace(make=make))
    monkeypatch.setattr(worker.PrepareWorker, "_beat", lambda _: None)
    assert worker.PrepareWorker(folder, "worker").run() == "another call goes on with the work"
    assert list((folder.path / "results").iterdir()) == []
