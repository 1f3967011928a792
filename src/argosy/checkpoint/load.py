"""Reading a committed checkpoint back, whole or only the model."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from argosy.checkpoint.store import Checkpoint
from argosy.parallel.world import World


def load_into(state: dict[str, Any], checkpoint: Checkpoint, world: World) -> None:
    """Fill the tensors of `state` (nested dicts) in place; what the checkpoint does not hold stays as it is.

    All ranks call it together. The checkpoint may have been written by any number of processes.
    """
    reader = dcp.FileSystemReader(checkpoint.folder)
    saved = reader.read_metadata().state_dict_metadata
    wanted = {name: tensor for name, tensor in _flat(state).items() if name in saved}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a world of one is no mistake
        dcp.load(wanted, storage_reader=reader, no_dist=world.size == 1)


def missing_from(state: dict[str, Any], checkpoint: Checkpoint) -> list[str]:
    """What of `state` the checkpoint does not hold, or holds in another shape, in words."""
    saved = dcp.FileSystemReader(checkpoint.folder).read_metadata().state_dict_metadata
    problems = []
    for name, tensor in _flat(state).items():
        entry = saved.get(name)
        size = getattr(entry, "size", None)
        if entry is None:
            problems.append(f"{name} is not in it")
        elif size is not None and tuple(size) != tuple(tensor.shape):
            problems.append(f"{name} is {list(size)} there and {list(tensor.shape)} here")
    return problems


def _flat(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts as one, with the dotted names that DCP gives them."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
