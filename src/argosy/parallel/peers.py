"""Agreement and messages among ranks, in a number of rounds that grows with the logarithm of their number.

What they say is written as talks: generators that yield one `PeerExchange` a round and are given the bytes that came.
A process group carries them out (`over`), or a simulator for any number of ranks (`benchmarks/recovery_scale.py`).
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.parallel.encoding import WrongMessage, checked_length, decode, encode, from_text, to_text

T = TypeVar("T")


@dataclass(frozen=True)
class PeerExchange:
    """One round of one rank: `data` goes to rank `to`, and what comes from rank `origin` is the answer."""

    to: int | None = None
    data: bytes = b""
    origin: int | None = None


Talk = Generator[PeerExchange, bytes, T]
"""A rank's part of a talk; it ends with this rank's result. All ranks hold the same talks in the same order."""


@dataclass(frozen=True)
class PeerMessage:
    """Bytes from one rank to another."""

    sender: int
    receiver: int
    data: bytes


@dataclass(frozen=True)
class Peers:
    """One rank among those that talk."""

    rank: int = 0
    size: int = 1

    def merge(self, mine: T, kind: Any, join: Callable[[T, T], T]) -> Talk[T]:
        """Return what `join` makes of all ranks' values, of the type `kind`; the same on all ranks.

        `join` must not depend on order, and its result should be no longer than what goes in: then nothing grows with
        the number of ranks. Recursive doubling: log2(n) rounds (Thakur et al. 2005, section 4.2.2).
        """
        paired = 1 << (self.size.bit_length() - 1)
        extra = self.size - paired
        if self.rank >= paired:
            whole = yield PeerExchange(self.rank - paired, encode(mine, kind), self.rank - paired)
            result: T = decode(whole, kind, f"rank {self.rank - paired}")
            return result
        if self.rank < extra:
            theirs = yield PeerExchange(origin=self.rank + paired)
            mine = join(mine, decode(theirs, kind, f"rank {self.rank + paired}"))
        distance = 1
        while distance < paired:
            other = self.rank ^ distance
            theirs = yield PeerExchange(other, encode(mine, kind), other)
            mine = join(mine, decode(theirs, kind, f"rank {other}"))
            distance *= 2
        if self.rank < extra:
            yield PeerExchange(self.rank + paired, encode(mine, kind))
        return mine

    def union(self, mine: Iterable[T], kind: Any) -> Talk[list[T]]:
        """Return the different values that ranks give, each once, in an order that is the same on all ranks.

        For what many ranks say alike: what travels is as long as all that differs.
        """
        texts = sorted({to_text(value, kind) for value in mine})
        found = yield from self.merge(texts, list[str], lambda one, other: sorted({*one, *other}))
        return [from_text(text, kind) for text in found]

    def alike(self, key: str) -> Talk[list[int]]:
        """Return the ranks that give the same key as this one, ascending."""
        asked = yield from self.route([(self.owner(key), encode(key, str))])
        ranks: dict[str, list[int]] = {}
        for letter in asked:
            ranks.setdefault(decode(letter.data, str, f"rank {letter.sender}"), []).append(letter.sender)
        told = ((rank, encode(same, list[int])) for same in ranks.values() for rank in same)
        (answer,) = yield from self.route(told)
        here: list[int] = decode(answer.data, list[int], f"rank {answer.sender}")
        return here

    def owner(self, name: str) -> int:
        """Return the rank that keeps the entries of `name` in whatever all ranks keep together."""
        return zlib.crc32(name.encode()) % self.size

    def route(self, letters: Iterable[tuple[int, bytes]]) -> Talk[list[PeerMessage]]:
        """Send letters (receiver, data) of which only the sender knows. Return those to this rank, ordered by sender.

        A crystal router (Fox et al. 1988, chapter 22): in each round the ranks are halved, and each hands its partner
        in the other half all letters that are for that half. So nobody has to know whom to wait for, each rank speaks
        to about log2(n) others, and a letter travels about log2(n)/2 times.
        """
        held = [PeerMessage(self.rank, receiver, data) for receiver, data in letters]
        low, high = 0, self.size
        while high - low > 1:
            middle = low + (high - low) // 2
            is_low = self.rank < middle
            leaving = [letter for letter in held if (letter.receiver < middle) != is_low]
            held = [letter for letter in held if (letter.receiver < middle) == is_low]
            data = _pack(leaving)
            place, odd = self.rank - (low if is_low else middle), (high - low) % 2 == 1
            if is_low:
                held += _unpack((yield PeerExchange(middle + place, data, middle + place)))
                if odd and self.rank == middle - 1:  # the upper half has one more, without a partner
                    held += _unpack((yield PeerExchange(origin=high - 1)))
            elif odd and self.rank == high - 1:
                yield PeerExchange(middle - 1, data)
            else:
                held += _unpack((yield PeerExchange(low + place, data, low + place)))
            low, high = (low, middle) if is_low else (middle, high)
        return sorted(held, key=lambda letter: letter.sender)


def over(group: dist.ProcessGroup | None, talk: Talk[T]) -> T:
    """Hold a talk among the ranks of `group`, which carries tensors in host memory; None: this rank is alone.

    Raises: WrongMessage, RuntimeError if a rank is gone, what the talk raises.
    """
    try:
        swap = next(talk)
        while True:
            assert group is not None, "a rank that is alone has nobody to talk to"
            swap = talk.send(_carried_out(swap, group))
    except StopIteration as end:
        result: T = end.value
        return result


def peers_of(group: dist.ProcessGroup | None) -> Peers:
    return Peers() if group is None else Peers(group.rank(), group.size())


def together(talks: Sequence[Talk[T]]) -> list[T]:
    """Hold the talks of all ranks, by rank, in this process: for simulations and tests. Returns their results."""
    results: list[Any] = [None] * len(talks)
    boxes: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
    waiting: dict[tuple[int, int], int] = {}
    ready: deque[tuple[int, bytes | None]] = deque((rank, None) for rank in range(len(talks)))
    while ready:
        rank, came = ready.popleft()
        try:
            swap = next(talks[rank]) if came is None else talks[rank].send(came)
        except StopIteration as end:
            results[rank] = end.value
            continue
        if swap.to is not None:
            way = (rank, swap.to)
            boxes[way].append(swap.data)
            if way in waiting:
                ready.append((waiting.pop(way), boxes[way].popleft()))
        if swap.origin is None:
            ready.append((rank, b""))
        elif boxes[swap.origin, rank]:
            ready.append((rank, boxes[swap.origin, rank].popleft()))
        else:
            waiting[swap.origin, rank] = rank
    assert not waiting, f"these wait for each other for ever: {sorted(waiting)[:8]}"
    return results


_HEAD = struct.Struct("<III")


def _carried_out(swap: PeerExchange, group: dist.ProcessGroup) -> bytes:
    """Send all before anything is waited for: the other end may have to hear it before it answers."""
    parts = (head_of(swap), tensor_of(swap.data))
    sending = [] if swap.to is None else [_send(part, swap.to, group) for part in parts]
    came = b"" if swap.origin is None else _receive(swap.origin, group)
    for work, _ in sending:
        if work is not None:
            work.wait()
    return came


def _receive(origin: int, group: dist.ProcessGroup) -> bytes:
    head = torch.zeros(2, dtype=torch.int64)
    dist.recv(head, group=group, group_src=origin)
    length, crc = head.tolist()
    received = torch.empty(checked_length(length, f"rank {origin}"), dtype=torch.uint8)
    if length:
        dist.recv(received, group=group, group_src=origin)
    came = received.numpy().tobytes()
    if zlib.crc32(came) != crc:
        raise WrongMessage(f"what rank {origin} sent to rank {group.rank()} does not match its checksum.")
    return came


def _send(part: Tensor, to: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Tensor]:
    """Begin to send; what is empty is passed over. The tensor must live until it has left."""
    return dist.isend(part, group=group, group_dst=to) if part.numel() else None, part


def head_of(swap: PeerExchange) -> Tensor:
    """Return length and CRC-32 of what is sent."""
    return torch.tensor([len(swap.data), zlib.crc32(swap.data)])


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _pack(letters: list[PeerMessage]) -> bytes:
    return b"".join(_HEAD.pack(x.sender, x.receiver, len(x.data)) + x.data for x in letters)


def _unpack(data: bytes) -> list[PeerMessage]:
    letters, at = [], 0
    try:
        while at < len(data):
            sender, receiver, size = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            letters.append(PeerMessage(sender, receiver, data[at : at + size]))
            at += size
    except struct.error:
        at = -1
    if at != len(data):
        raise WrongMessage("a message that a rank passed on cannot be read: it is not at the same place as this one.")
    return letters
