"""A checkpoint is read by any number of processes, whole or in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint import store
from argosy.checkpoint.load import load_into, missing_from
from argosy.checkpoint.save import Saver
from argosy.checkpoint.store import Checkpoint, CheckpointManifest
from argosy.parallel.world import World

ALONE = World()
MODEL = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5.0)}


def state(world: World = ALONE, **model: torch.Tensor) -> dict[str, Any]:
    """A blank state of the shapes that `write` writes."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
    return {"model": blank | model, "rng": {f"rank{world.rank}": torch.zeros(1, dtype=torch.uint8)}}


def write(world: World, run_dir: Path) -> None:
    facts = {"tokens": 0, "saved_at_s": 0.0, "plan": "", "data_identity": "", "has_optimizer": False, "files": {}}
    full = {"model": MODEL, "rng": {f"rank{world.rank}": torch.tensor([world.rank + 1], dtype=torch.uint8)}}
    Saver(run_dir, world, lambda result: None).save(full, CheckpointManifest(step=1, **facts), background=False)


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    write(ALONE, tmp_path)
    return store.find(tmp_path)


def read(world: World, run_dir: Path) -> dict[str, Any]:
    blank = state(world)
    load_into(blank, store.find(run_dir), world)
    return {name: tensor.tolist() for name, tensor in {**blank["model"], **blank["rng"]}.items()}


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_any_number_of_processes_reads_what_any_number_wrote(workers, tmp_path, writers, readers):
    workers.run(writers, write, tmp_path)
    for rank, found in enumerate(workers.run(readers, read, tmp_path)):
        assert {name: found[name] for name in MODEL} == {name: tensor.tolist() for name, tensor in MODEL.items()}
        assert found[f"rank{rank}"] == ([rank + 1] if rank < writers else [0])


def test_tensors_are_filled_in_place(checkpoint):
    live = torch.nn.Parameter(torch.zeros(3, 4))
    load_into({"model": {"a": live}}, checkpoint, ALONE)
    assert torch.equal(live, MODEL["a"]) and live.requires_grad


def test_a_part_may_be_read_alone_and_the_rest_is_left_as_it_is(checkpoint):
    part = {"model": {"b": torch.zeros(5)}, "optimizer": {"b": torch.full((5,), 7.0)}}
    load_into(part, checkpoint, ALONE)
    assert torch.equal(part["model"]["b"], MODEL["b"])
    assert part["optimizer"]["b"].tolist() == [7.0] * 5


def test_nothing_is_missing_from_a_checkpoint_of_the_same_state(checkpoint):
    assert missing_from(state(), checkpoint) == []


def test_what_is_missing_or_of_another_shape_is_said(checkpoint):
    other = state(a=torch.zeros(3, 5), c=torch.zeros(2))
    assert missing_from(other, checkpoint) == [
        "model.a is [3, 4] there and [3, 5] here",
        "model.c is not in it",
    ]
