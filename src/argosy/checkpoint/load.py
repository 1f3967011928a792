"""Loading a committed checkpoint: a rank under any layout reads the boxes that it wants, from whichever files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from safetensors import SafetensorError
from torch import Tensor

from argosy.checkpoint.boxes import Box, Misfit, cover
from argosy.checkpoint.checksums import Damaged
from argosy.checkpoint.shards import ShardFile
from argosy.checkpoint.store import Checkpoint
from argosy.errors import UserError

Held = Mapping[str, list[tuple[ShardFile, Box]]]
"""Name of a tensor -> the files that hold parts of it, and which."""


@contextmanager
def opened(checkpoint: Checkpoint) -> Iterator[Held]:
    """Map the files of `checkpoint` into memory. Raises: Damaged."""
    held: dict[str, list[tuple[ShardFile, Box]]] = {}
    with ExitStack() as files:
        for name in checkpoint.manifest.files:
            try:
                file = files.enter_context(ShardFile(checkpoint.folder / name))
            except (OSError, SafetensorError) as problem:
                raise Damaged(f"{checkpoint.folder}: file {name} cannot be read ({problem})") from None
            for box in file.boxes:
                held.setdefault(box.name, []).append((file, box))
        yield held


@torch.no_grad()
def load_into(parts: Mapping[Box, Tensor], checkpoint: Checkpoint) -> None:
    """Fill the tensors of `parts`, this rank's, in place; a tensor that the checkpoint lacks stays as it is.

    Numbers are converted to the dtypes of the tensors. Raises: UserError if a tensor is of another shape there, before
    anything is read.
    """
    with opened(checkpoint) as held:
        found = {box: cover(box, held[box.name]) for box in parts if box.name in held}
        problems = [str(way) for way in found.values() if isinstance(way, Misfit)]
        if problems:
            raise UserError(f"{checkpoint.folder} does not fit: {'; '.join(problems)}.")
        for box, way in found.items():
            for file, source, part in way if not isinstance(way, Misfit) else ():
                parts[box][part.within(box)].copy_(file.read(source, part))


def boxes_in(checkpoint: Checkpoint) -> list[Box]:
    """Return what the files of `checkpoint` hold. Raises: Damaged."""
    with opened(checkpoint) as held:
        return [box for boxes in held.values() for _, box in boxes]


def missing_from(parts: Mapping[Box, Tensor], checkpoint: Checkpoint) -> list[str]:
    """Return, in words, which of `parts` the checkpoint does not hold, or holds in another shape."""
    with opened(checkpoint) as held:
        ways = (cover(box, held.get(box.name, [])) for box in parts)
        return [str(way) for way in ways if isinstance(way, Misfit)]
