"""NCCL's flight recorder is asked through the pipe that torch makes. (Torch's side of it needs GPUs.)"""

from __future__ import annotations

import os

from argosy.supervise import flight_recorder


def test_ranks_that_have_a_pipe_are_asked_and_others_are_left_alone(tmp_path):
    pipe = tmp_path / "flight-3.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    flight_recorder.ask(tmp_path / "stacks", tmp_path, [2, 3, None])
    assert os.read(reader, 9) == b"1" and (tmp_path / "stacks" / "flight").is_dir()
    os.close(reader)
    flight_recorder.ask(tmp_path / "stacks", tmp_path, [3])  # nobody reads: the agent does not wait


def test_what_the_user_has_set_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    found = flight_recorder.environment(tmp_path / "stacks", tmp_path)
    assert "TORCH_FR_BUFFER_SIZE" not in found
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "flight-")
