"""Records are appended whole, and a file that was cut off anywhere still gives those that were whole."""

from __future__ import annotations

import resource
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

from argosy.accelerator import forget_peak_memory, peak_memory_bytes
from argosy.errors import ArgosyWarning
from argosy.observe.events import Events, JsonLines, Metrics, each_line, from_the_end, read_lines
from argosy.observe.line_follower import TAIL_BYTES, LineFollower
from argosy.observe.records import MOST_LINE_BYTES

RECORDS = [{"step": 0, "loss": 5.25}, {"step": 1, "text": "a\nb \N{GREEK SMALL LETTER ALPHA}"}, {"step": 2}]


@pytest.fixture
def lines(tmp_path) -> JsonLines:
    written = JsonLines(tmp_path / "folder" / "lines.jsonl")
    for record in RECORDS:
        written.write(record)
    return written


def test_a_number_that_is_not_finite_is_null_in_lists_too(tmp_path):
    JsonLines(tmp_path / "lines.jsonl").write({"own": [(3, [1.0, float("nan")])], "loss": float("inf")})
    assert read_lines(tmp_path / "lines.jsonl") == [{"own": [[3, [1.0, None]]], "loss": None}]


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


def test_a_disk_without_room_for_a_line_keeps_no_part_of_it(lines):
    before, limits = lines.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))  # files can grow by 5 bytes
    try:
        with pytest.warns(ArgosyWarning, match="a record is lost"):
            lines.write({"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lines.path.read_bytes() == before
    lines.write({"step": 4})
    assert read_lines(lines.path) == [*RECORDS, {"step": 4}]


def test_an_event_has_its_time_and_its_facts_in_the_file_of_its_process(tmp_path):
    before = time.time()
    Events(tmp_path, "rank-3").write("save", step=7)
    (event,) = read_lines(tmp_path / "events" / "rank-3.jsonl")
    assert (event["event"], event["step"]) == ("save", 7)
    assert before - 0.01 < event["time_s"] < time.time() + 0.01


@pytest.mark.parametrize("size", [1, 7, 12, 13, 1000])
def test_records_come_from_the_end_as_they_come_from_the_beginning(tmp_path, monkeypatch, size):
    monkeypatch.setattr("argosy.observe.events.EVENTS_READ_BYTES", size)
    path = tmp_path / "lines.jsonl"
    assert list(from_the_end(path)) == list(each_line(path)) == []
    path.write_bytes(b'{"step": 0}\n\nno json\n[1]\n{"step": 1, "text": "\xc3\xa9"}\n{"step": 2}')
    assert list(each_line(path)) == [{"step": 0}, {"step": 1, "text": "\u00e9"}, {"step": 2}]
    assert list(from_the_end(path)) == list(each_line(path))[::-1]


def test_records_one_at_a_time_take_no_memory_for_the_others(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1, "text": "%s"}\n' % (b"x" * 500) * 20_000)
    tracemalloc.start()
    assert sum(record["step"] for record in each_line(path)) == 20_000
    assert next(from_the_end(path))["step"] == 1
    assert LineFollower.near_end(path).take()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * TAIL_BYTES < path.stat().st_size


def test_a_line_without_end_is_no_record_and_takes_little_memory(tmp_path):
    path = tmp_path / "lines.jsonl"
    with path.open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.truncate(8 * MOST_LINE_BYTES)  # zeros: a foreign folder may hold any number of them
    tracemalloc.start()
    assert list(each_line(path)) == list(from_the_end(path)) == [{"step": 1}]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MOST_LINE_BYTES


@pytest.fixture
def metrics(tmp_path) -> Metrics:
    written = Metrics(tmp_path)
    for step in range(6):
        written.write({"step": step, "loss": 6.0 - step})
        if step % 2:
            written.write({"step": step, "validation_loss": 7.0 - step})
    return written


def steps(metrics: Metrics, key: str) -> list[int]:
    return [record["step"] for record in metrics.read() if key in record]


@pytest.mark.parametrize("resumed_at", [0, 3, 6, 100])
def test_steps_that_are_run_again_are_forgotten_with_their_evaluations(metrics, resumed_at):
    metrics.forget_from(resumed_at)
    assert steps(metrics, "loss") == [step for step in range(6) if step < resumed_at]
    assert steps(metrics, "validation_loss") == [step for step in (1, 3, 5) if step < resumed_at]


def test_an_evaluation_that_came_late_hides_no_step_that_is_run_again_and_is_kept(metrics):
    metrics.write({"step": 3, "validation_loss": 3.0})  # after the line of step 5
    metrics.forget_from(4)
    assert steps(metrics, "loss") == [0, 1, 2, 3]
    assert steps(metrics, "validation_loss") == [1, 3, 3]


def test_a_line_cut_off_by_a_kill_is_forgotten_too(metrics):
    with metrics.path.open("a") as file:
        file.write('{"step": 3, "lo')
    metrics.forget_from(4)
    metrics.write({"step": 4, "loss": 0.0})
    assert steps(metrics, "loss") == [0, 1, 2, 3, 4]


def test_nothing_is_forgotten_of_a_run_that_has_not_begun(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.forget_from(0)
    assert metrics.read() == [] and not metrics.path.exists()


def test_peak_memory_is_what_the_system_says():
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(peak_kib * 1024, rel=0.05)


def test_the_peak_of_memory_can_begin_anew():
    device = torch.device("cpu")
    large = bytearray(b"x" * 2**28)
    assert len(large) < peak_memory_bytes(device)
    del large
    before = peak_memory_bytes(device)
    forget_peak_memory(device)
    assert peak_memory_bytes(device) < before - 2**27


def test_it_is_known_what_was_written_of_the_last_steps(metrics):
    assert metrics.has(5, "validation_loss") and not metrics.has(4, "validation_loss")
    assert metrics.has(4, "loss") and not metrics.has(6, "loss")


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**16])
@pytest.mark.parametrize("resumed_at", [0, 3, 6])
def test_a_file_is_read_backwards_in_pieces_of_any_size(metrics, monkeypatch, chunk, resumed_at):
    monkeypatch.setattr("argosy.observe.events.EVENTS_READ_BYTES", chunk)
    assert [record["step"] for record in metrics.last(4)] == [2, 3, 4, 5]
    metrics.forget_from(resumed_at)
    assert [record["step"] for record in metrics.last(100)] == list(range(resumed_at))
    assert steps(metrics, "validation_loss") == [step for step in (1, 3, 5) if step < resumed_at]


def test_who_may_not_write_any_more_adds_nothing(tmp_path):
    in_force = True
    metrics = Metrics(tmp_path, lambda: in_force)
    metrics.write({"step": 0})
    in_force = False
    metrics.write({"step": 1})
    assert metrics.read() == [{"step": 0}]
