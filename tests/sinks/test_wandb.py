"""What W&B's offline files hold, decoded with W&B's own protobuf classes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from argosy.sinks.worker import SinkSession
from run_folder import RunFolder

BLOCK = 32768
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
OFFLINE = {"mode": "offline", "project": "p"}


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # here: each of the processes that run tests collects this module

    data, at, parts = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts = (parts if kind in (MIDDLE, LAST) else b"") + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def files(folder: Path) -> list[Path]:
    """The files of a folder by the start of their runs; W&B's own process may still be writing the end of one."""
    paths = list(folder.glob("wandb/offline-run-*/*.wandb"))
    deadline = time.monotonic() + 60
    while not all(map(is_whole, paths)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return sorted(paths, key=lambda path: run_of(path).start_time.ToNanoseconds())


def is_whole(path: Path) -> bool:
    with suppress(DecodeError):
        return any(record.WhichOneof("record_type") == "exit" for record in records(path))
    return False


def history(path: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({**row, "_step": record.history.step.num})
    return rows


def run_of(path: Path) -> Any:
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def losses(path: Path) -> list[tuple[int, float]]:
    return [(row["_step"], row["train/loss"]) for row in history(path) if "train/loss" in row]


def test_all_that_a_run_writes_is_in_the_offline_run(tmp_path):
    run = RunFolder(tmp_path, wandb=OFFLINE)
    told = SinkSession(tmp_path, "wandb")
    run.step(0)
    run.evaluation(1, 3.5)
    run.step(1)
    run.sample(1, " upon")
    run.event("recovered", step=2)
    told.catch_up()
    run.step(2)
    run.evaluation(0, 4.5)  # parameter servers hear of it updates later, and W&B takes no earlier step
    told.catch_up()
    told.close()
    (path,) = files(tmp_path)
    assert losses(path) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [row.get("validation/loss") for row in history(path)] == [None, 3.5, 4.5]
    assert history(path)[1]["sample/text"] == "once upon"
    assert any("recovered" in row.get("event", "") for row in history(path))
    config = {item.key: json.loads(item.value_json) for item in run_of(path).config.update}
    assert config["name"] == "tiny"
    assert (run_of(path).display_name, run_of(path).project) == ("tiny", "p")


def test_a_run_that_goes_on_is_the_same_run(tmp_path):
    run = RunFolder(tmp_path, wandb=OFFLINE)
    for steps in ((0, 1), (2, 3)):
        told = SinkSession(tmp_path, "wandb")
        run.step(*steps)
        told.catch_up()
        told.close()
    first, second = files(tmp_path)
    assert run_of(first).run_id == run_of(second).run_id
    assert not run_of(second).HasField("branch_point")
    assert losses(first) + losses(second) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_steps_that_were_lost_are_rewound_by_wandb_itself(tmp_path):
    run = RunFolder(tmp_path, wandb=OFFLINE)
    told = SinkSession(tmp_path, "wandb")
    run.step(*range(6))
    told.catch_up()
    run.lose_from(3)
    run.step(3, 4, loss=9.0)
    told.catch_up()
    told.close()
    first, second = files(tmp_path)
    rewound = run_of(second).branch_point
    assert (rewound.run, rewound.metric, rewound.value) == (run_of(first).run_id, "_step", 2.0)
    assert losses(second) == [(3, 9.0), (4, 9.0)]


def test_a_run_that_begins_anew_is_another_run(tmp_path):
    run = RunFolder(tmp_path, wandb=OFFLINE)
    told = SinkSession(tmp_path, "wandb")
    run.step(0, 1)
    told.catch_up()
    run.lose_from(0)
    run.step(0, loss=9.0)
    told.catch_up()
    told.close()
    first, second = files(tmp_path)
    assert run_of(first).run_id != run_of(second).run_id
    assert losses(second) == [(0, 9.0)]


def test_a_process_that_was_killed_leaves_no_doubled_rows(tmp_path):
    import wandb

    run = RunFolder(tmp_path, wandb=OFFLINE)
    told = SinkSession(tmp_path, "wandb")
    run.step(0, 1)
    told.catch_up()
    wandb.finish()  # as if killed: it has not noted that it closed
    run.step(2)
    told = SinkSession(tmp_path, "wandb")
    told.catch_up()
    told.close()
    _first, second = files(tmp_path)
    assert run_of(second).branch_point.value == 1.0
    assert losses(second) == [(2, 2.0)]
