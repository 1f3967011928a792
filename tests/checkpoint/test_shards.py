"""Shard files: what was put in comes out, whole or in part, bit for bit."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.checkpoint.boxes import PLACES, Box
from argosy.checkpoint.shards import ShardFile, box_bytes, part_box, wholes, write_shard
from argosy.models.tensor_file import FILE_CODES

DTYPES = list(FILE_CODES)


def in_memory(parts: dict[Box, Tensor], **about: str) -> tuple[int, Path]:
    memory = os.memfd_create("test")
    write_shard(memory, parts, about)
    return memory, Path(f"/proc/self/fd/{memory}")


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (data % 2).bool().view(shape) if dtype == torch.bool else data.view(dtype).view(shape)


@st.composite
def parts(draw: st.DrawFn) -> dict[Box, Tensor]:
    found = {}
    for i in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        whole = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        offset = tuple(draw(st.integers(0, n - 1)) for n in whole)
        shape = tuple(draw(st.integers(0, n - o)) for n, o in zip(whole, offset, strict=True))
        tensor = random_bits(shape, dtype, seed=i)
        found[part_box(f"w{whole}.{dtype}", tensor, whole, offset)] = tensor
    return found


@given(parts(), st.data())
def test_what_is_put_in_comes_out_whole_or_in_part(given_parts: dict[Box, Tensor], data: st.DataObject) -> None:
    memory, path = in_memory(given_parts, step="7")
    with ShardFile(path) as file:
        assert set(file.boxes) == set(given_parts) and file.about == {"step": "7"}
        assert {box: bits(tensor) for box, tensor in file.mapped().items()} == {
            box: bits(tensor) for box, tensor in given_parts.items()
        }
        for box, tensor in given_parts.items():
            assert bits(file.read(box, box)) == bits(tensor)
            start = tuple(data.draw(st.integers(0, max(0, n - 1))) for n in box.shape)
            shape = tuple(data.draw(st.integers(min(1, n), n - s)) for n, s in zip(box.shape, start, strict=True))
            offset = tuple(a + b for a, b in zip(box.offset, start, strict=True))
            part = Box(box.name, box.dtype, box.whole, offset, shape)
            assert bits(file.read(box, part)) == bits(tensor[part.within(box)])
    os.close(memory)


def test_memory_that_was_longer_before_is_as_long_as_the_file(tmp_path: Path) -> None:
    memory, path = in_memory(wholes({"w": torch.zeros(100_000)}))
    small = wholes({"w": torch.arange(3)})
    assert write_shard(memory, small, {}) == path.stat().st_size < 1000
    with ShardFile(path) as file:
        assert file.read(file.boxes[0], file.boxes[0]).tolist() == [0, 1, 2]
    os.close(memory)


def test_whole_tensors_are_what_any_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(5), "c": torch.randn(7).bfloat16()}
    memory, path = in_memory(wholes(tensors, "model."))
    (tmp_path / "copy.safetensors").write_bytes(path.read_bytes())
    found = load_file(tmp_path / "copy.safetensors")
    assert found.keys() == {"model.a", "model.b", "model.c"}
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in tensors.items())
    os.close(memory)


def test_a_live_tensor_of_any_strides_is_copied() -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    memory, path = in_memory({part_box("w", weight.T, (4, 3), (0, 0)): weight.T})
    with ShardFile(path) as file:
        (box,) = file.boxes
        assert torch.equal(file.read(box, box), weight.detach().T)
    os.close(memory)


def test_memory_that_is_short_is_an_error() -> None:
    memory, before = os.memfd_create("test"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shard(memory, wholes({"w": torch.zeros(10_000)}), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    os.close(memory)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ("{", "Invalid JSON"),
        ("[]", "should be an object"),
        ('{"w[0:2]": 7}', r"places cannot be used: w\[0:2\]: Input should be a valid array"),
        ('{"w[0:2]": ["w", [4]]}', "Field required"),
        ('{"w[0:2]": ["w", "4", [0]]}', "should be a valid array"),
        ('{"w[0:2]": ["w", [4.5], [0]]}', "should be a valid integer"),
        ('{"w[0:2]": ["w", [4], [-2]]}', "greater than or equal to 0"),
        ('{"w[0:2]": [7, [4], [0]]}', "should be a valid string"),
        ('{"w[0:2]": ["w", [4], [3]]}', r"put w\[0:2\] of shape \[2\] at \[3\] of w of \[4\]"),
        ('{"w[0:2]": ["w", [4, 4], [0, 0]]}', r"at \[0, 0\] of w of \[4, 4\]"),
    ],
)
def test_places_that_no_box_can_have_are_refused(tmp_path: Path, places: str, message: str) -> None:
    save_file({"w[0:2]": torch.zeros(2)}, tmp_path / "a.safetensors", {PLACES: places})
    with pytest.raises(SafetensorError, match=message):
        ShardFile(tmp_path / "a.safetensors")


def test_the_size_of_a_box() -> None:
    assert box_bytes(Box("w", "bfloat16", (8, 8), (0, 0), (3, 4))) == 24
    assert box_bytes(Box("step", "float32", (), (), ())) == 4
