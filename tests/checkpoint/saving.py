"""A small state, and what it takes to save it and to see what was saved."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.checkpoint import store
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.checksums import file_sum, shard_name
from argosy.checkpoint.load import load_into
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.save import Saver
from argosy.checkpoint.shards import wholes
from argosy.checkpoint.store import MANIFEST, VERIFIED, Checkpoint
from argosy.checkpoint.writer import Upkeep
from argosy.parallel.world import World

ALONE = World()
WIDTH = 20_000
KEEP_ALL = Upkeep(keep_last=1000)


def state(value: float, rank: int = 0) -> dict[Box, Tensor]:
    """Some matrices that all ranks share, and something of each rank's own."""
    shared = {f"layer{i}": torch.full((WIDTH,), float(value + i)) for i in range(4)}
    own = {f"rank{rank}": torch.full((8,), rank, dtype=torch.uint8)}
    return wholes(shared, "model.") | wholes(own, "rng.")


def manifest(step: int, **facts: Any) -> CheckpointManifest:
    rest = {"tokens": 0, "saved_at_s": 0.0, "plan": "", "data_identity": "", "has_optimizer": True, "files": {}}
    return CheckpointManifest(step=step, **rest | facts)


def saved(run_dir: Path) -> dict[int, dict[Box, Tensor]]:
    """Step -> the state in its checkpoint, of all that are committed; each must be whole."""
    found = {}
    for checkpoint in store.committed(run_dir):
        checkpoint.verify()
        found[checkpoint.step] = state(-1.0)
        load_into(found[checkpoint.step], checkpoint)
    return found


class Saving:
    """A saver that is waited for, and what it said."""

    def __init__(self, run_dir: Path, world: World = ALONE, upkeep: Upkeep = KEEP_ALL):
        self.news: list[tuple[str, dict[str, Any]]] = []
        self.saver = Saver(run_dir, world, self._hear, upkeep)
        self._rank = world.rank

    def save(self, value: float, step: int, wait: bool = True) -> None:
        self.saver.save(state(value, self._rank), manifest(step))
        if wait:
            self.saver.wait()

    def close(self) -> None:
        self.saver.close()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [facts for news, facts in self.news if news == kind]

    def _hear(self, news: str, /, **facts: Any) -> None:
        self.news.append((news, facts))


@contextmanager
def a_disk_that_fails_past(size: int, pid: int | None) -> Iterator[None]:
    """No file of the process `pid` grows beyond `size` bytes: writing more fails, as on a full disk."""
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def flip_a_bit(path: Path, bit: int) -> None:
    """Change one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def rewrite(checkpoint: Checkpoint, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    """Change tensors and metadata of a checkpoint's first file, so that all checksums are right."""
    path = checkpoint.folder / shard_name(0)
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    files = {**checkpoint.manifest.files, path.name: file_sum(path)}
    (checkpoint.folder / VERIFIED).unlink(missing_ok=True)
    (checkpoint.folder / MANIFEST).write_bytes(replace(checkpoint.manifest, files=files).to_bytes())
