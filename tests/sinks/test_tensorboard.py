"""TensorBoard's own reader reads what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from argosy.sinks.worker import SinkSession
from run_folder import RunFolder


def read(path: Path) -> EventAccumulator:
    found = EventAccumulator(str(path), size_guidance={"scalars": 0})
    found.Reload()
    return found


def scalars(path: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(path).Scalars(tag)]


def test_all_that_a_run_writes_is_there(tmp_path):
    run = RunFolder(tmp_path)
    told = SinkSession(tmp_path, "tensorboard")
    run.step(0, 1, sample_ranges=[[0, 4]])
    run.evaluation(1, 3.5, validation_accuracy=0.75)
    run.event("recovered", step=1)
    run.sample(1, " upon a time")
    told.catch_up()
    found = read(tmp_path / "tensorboard")
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(0, 0.0), (1, 1.0)]
    assert scalars(tmp_path / "tensorboard", "validation/loss") == [(1, 3.5)]
    assert scalars(tmp_path / "tensorboard", "validation/accuracy") == [(1, 0.75)]
    assert scalars(tmp_path / "tensorboard", "seconds/forward") == [(0, pytest.approx(0.2)), (1, pytest.approx(0.2))]
    assert found.Scalars("train/loss")[1].wall_time == 1.8e9 + 1
    assert not [tag for tag in found.Tags()["scalars"] if "sample" in tag], "they say which step it is"
    texts = {tag: found.Tensors(tag) for tag in ("run", "plan", "events", "samples")}
    assert b"upon a time" in texts["samples"][0].tensor_proto.string_val[0]
    assert b"recovered" in texts["events"][0].tensor_proto.string_val[0]
    told.close()


def test_steps_that_were_lost_are_there_once_with_their_new_values(tmp_path):
    run = RunFolder(tmp_path)
    told = SinkSession(tmp_path, "tensorboard")
    run.step(*range(6))
    run.evaluation(5, 3.0)
    told.catch_up()
    run.lose_from(3)
    run.step(3, 4, loss=9.0)
    told.catch_up()
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(0, 0), (1, 1), (2, 2), (3, 9), (4, 9)]
    assert scalars(tmp_path / "tensorboard", "validation/loss") == []


def test_a_run_that_goes_on_goes_on_in_the_same_folder(tmp_path):
    run = RunFolder(tmp_path)
    first = SinkSession(tmp_path, "tensorboard")
    run.step(0, 1)
    first.catch_up()
    kept = (tmp_path / "sinks/tensorboard.json").read_text()
    run.step(2)
    first.catch_up()
    (tmp_path / "sinks/tensorboard.json").write_text(kept)  # it was killed before it could note that
    second = SinkSession(tmp_path, "tensorboard")
    run.step(3)
    second.catch_up()
    second.close()
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(0, 0), (1, 1), (2, 2), (3, 3)]
