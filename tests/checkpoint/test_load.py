"""A checkpoint is read by any number of processes under any layout, whole or in part."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from argosy.checkpoint import fence, load, store
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.checksums import DamagedCheckpoint, file_sum, shard_name
from argosy.checkpoint.load import load_into, missing_from, problem_of
from argosy.checkpoint.save import Saver
from argosy.checkpoint.shards import ShardFile, part_box, wholes
from argosy.checkpoint.store import Checkpoint
from argosy.errors import UserError
from argosy.parallel.world import World
from checkpoint.saving import ALONE, manifest

MODEL = {"a": torch.arange(60.0).view(10, 6), "b": torch.arange(5.0)}


def cut(rank: int, size: int, dim: int) -> dict[Box, Tensor]:
    """A rank's rows, or columns, of `a`, as evenly as they go; all have all of `b`, and a number of their own."""
    whole = MODEL["a"]
    length = -(-whole.shape[dim] // size)
    start = min(rank * length, whole.shape[dim])
    part = whole.narrow(dim, start, min(length, whole.shape[dim] - start)).clone()
    offset = (start, 0) if dim == 0 else (0, start)
    own = torch.tensor([rank + 1], dtype=torch.uint8)
    return {part_box("model.a", part, whole.shape, offset): part} | wholes(
        {"model.b": MODEL["b"], f"rng.rank{rank}": own}
    )


def write(world: World, run_dir: Path, dim: int = 0) -> None:
    saver = Saver(run_dir, world, lambda news, **facts: None)
    saver.save(cut(world.rank, world.size, dim), manifest(1))
    saver.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    write(ALONE, tmp_path)
    return store.find(tmp_path, problem_of)


def read(world: World, run_dir: Path, dim: int) -> tuple[bool, list[int]]:
    """True if the model came back, and this rank's own number."""
    expected = cut(world.rank, world.size, dim)
    blank = {box: torch.zeros_like(tensor) for box, tensor in expected.items()}
    load_into(blank, store.find(run_dir, problem_of))
    same = all(torch.equal(blank[box], tensor) for box, tensor in expected.items() if box.name.startswith("model."))
    return same, blank[next(box for box in blank if box.name.startswith("rng."))].tolist()


@pytest.mark.parametrize(
    ("writers", "readers", "dims"), [(1, 2, (0, 1)), (2, 1, (1, 0)), (3, 4, (0, 0)), (4, 2, (0, 1)), (3, 2, (1, 0))]
)
def test_any_number_of_processes_reads_what_any_number_wrote(workers, tmp_path, writers, readers, dims):
    workers.run(writers, write, tmp_path, dims[0])
    for rank, (same, own) in enumerate(workers.run(readers, read, tmp_path, dims[1])):
        assert same
        assert own == ([rank + 1] if rank < writers else [0])


def test_a_checkpoint_of_more_files_than_a_process_may_have_by_default_is_read(tmp_path: Path) -> None:
    rows = {f"row{number}": torch.full((2,), float(number)) for number in range(100)}
    folder, files = fence.partial_folder(tmp_path, 1, 0), {}
    folder.mkdir(parents=True)
    for rank, (name, row) in enumerate(rows.items()):
        save_file({f"model.{name}": row}, folder / shard_name(rank))
        files[shard_name(rank)] = file_sum(folder / shard_name(rank))
    found, blank = store.commit(folder, manifest(1, files=files)), {name: torch.zeros(2) for name in rows}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 50, before[1]))
    try:
        load_into(wholes(blank, "model."), found)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(torch.equal(blank[name], row) for name, row in rows.items())


def test_no_more_of_a_tensor_than_a_piece_is_in_memory_twice(checkpoint, monkeypatch):
    read_bytes, read = [], ShardFile.read

    def watched(file: ShardFile, box: Box, part: Box) -> Tensor:
        tensor = read(file, box, part)
        read_bytes.append(tensor.untyped_storage().nbytes())
        return tensor

    monkeypatch.setattr(ShardFile, "read", watched)
    monkeypatch.setattr(load, "TENSOR_PIECE_BYTES", 48)
    live = torch.zeros(10, 6)
    load_into(wholes({"model.a": live}), checkpoint)
    assert torch.equal(live, MODEL["a"]) and read_bytes == [48] * 5


def test_tensors_are_filled_in_place_and_in_their_own_dtype(checkpoint):
    live, half = torch.nn.Parameter(torch.zeros(10, 6)), torch.zeros(5, dtype=torch.float16)
    load_into(wholes({"model.a": live, "model.b": half}), checkpoint)
    assert torch.equal(live, MODEL["a"]) and live.requires_grad
    assert half.tolist() == MODEL["b"].tolist()


def test_a_part_may_be_read_alone_and_the_rest_is_left_as_it_is(checkpoint):
    found, other = torch.zeros(5), torch.full((5,), 7.0)
    load_into(wholes({"model.b": found, "optimizer.b": other}), checkpoint)
    assert torch.equal(found, MODEL["b"])
    assert other.tolist() == [7.0] * 5


def test_nothing_is_missing_from_a_checkpoint_of_the_same_state(checkpoint):
    assert missing_from(wholes(MODEL, "model."), checkpoint) == []
    assert missing_from(cut(1, 3, dim=1) | wholes({"model.b": MODEL["b"]}), checkpoint) == ["rng.rank1 is not there"]


def test_what_is_missing_or_of_another_shape_is_said_and_nothing_is_read(checkpoint):
    b = torch.zeros(5)
    other = wholes({"a": torch.zeros(10, 5), "b": b, "c": torch.zeros(2)}, "model.")
    assert missing_from(other, checkpoint) == [
        "model.a is [10, 6] there and [10, 5] here",
        "model.c is not there",
    ]
    with pytest.raises(UserError, match=r"does not fit: model\.a is \[10, 6\] there"):
        load_into(other, checkpoint)
    assert not b.any()


def test_a_file_that_is_no_shard_file_is_named(checkpoint):
    (checkpoint.folder / shard_name(0)).write_bytes(b"\xff" * 100)
    with pytest.raises(DamagedCheckpoint, match=r"file rank-00000\.safetensors cannot be read"):
        load_into(wholes(MODEL, "model."), checkpoint)
