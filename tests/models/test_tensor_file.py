"""Our safetensors files are everybody's, and whatever a file says of itself is right or refused."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from argosy.files import RegularFile
from argosy.models.tensor_file import FILE_CODES, StoredTensor, TensorToWrite, read_header, write_tensors
from mutations import ODD_VALUES

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "half": torch.arange(7).bfloat16(),
    "fp8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "flag": torch.tensor([True, False, True]),
    "step": torch.tensor(7),
    "none": torch.empty(0, 3),
}


def read(path: Path) -> dict[str, StoredTensor]:
    file = RegularFile(path)
    return read_header(str(path), file.size, file.read_into)[0]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_what_the_library_writes_is_read_whole_and_by_rows(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", {"format": "pt"})
    found = read(tmp_path / "a.safetensors")
    assert {name: bits(tensor.read()) for name, tensor in found.items()} == {n: bits(t) for n, t in TENSORS.items()}
    assert torch.equal(found["a.weight"].read(1, 2), TENSORS["a.weight"][1:])
    assert found["step"].shape == ()


def test_what_is_written_part_by_part_the_library_reads(tmp_path: Path) -> None:
    order = [
        TensorToWrite(tuple(t.shape), t.dtype, lambda t=t: t.split(2) if t.ndim else [t]) for t in TENSORS.values()
    ]
    sink = io.BytesIO()
    write_tensors(sink, dict(zip(TENSORS, order, strict=True)), {"format": "pt"})
    found = load(sink.getvalue())
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in TENSORS.items()}
    assert all(found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    for length in range(0, len(whole), 13):
        (tmp_path / "b.safetensors").write_bytes(whole[:length])
        with pytest.raises(SafetensorError, match=r"cut off|header|hole"):
            read(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(SafetensorError, match=r"cut off: \S+ ends at byte [\d,]+, and the file at"):
        read(tmp_path / "b.safetensors")


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_header_says_the_numbers_are_those_of_the_library_or_refused(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    save_file(TENSORS, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = chance.choice(list(header.values()))
    changes: list[Callable[[], None]] = [
        lambda: entry.update(dtype=chance.choice([*FILE_CODES.values(), *ODD_VALUES])),
        lambda: entry.update(shape=chance.choice([[2, 6], [12], [3, 4, 1], [2**62, 4], *ODD_VALUES])),
        lambda: entry["data_offsets"].__setitem__(chance.randrange(2), chance.choice([0, 3, 48, 2**63, *ODD_VALUES])),
        lambda: entry.pop(chance.choice(["dtype", "shape", "data_offsets"])),
    ]
    chance.choice(changes)()
    text = json.dumps(header, default=str).encode()
    changed = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (tmp_path / "b.safetensors").write_bytes(changed)
    try:
        found = {name: bits(tensor.read()) for name, tensor in read(tmp_path / "b.safetensors").items()}
    except SafetensorError:
        return
    assert found == {name: bits(tensor) for name, tensor in load(changed).items()}
