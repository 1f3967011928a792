"""Files of a run's folder, as they are found: replaced, damaged, too large, or leading elsewhere."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.watch import linefile
from argosy.watch.linefile import (
    MOST_DOCUMENT_BYTES,
    EventLog,
    WatchedFile,
    leads_away,
    spread_lines,
    table_of,
    tells_of_the_run,
)


def test_lines_are_taken_at_even_distances(tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"{n:03d}\n" for n in range(100)))
    found = [int(line) for line in spread_lines(path, path.stat().st_size, 10, 100)]
    assert found == list(range(0, 100, 10))
    assert len(list(spread_lines(path, path.stat().st_size, 1000, 100))) == 100
    path.write_text("x" * 50 + "\n")
    assert list(spread_lines(path, 51, 1, 8)) == [b"x" * 8]


def test_a_file_is_parsed_when_it_was_replaced_and_not_again(tmp_path):
    path, parsed = tmp_path / "report.json", list[str]()

    def parse(file: Path) -> str:
        parsed.append(file.read_text())
        return parsed[-1]

    watched = WatchedFile(path, parse)
    assert not watched.refresh() and watched.value is None
    path.write_text("one")
    assert watched.refresh() and watched.value == "one" and not watched.refresh()
    (tmp_path / "new").write_text("two!")
    (tmp_path / "new").replace(path)
    assert watched.refresh() and watched.value == "two!" and parsed == ["one", "two!"]
    path.unlink()
    assert watched.refresh() and watched.value is None and not watched.refresh()


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be understood"), ("x" * 100, "too large to be a run's")])
def test_a_file_that_is_none_of_ours_is_a_problem_in_words(tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(linefile, "MOST_DOCUMENT_BYTES", 50)
    (tmp_path / "report.json").write_text(text)
    watched = WatchedFile(tmp_path / "report.json", table_of)
    assert watched.refresh() and watched.value is None and said in watched.problem


def test_of_a_table_that_is_too_large_no_more_is_read(tmp_path):
    with (tmp_path / "summary.json").open("wb") as file:
        file.truncate(8 * MOST_DOCUMENT_BYTES)
    tracemalloc.start()
    with pytest.raises(UserError):
        table_of(tmp_path / "summary.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MOST_DOCUMENT_BYTES


def test_what_leads_away_is_not_read(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "file").touch()
    (tmp_path / "outside").touch()
    (folder / "inner").symlink_to(folder / "file")
    (folder / "outer").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    assert {name: leads_away(folder, name) for name in ("file", "inner", "outer", "pipe", "none")} == {
        "file": False, "inner": False, "outer": True, "pipe": True, "none": False,
    }  # fmt: skip


def write(folder: Path, process: str, *events: tuple[float, str], mode: str = "a") -> None:
    with (folder / f"{process}.jsonl").open(mode) as file:
        file.writelines(json.dumps({"time_s": at, "event": name, "step": 0}) + "\n" for at, name in events)


def test_events_of_all_processes_are_in_the_order_of_time(tmp_path):
    log = EventLog(tmp_path / "events")
    assert not log.refresh()
    (tmp_path / "events").mkdir()
    write(tmp_path / "events", "rank-0", (1.0, "start"), (3.0, "save"))
    write(tmp_path / "events", "coordinator", (2.0, "generation"))
    assert log.refresh() and not log.refresh()
    assert [(e["event"], e["process"]) for e in log.events] == [
        ("start", "rank-0"), ("generation", "coordinator"), ("save", "rank-0"),
    ]  # fmt: skip
    write(tmp_path / "events", "coordinator", (9.0, "finished"), mode="w")  # shorter than what was read
    write(tmp_path / "events", "rank-0", (4.0, "end"))
    assert log.refresh()
    assert [e["event"] for e in log.events] == ["start", "save", "end", "finished"]


def test_events_of_single_ranks_are_left_out_first(tmp_path, monkeypatch):
    monkeypatch.setattr(linefile, "MOST_HELD_EVENTS", 3)
    for rank in range(3):
        write(tmp_path, f"rank-{rank}", (rank, "start"), (10.0 + rank, "bad_step"))
    log = EventLog(tmp_path)
    log.refresh()
    assert [(e["event"], e["process"]) for e in log.events] == [
        ("bad_step", "rank-0"), ("bad_step", "rank-1"), ("bad_step", "rank-2"),
    ]  # fmt: skip
    assert log.left_out == 3
    for time_s in (20.0, 21.0):
        write(tmp_path, "coordinator", (time_s, "break"))
        log.refresh()
    assert (log.left_out, log.counts) == (5, {"start": 3, "bad_step": 3, "break": 2})


@pytest.mark.parametrize(("process", "tells"), [("rank-0", True), ("rank-7", False), ("coordinator", True)])
def test_only_other_ranks_tell_of_themselves_alone(process, tells):
    assert tells_of_the_run(process) is tells
