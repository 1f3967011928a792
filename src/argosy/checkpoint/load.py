"""Loading a committed checkpoint: a rank under any layout reads the boxes that it wants, from whichever files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from safetensors import SafetensorError
from torch import Tensor

from argosy.checkpoint.boxes import Box, Misfit, cover
from argosy.checkpoint.checksums import DamagedCheckpoint
from argosy.checkpoint.shards import ShardFile, cut
from argosy.checkpoint.store import Checkpoint
from argosy.errors import UserError
from argosy.processes.connection import raise_limit

TENSOR_PIECE_BYTES = 32 * 2**20
"""The most of a tensor that is in memory a second time while it is read."""
Held = Mapping[str, list[tuple[ShardFile, Box]]]
"""Name of a tensor -> the files that hold parts of it, and which."""


@contextmanager
def opened(checkpoint: Checkpoint) -> Iterator[Held]:
    """Map the files of `checkpoint` into memory. Raises: DamagedCheckpoint."""
    raise_limit()  # there are as many as ranks wrote it
    held: dict[str, list[tuple[ShardFile, Box]]] = {}
    with ExitStack() as files:
        for name in checkpoint.manifest.files:
            file = files.enter_context(_shard(checkpoint, name))
            for box in file.boxes:
                held.setdefault(box.name, []).append((file, box))
        yield held


def unusable(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> str | None:
    """Return why a file, of `names` or of all, cannot be used although it may be as it was written; None if all can."""
    try:
        for name in checkpoint.manifest.files if names is None else names:
            with _shard(checkpoint, name):
                pass
    except DamagedCheckpoint as problem:
        return str(problem)
    return None


def problem_of(checkpoint: Checkpoint, rank: int = 0, size: int = 1) -> str | None:
    """Return what keeps a state from being loaded from a reader's share of `checkpoint`: bytes that are not those that
    were written, or files that cannot be used. None if there is nothing."""
    return checkpoint.problem(rank, size) or unusable(checkpoint, checkpoint.share(rank, size))


@torch.no_grad()
def load_into(parts: Mapping[Box, Tensor], checkpoint: Checkpoint) -> None:
    """Fill the tensors of `parts`, this rank's, in place; a tensor that the checkpoint lacks stays as it is.

    Numbers are converted to the dtypes of the tensors. Raises: UserError if a tensor is of another shape there, before
    anything is read.
    """
    with opened(checkpoint) as held:
        found = [box for box in parts if box.name in held]
        check_all_there(found, checkpoint, held)
        for box in found:
            way = cover(box, held[box.name])
            for file, source, part in way if not isinstance(way, Misfit) else ():
                for piece in cut(part, TENSOR_PIECE_BYTES):
                    parts[box][piece.within(box)].copy_(file.read(source, piece))


def check_all_there(boxes: Iterable[Box], checkpoint: Checkpoint, held: Held) -> None:
    """Raise UserError unless `held`, of the checkpoint's files, has all of the boxes, of tensors of the same shapes."""
    ways = (cover(box, held.get(box.name, [])) for box in boxes)
    if problems := [str(way) for way in ways if isinstance(way, Misfit)]:
        raise UserError(
            f"{checkpoint.folder} does not fit: {first_of(problems)}. Name another checkpoint, or use the model "
            "section that this one was saved with."
        )


def incomplete(checkpoint: Checkpoint) -> str | None:
    """Return which tensors of model and optimizer the files do not make up whole, or why a file cannot be used; None if
    all is there."""
    if problem := unusable(checkpoint):
        return problem
    with opened(checkpoint) as held:
        firsts = [boxes[0][1] for name, boxes in held.items() if name.startswith(("model.", "optimizer."))]
        wholes = (Box(box.name, box.dtype, box.whole, (0,) * len(box.whole), box.whole) for box in firsts)
        problems = [str(way) for whole in wholes if isinstance(way := cover(whole, held[whole.name]), Misfit)]
    return f"{checkpoint.folder}: {first_of(problems)}" if problems else None


def boxes_in(checkpoint: Checkpoint) -> list[Box]:
    """Return what the files of `checkpoint` hold. Raises: DamagedCheckpoint."""
    with opened(checkpoint) as held:
        return [box for boxes in held.values() for _, box in boxes]


def first_of(problems: Sequence[str], most: int = 3) -> str:
    """Return the first few in words, and how many more there are."""
    more = f" (and {len(problems) - most} more)" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def _shard(checkpoint: Checkpoint, name: str) -> ShardFile:
    try:
        return ShardFile(checkpoint.folder / name)
    except (OSError, SafetensorError) as problem:
        raise DamagedCheckpoint(f"{checkpoint.folder}: file {name} cannot be read ({problem})") from None


def missing_from(parts: Mapping[Box, Tensor], checkpoint: Checkpoint) -> list[str]:
    """Return, in words, which of `parts` the checkpoint does not hold, or holds in another shape."""
    with opened(checkpoint) as held:
        ways = (cover(box, held.get(box.name, [])) for box in parts)
        return [str(way) for way in ways if isinstance(way, Misfit)]
