"""The lines of a file, as they come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.observe import line_follower
from argosy.observe.line_follower import DENSE, Following, LineFollower


def add(path: Path, *steps: int, loss: float = 1.0) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step in steps)


def steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


def test_only_what_is_new_and_complete_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = LineFollower(path, by_line=True)
    assert lines.take() == []
    add(path, 0, 1)
    assert steps(lines.take()) == [0, 1]
    add(path, 2)
    with path.open("a") as file:
        file.write('{"step": 3')
    assert steps(lines.take()) == [2]
    with path.open("a") as file:
        file.write("}\nbroken\n")
    assert steps(lines.take()) == [3]
    assert lines.take() == []


@pytest.mark.parametrize("again", [(1,), (1, 2), (1, 2, 3, 4)], ids=["shorter", "as long", "longer"])
def test_steps_that_were_forgotten_and_run_again_are_told_again(tmp_path, again):
    path = tmp_path / "metrics.jsonl"
    add(path, 0)
    lines = LineFollower(path, by_line=True)
    add(path, 1, 2)
    assert steps(lines.take()) == [0, 1, 2]
    path.write_text("")
    add(path, 0)
    add(path, *again, loss=2.0)
    assert steps(lines.take()) == list(again)
    add(path, 9)
    assert steps(lines.take()) == [9]


def test_a_reader_that_was_restarted_goes_on_where_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    add(path, *range(1000))
    lines = LineFollower(path, by_line=True)
    assert steps(lines.take(most=900)) == list(range(900))
    again = LineFollower(path, by_line=True, marks=json.loads(json.dumps(lines.marks())))
    assert steps(again.take()) == list(range(900, 1000))
    assert not again.was_cut


@pytest.mark.parametrize("left", [995, 700, 3, 0])
def test_a_reader_that_was_restarted_sees_that_lines_were_lost_meanwhile(tmp_path, left):
    path = tmp_path / "metrics.jsonl"
    add(path, *range(1000))
    lines = LineFollower(path, by_line=True)
    lines.take()
    marks = lines.marks()
    assert len(marks) <= DENSE * 6
    path.write_text("")
    add(path, *range(left))
    add(path, *range(left, 1002), loss=2.0)
    again = LineFollower(path, by_line=True, marks=marks)
    told = again.take()
    assert again.was_cut
    assert steps(told)[-1] == 1001
    assert steps(told)[0] <= left
    assert left - steps(told)[0] <= max(1, (1000 - left) * 2)  # some that did not change may be told again
    assert (again.kept or {"step": -1})["step"] == steps(told)[0] - 1


def test_a_file_that_is_gone_is_unchanged_until_another_has_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    add(path, 0)
    lines = LineFollower(path, by_line=True)
    lines.take()
    path.unlink()
    assert lines.take() == [] and not lines.was_cut and lines.is_missing
    add(path, 0, loss=2.0)
    assert steps(lines.take()) == [0] and lines.was_cut and lines.kept is None


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"step": 0}\n{"step": 1}\n')
    assert steps(LineFollower(path).take()) == [0, 1]


def test_a_file_that_cannot_be_read_has_nothing_new(tmp_path):
    (tmp_path / "folder").mkdir()
    assert LineFollower(tmp_path / "folder").take() == []


@pytest.mark.parametrize("by_line", [True, False])
def test_a_line_that_is_too_long_is_passed_over(tmp_path, monkeypatch, by_line):
    monkeypatch.setattr(line_follower, "LONGEST_RECORD_BYTES", 10_000)
    monkeypatch.setattr(line_follower, "LINE_READ_BYTES", 4_000)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * 30_000 + b'\n{"step": 1}\n')
    lines = LineFollower(path, by_line=by_line)
    assert steps(lines.take()) == [1] and lines.unread_bytes() == 0


def test_blocks_are_read_again_as_they_were_and_notes_go_back_with_a_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(line_follower, "LINE_READ_BYTES", 100)
    path = tmp_path / "lines.jsonl"
    add(path, *range(20))
    lines = LineFollower(path)
    blocks = []
    for number, block in enumerate(lines.blocks()):
        blocks.append(block)
        lines.note = float(number)
    assert b"".join(blocks) == path.read_bytes() and len(blocks) > 3
    assert b"".join(lines.again()) == path.read_bytes()
    path.write_bytes(b"".join(blocks[:2]) + b'{"step": 77}\n' * 40)
    assert lines.forget_what_is_gone() and lines.note == 1.0 and lines.end == len(b"".join(blocks[:2]))
    assert not lines.forget_what_is_gone()


def test_near_the_end_what_is_new_and_whole_is_read(tmp_path):
    path = tmp_path / "lines.jsonl"
    tail = LineFollower.near_end(path)
    assert tail.take() == []
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    assert tail.take() == [{"step": 0}, {"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert tail.take() == [{"step": 2}] and tail.take() == []
    path.write_bytes(b'{"step": 0}\n')
    assert tail.take() == []
    with path.open("ab") as file:
        file.write(b'{"step": 1}\n')
    assert tail.take() == [{"step": 1}], "of a file that became shorter, what comes then"


def test_near_the_end_of_what_is_long_only_the_end_is_read(tmp_path):
    """A coordinator that is started late in a run needs the last steps, not a million."""
    path = tmp_path / "lines.jsonl"
    lines = [f'{{"step": {step}}}\n'.encode() for step in range(10_000)]
    path.write_bytes(b"".join(lines))
    tail = LineFollower.near_end(path, 1000)
    first = steps(tail.take())
    assert first[-1] == 9999 and first == list(range(first[0], 10_000)) and 50 < len(first) <= 1000 // len(lines[-1])
    assert tail.take() == []
    with path.open("ab") as file:
        file.write(b"".join(lines) + b'{"st')
    late = steps(tail.take())
    assert late[-1] == 9999 and late == list(range(late[0], 10_000)) and len(late) < 100
    with path.open("ab") as file:
        file.write(b'ep": 1}\n')
    assert tail.take() == [{"step": 1}]
    assert len(tail.marks()) < 200, "what it remembers is bounded"


def test_near_the_end_a_line_without_end_is_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * 5000)
    tail = LineFollower.near_end(path, 1000)
    assert tail.take() == []
    with path.open("ab") as file:
        file.write(b'\n{"step": 1}\n')
    assert tail.take() == [{"step": 1}]


def test_the_last_lines_are_told_before_the_block_ends(tmp_path):
    told = []
    with Following(tmp_path, told.append, stop=lambda: None):
        add(tmp_path / "metrics.jsonl", 0, 1)
    assert steps(told) == [0, 1]


def test_an_error_of_the_caller_stops_the_run_and_is_raised(tmp_path):
    stopped = []

    def fail(record: dict[str, Any]) -> None:
        raise StopIteration("mine")

    with (
        pytest.raises(StopIteration, match="mine"),
        Following(tmp_path, fail, stop=lambda: stopped.append(1)),
    ):
        add(tmp_path / "metrics.jsonl", 0, 1)
    assert len(stopped) == 1
