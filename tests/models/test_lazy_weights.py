"""Of a model of any size, no more is in memory on its way in or out than two of its tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from argosy.config.layers import preset_layer, preset_path
from argosy.config.load import build as build_config
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.models import hf, tensor_file
from argosy.models.hf_names import conversions_of, their_shapes
from argosy.models.lazy_weights import FolderWeights, HeldWeights
from argosy.models.tensor_file import FILE_CODES, FILE_DTYPES, StoredTensor
from argosy.plan.parameters import state_table

GIB = 2**30


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of tensors, also of those without memory, that exist at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._saw(tensor.untyped_storage())
        return result

    def _saw(self, memory: torch.UntypedStorage) -> None:
        if memory._cdata not in self._known:
            self._known.add(memory._cdata)
            self.bytes += memory.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(memory, self._freed, memory._cdata, memory.nbytes())

    def _freed(self, memory: int, size: int) -> None:
        self._known.discard(memory)
        self.bytes -= size


class WithoutNumbers:
    """Stands in for the bytes of a tensor that has no memory."""

    def __init__(self, size: int):
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, some: slice) -> WithoutNumbers:
        return WithoutNumbers(len(range(*some.indices(self._size))))


class Counted:
    """A folder that keeps nothing of what is written to it."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}

    @contextmanager
    def file(self, name: str) -> Iterator[Any]:
        self._name = name
        self.files[name] = 0
        yield self

    def write(self, data: Any) -> None:
        self.files[self._name] += len(data)


class OnMeta(StoredTensor):
    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        shape = self.shape if count is None else (count, *self.shape[1:])
        return torch.empty(shape, dtype=FILE_DTYPES[self.code], device="meta")


def preset(name: str) -> ModelConfig:
    return build_config(RunConfig, preset_layer(preset_path("models", name))).model


@pytest.mark.parametrize(
    "name", ["llama3.1-70b", pytest.param("gpt-oss-120b", marks=pytest.mark.slow), "phi4", "deepseek-v2-lite"]
)
def test_two_tensors_are_in_memory_at_most_while_a_model_goes_in_and_out(name, monkeypatch):
    config = preset(name)
    shapes = {name: parameter.shape for name, parameter in state_table(config).items()}
    pieces = conversions_of(config)
    theirs = {n: s for piece in pieces for n, s in zip(piece.theirs, their_shapes(piece, shapes), strict=True)}
    stored = {n: OnMeta("model.safetensors", n, s, "BF16", 0, lambda *_: None) for n, s in theirs.items()}
    monkeypatch.setattr(tensor_file, "bytes_of", lambda tensor: WithoutNumbers(tensor.nbytes))
    largest = 2 * max(map(math.prod, (*theirs.values(), *shapes.values())))
    weights, folder, memory = FolderWeights(pieces, stored, shapes), Counted(), LiveMemory()
    tensors = dict(hf.tensors_to_write(weights, config, shapes, None))
    with memory, torch.device("meta"):
        for ours in weights:  # as an import reads them
            for part in weights.in_parts(ours):
                del part
        hf.write_weights(folder, tensors, None)
    total = 2 * sum(map(math.prod, theirs.values()))
    assert total <= sum(folder.files.values()) < 1.001 * total
    assert len(folder.files) > total / hf.SHARD_BYTES
    assert 0 < memory.peak <= 2 * largest + GIB


def test_a_weight_comes_in_parts_that_make_it_up(monkeypatch):
    monkeypatch.setattr("argosy.models.lazy_weights.TENSOR_READ_BYTES", 100)
    weight = torch.randn(11, 7)
    parts = list(HeldWeights({"w": weight}).in_parts("w"))
    assert len(parts) > 3 and torch.equal(torch.cat(parts), weight)
    assert FILE_CODES[weight.dtype] == "F32"
