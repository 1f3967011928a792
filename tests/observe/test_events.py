"""Records are appended whole, and a file that was cut off anywhere still gives those that were whole."""

from __future__ import annotations

import time

import pytest

from argosy.observe.events import Events, JsonLines, Tail, read_lines

RECORDS = [{"step": 0, "loss": 5.25}, {"step": 1, "text": "a\nb \N{GREEK SMALL LETTER ALPHA}"}, {"step": 2}]


@pytest.fixture
def lines(tmp_path) -> JsonLines:
    written = JsonLines(tmp_path / "folder" / "lines.jsonl")
    for record in RECORDS:
        written.write(record)
    return written


def test_what_was_written_is_read(lines):
    assert read_lines(lines.path) == RECORDS


def test_there_is_nothing_in_a_file_that_is_not_there(tmp_path):
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_record_is_on_its_way_to_the_disk_when_write_returns(lines):
    assert lines.path.read_text().count("\n") == len(RECORDS)


def test_wherever_the_file_was_cut_off_the_whole_records_count_and_the_next_one_is_not_lost(lines):
    data = lines.path.read_bytes()
    for size in range(len(data)):
        lines.path.write_bytes(data[:size])
        whole = read_lines(lines.path)
        assert whole == RECORDS[: len(whole)]
        assert data[:size].count(b"\n") <= len(whole)
        lines.write({"step": 3})
        assert read_lines(lines.path) == [*whole, {"step": 3}]


def test_an_event_has_its_time_and_its_facts_in_the_file_of_its_process(tmp_path):
    before = time.time()
    Events(tmp_path, "rank-3").write("save", step=7)
    (event,) = read_lines(tmp_path / "events" / "rank-3.jsonl")
    assert (event["event"], event["step"]) == ("save", 7)
    assert before - 0.01 < event["time_s"] < time.time() + 0.01


def test_a_tail_gives_what_is_new_and_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    assert tail.read() == [{"step": 0}, {"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert tail.read() == [{"step": 2}] and tail.read() == []
    path.write_bytes(b'{"step": 0}\n')
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b'{"step": 1}\n')
    assert tail.read() == [{"step": 1}], "of a file that became shorter, what comes then"
