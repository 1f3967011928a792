"""Weights of two runs are compared bit for bit, whatever dtype they have and however they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from argosy.chaos.weights import weight_differences
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.shards import part_box, wholes, write_shard


def checkpoint(run_dir: Path, step: int, **tensors: torch.Tensor) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "rank-00000.safetensors")
    (folder / "manifest.json").write_text("{}")
    return run_dir


def test_weights_are_compared_bit_for_bit(tmp_path):
    a = torch.randn(3, 4)
    b = a.clone()
    b.view(torch.int32)[1, 2] ^= 1
    same = checkpoint(tmp_path / "a", 5, x=a, y=torch.zeros(2))
    again = checkpoint(tmp_path / "b", 5, x=a, y=torch.zeros(2))
    other = checkpoint(tmp_path / "c", 5, x=b, z=torch.zeros(2))
    assert list(weight_differences(same, again)) == []
    assert list(weight_differences(same, other)) == ["x", "y", "z"]
    assert list(weight_differences(same, tmp_path / "none")) == ["a checkpoint is missing"]
    assert list(weight_differences(same, checkpoint(tmp_path / "d", 6, x=a))) == [
        "the last checkpoints are of steps 5 and 6"
    ]


def sharded(run_dir: Path, *shards: Mapping[Box, torch.Tensor]) -> Path:
    """A checkpoint in files as ranks write them."""
    folder = run_dir / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    for rank, parts in enumerate(shards):
        with (folder / f"rank-{rank:05d}.safetensors").open("w+b") as file:
            write_shard(file.fileno(), parts, {})
    return run_dir


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_tensor_that_is_cut_is_the_same_as_one_that_is_not(tmp_path, dtype):
    tensor, scalar = torch.arange(24).view(4, 6).to(dtype), torch.tensor(3.0)
    whole = sharded(tmp_path / "whole", wholes({"x": tensor, "s": scalar}))
    cuts = [{part_box("x", tensor[:, a:b], (4, 6), (0, a)): tensor[:, a:b]} for a, b in ((0, 2), (2, 6))]
    cut = sharded(tmp_path / "cut", {**cuts[0], **wholes({"s": scalar})}, cuts[1])
    assert list(weight_differences(whole, cut)) == []
    changed = tensor.clone()
    changed.view(torch.uint8)[3, 5] ^= 1
    assert list(weight_differences(cut, sharded(tmp_path / "other", wholes({"x": changed, "s": scalar})))) == ["x"]
