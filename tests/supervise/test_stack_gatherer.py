"""The agent answers requests for stacks, and nothing that only looks like one disturbs it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from argosy.supervise.stack_gatherer import (
    COLLECT_S,
    MOST_REQUEST_BYTES,
    REQUEST_EVERY_S,
    REQUEST_OLD_S,
    STACKS_FOLDER,
    STACKS_REQUEST,
    StackGatherer,
    ask_flight_recorders,
    flight_environment,
)


def look(run_dir: Path, gatherer: StackGatherer, times: int = 3) -> list[str]:
    """Let an agent without workers look; return the answers that there are."""
    for turn in range(times):
        gatherer.keep(100.0 + turn * (REQUEST_EVERY_S + COLLECT_S), run_dir, [])
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.json") if path.name != STACKS_REQUEST)


def write(run_dir: Path, text: str) -> Path:
    (run_dir / STACKS_FOLDER).mkdir(exist_ok=True)
    (run_dir / STACKS_FOLDER / STACKS_REQUEST).write_text(text)
    return run_dir / STACKS_FOLDER / STACKS_REQUEST


def test_a_request_is_answered_once(tmp_path):
    write(tmp_path, '{"name": "17-ab"}')
    gatherer = StackGatherer(tmp_path, "node")
    assert look(tmp_path, gatherer) == ["stacks/17-ab/node.json"]
    answer = tmp_path / STACKS_FOLDER / "17-ab" / "node.json"
    assert json.loads(answer.read_text())["workers"] == []
    answer.unlink()
    assert look(tmp_path, gatherer) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "../outside"}',
        '{"name": 3}',
        '{"name": ["a"]}',
        "{}",
        "[]",
        "null",
        "",
        "[" * MOST_REQUEST_BYTES,
        "\0\udcff",
    ],
    ids=["path", "number", "list", "no name", "array", "null", "empty", "deep", "bytes"],
)
def test_what_is_no_request_is_left_alone(tmp_path, text):
    write(tmp_path, "").write_bytes(text.encode(errors="surrogateescape"))
    assert look(tmp_path, StackGatherer(tmp_path, "node")) == []


def test_an_old_request_a_link_and_a_pipe_are_left_alone(tmp_path):
    request = write(tmp_path, '{"name": "17-ab"}')
    os.utime(request, (time.time() - REQUEST_OLD_S - 1,) * 2)
    assert look(tmp_path, StackGatherer(tmp_path, "node")) == []
    (tmp_path / "elsewhere").write_text('{"name": "17-ab"}')
    request.unlink()
    request.symlink_to(tmp_path / "elsewhere")
    assert look(tmp_path, StackGatherer(tmp_path, "node")) == []
    request.unlink()
    os.mkfifo(request)
    assert look(tmp_path, StackGatherer(tmp_path, "node")) == []


def test_an_answer_that_cannot_be_written_disturbs_nobody(tmp_path):
    write(tmp_path, '{"name": "17-ab"}')
    (tmp_path / STACKS_FOLDER / "17-ab").write_text("a file in the way")
    assert look(tmp_path, StackGatherer(tmp_path, "node")) == []


def test_ranks_that_have_a_pipe_are_asked_and_others_are_left_alone(tmp_path):
    pipe = tmp_path / "flight-3.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ask_flight_recorders(tmp_path / "stacks", tmp_path, [2, 3, None])
    assert os.read(reader, 9) == b"1" and (tmp_path / "stacks" / "flight").is_dir()
    os.close(reader)
    ask_flight_recorders(tmp_path / "stacks", tmp_path, [3])  # nobody reads: the agent does not wait


def test_what_the_user_has_set_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    found = flight_environment(tmp_path / "stacks", tmp_path)
    assert "TORCH_FR_BUFFER_SIZE" not in found
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "flight-")
