"""State from rank to rank: each says what it holds and what it wants, and boxes travel, from any layout to any other.

Ranks find each other by the directory (`checkpoint.directory`); each knows only of its own transfers. They are carried
out by distance, nearest first: at distance k rank i sends to rank i + k and receives from rank i - k, if they have
something for each other. Both ends of each way go through their distances in this order, so that the nearest that is
not done yet has both its ends ready, and no rank waits for ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.directory import Transfer, match
from argosy.checkpoint.shards import box_bytes, cut
from argosy.errors import ArgosyError, some_of
from argosy.parallel.peers import over, peers_of

MESSAGE_BYTES = 32 * 2**20
"""The most that travels at once between two ranks: the size of their buffers, and what one checksum covers."""
CHECKSUM_BYTES = 4
MOST_NAMED_MESSAGES = 3
"""Most damaged messages that an error names."""
ALIGNMENT = 16
"""Tensors in a message begin at multiples of so many bytes, so that they can be read in place."""


class CorruptMessage(ArgosyError):
    """A rank received something else than another sent."""


class NobodyHas(ArgosyError):
    """Something is wanted that no rank holds."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sent, received, and found in its own memory."""

    sent_bytes: int = 0
    received_bytes: int = 0
    own_bytes: int = 0


def exchange(held: Mapping[Box, Tensor], wanted: Mapping[Box, Tensor], group: dist.ProcessGroup | None) -> Traffic:
    """Fill the tensors of `wanted` from what the ranks of `group` hold; all of them call it together.

    Tensors are plain and have their box's shape; they may lie on any device. A rank may hold nothing, or want nothing.
    `group` carries tensors in host memory (`World.host_group`); None if this rank is alone.

    Raises: NobodyHas if something is wanted that no rank holds, CorruptMessage if a message is not what was sent; the
    same on all ranks.
    """
    transfers = over(group, match(peers_of(group), held.keys(), wanted.keys()))
    if isinstance(transfers, Misfit):
        raise NobodyHas(f"no rank has all of it: {transfers}")
    return carry(transfers, held, wanted, group)


def travels(box: Box) -> bool:
    """True if a rank may take the box from another.

    Each rank has its own random generator: no step draws from it, and a lost rank's cannot be restored.
    """
    return not box.name.startswith("rng.")


def carry(
    transfers: Sequence[Transfer],
    held: Mapping[Box, Tensor],
    wanted: Mapping[Box, Tensor],
    group: dist.ProcessGroup | None,
) -> Traffic:
    """Carry out `transfers`, this rank's; all ranks of `group` call it together.

    Raises: CorruptMessage, the same on all ranks, once all other messages have arrived; it may be called again.
    """
    rank, size = (group.rank(), group.size()) if group else (0, 1)
    by_peers: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        by_peers.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
    own = by_peers.pop((rank, rank), [])
    for transfer in own:
        _place(transfer, wanted).copy_(_place(transfer, held, at_source=True))
    problems: list[str] = []
    for distance in sorted({(receiver - sender) % size for sender, receiver in by_peers}):
        to, origin = (rank + distance) % size, (rank - distance) % size
        outgoing, incoming = (_messages(*pair, by_peers.get(pair, [])) for pair in ((rank, to), (origin, rank)))
        for out, arriving in zip_longest(outgoing, incoming):
            operations = []
            if out is not None:
                operations.append(dist.P2POp(dist.isend, out.pack(held), group=group, group_peer=to))
            if arriving is not None:
                buffer = arriving.buffer()
                operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=origin))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if arriving is not None and not arriving.unpack(buffer, wanted):
                problems.append(str(arriving))
    problems = over(group, peers_of(group).merge(problems[:MOST_NAMED_MESSAGES], list[str], _few))
    if problems:
        raise CorruptMessage(
            f"{'; '.join(problems)}. Nothing of it is used. If it happens again, take the machine of one of the "
            "two ranks out of the run: its memory or its network changes data."
        )
    return Traffic(
        sent_bytes=sum(box_bytes(t.part) for t in transfers if t.sender == rank != t.receiver),
        received_bytes=sum(box_bytes(t.part) for t in transfers if t.receiver == rank != t.sender),
        own_bytes=sum(box_bytes(t.part) for t in own),
    )


def _few(some: list[str], others: list[str]) -> list[str]:
    return sorted({*some, *others})[:MOST_NAMED_MESSAGES]


@dataclass
class _Message:
    """Parts that travel together from one rank to another, with a checksum behind them."""

    sender: int
    receiver: int
    number: int
    """Number among the messages of the two ranks, from 0."""
    parts: list[tuple[int, Transfer]] = field(default_factory=list)
    """Start of each part, and the part."""
    bytes: int = 0

    def add(self, transfer: Transfer) -> None:
        self.parts.append((self.bytes, transfer))
        self.bytes += -(-box_bytes(transfer.part) // ALIGNMENT) * ALIGNMENT

    def buffer(self) -> Tensor:
        return torch.zeros(self.bytes + CHECKSUM_BYTES, dtype=torch.uint8)

    def pack(self, held: Mapping[Box, Tensor]) -> Tensor:
        buffer = self.buffer()
        for window, transfer in self._windows(buffer):
            window.copy_(_place(transfer, held, at_source=True))
        buffer[self.bytes :].view(torch.int32).fill_(self._checksum(buffer))
        return buffer

    def unpack(self, buffer: Tensor, wanted: Mapping[Box, Tensor]) -> bool:
        """Move a message to its places. Returns False, and moves nothing, if it is not what was sent."""
        if self._checksum(buffer) != int(buffer[self.bytes :].view(torch.int32)):
            return False
        for window, transfer in self._windows(buffer):
            _place(transfer, wanted).copy_(window)
        return True

    def _windows(self, buffer: Tensor) -> Iterator[tuple[Tensor, Transfer]]:
        """Yield each part's view of the buffer."""
        for begin, transfer in self.parts:
            part = transfer.part
            raw = buffer[begin : begin + box_bytes(part)]
            yield raw.view(getattr(torch, part.dtype)).view(part.shape), transfer

    def _checksum(self, buffer: Tensor) -> int:
        """Return the CRC-32, as int32, of sender, receiver, number and bytes: a message that strayed is found too."""
        whose = zlib.crc32(f"{self.sender} {self.receiver} {self.number}".encode())
        crc = zlib.crc32(buffer[: self.bytes].numpy().data, whose)
        return crc - 2**32 if crc >= 2**31 else crc

    def __str__(self) -> str:
        names = list(dict.fromkeys(transfer.part.name for _, transfer in self.parts))
        return f"what rank {self.sender} sent to rank {self.receiver} ({some_of(names, 2)}) does not match its checksum"


def _messages(sender: int, receiver: int, transfers: Sequence[Transfer]) -> Iterator[_Message]:
    """Yield what goes from one rank to another, in messages of at most MESSAGE_BYTES; both ranks find the same."""
    message = _Message(sender, receiver, 0)
    for transfer in sorted(transfers, key=_in_order):
        for part in cut(transfer.part, MESSAGE_BYTES):
            if message.bytes + box_bytes(part) > MESSAGE_BYTES and message.parts:
                yield message
                message = _Message(sender, receiver, message.number + 1)
            message.add(replace(transfer, part=part))
    if message.parts:
        yield message


def _in_order(transfer: Transfer) -> tuple[Any, ...]:
    """Return a key by which both ends of a way sort, which have heard of its transfers from several owners."""
    part, source = transfer.part, transfer.source
    return part.name, part.dtype, part.offset, part.shape, source.offset, source.shape


def _place(transfer: Transfer, tensors: Mapping[Box, Tensor], at_source: bool = False) -> Tensor:
    """Return the view of a rank's memory that the part comes from, or goes to."""
    box = transfer.source if at_source else transfer.wanted
    return tensors[box].detach()[transfer.part.within(box)]
