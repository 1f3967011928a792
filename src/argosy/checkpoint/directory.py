"""The directory of boxes: which rank holds what. All ranks keep it together, each a share of the names.

Each name of a tensor has an owner, by its hash. Holders of its boxes and ranks that want some tell the owner, which
matches them and tells both. So what a rank says and hears is as long as its own boxes, and what an owner hears as long
as the list of ranks that share its tensor: nothing is as long as all ranks' boxes.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from argosy.checkpoint.boxes import Box, Misfit, cover, taken_from
from argosy.checkpoint.shards import box_bytes
from argosy.parallel.encoding import decode, encode
from argosy.parallel.peers import PeerMessage, Peers, Talk

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""
Whole = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a whole tensor."""
Boxes = list[tuple[Whole, list[Place]]]
"""Boxes, as they travel: each tensor's name once."""
Posting = tuple[Boxes, Boxes]
"""Parts of an owner's tensors that a rank holds, and those that it lacks."""
Supply = tuple[int, int, str, Place | None, Place | None]
"""For the rank that lacks something: which of its boxes (its number in the posting), the sender, the dtype there, the
sender's box, the part of it that comes (None: as the box that is lacked)."""
Order = tuple[int, Whole, Place, Place | None]
"""For the rank that sends: the receiver, the sender's box, the part of it (None: all)."""
Answer = tuple[list[Supply], list[Order]]


@dataclass(frozen=True)
class Transfer:
    """A part of a box that goes from one rank to another, or from one place of a rank's memory to another."""

    sender: int
    receiver: int
    source: Box
    """The box that the sender has."""
    wanted: Box
    """The box that the receiver fills; a sender, which need not know it, has the part there."""
    part: Box
    """The part of both that travels, in the dtype of `source`."""


def match(peers: Peers, held: Collection[Box], wanted: Collection[Box]) -> Talk[list[Transfer] | Misfit]:
    """Return what this rank sends, receives and finds in its own memory, so that all ranks get what they want.

    A rank takes what it can from its own memory; ranks that want the same take turns at those that hold it. If
    something is wanted that no rank holds, all ranks get the same Misfit.
    """
    transfers, lacking = _own(peers.rank, held, wanted)
    postings: dict[int, tuple[list[Box], list[Box]]] = defaultdict(lambda: ([], []))
    for box in held:
        if box.elements:
            postings[peers.owner(box.name)][0].append(box)
    wants: dict[int, list[Box]] = defaultdict(list)
    for part, box in lacking:
        postings[peers.owner(box.name)][1].append(part)
        wants[peers.owner(box.name)].append(box)
    order = {owner: _in_groups(parts) for owner, (_, parts) in postings.items()}
    posted = yield from peers.route(
        (owner, encode((_packed(boxes), _packed(parts)), Posting)) for owner, (boxes, parts) in postings.items()
    )
    answers, misfit = _settled(posted)
    misfit = yield from peers.merge(misfit, Misfit | None, _first)
    if misfit is not None:
        return misfit
    told = yield from peers.route((rank, encode(answer, Answer)) for rank, answer in answers.items())
    for letter in told:
        supplies, orders = decode(letter.data, Answer, f"rank {letter.sender}")
        for number, sender, dtype, source, part in supplies:
            index = order[letter.sender][number]
            hole, box = postings[letter.sender][1][index], wants[letter.sender][index]
            has = _box((hole.name, dtype, hole.whole), source or (hole.offset, hole.shape))
            takes = _box((hole.name, dtype, hole.whole), part or (hole.offset, hole.shape))
            transfers.append(Transfer(sender, peers.rank, has, box, takes))
        for receiver, whole, source, part in orders:
            taken = _box(whole, part or source)
            transfers.append(Transfer(peers.rank, receiver, _box(whole, source), taken, taken))
    return transfers


def deal(peers: Peers, boxes: Collection[Box]) -> Talk[list[Box]]:
    """Return the boxes of which this rank does what has to be done once: each box that any rank holds is one rank's.

    The first holder of a box deals it out: the largest first, each to the holder that it has given the least bytes.
    So ranks that hold the same share the work evenly.
    """
    posted = yield from peers.route(
        (owner, encode(_packed(some), Boxes)) for owner, some in _by_owner(peers, boxes).items()
    )
    holders: dict[Box, list[int]] = defaultdict(list)
    for letter in posted:
        for box in _unpacked(decode(letter.data, Boxes, f"rank {letter.sender}")):
            holders[box].append(letter.sender)
    shared: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box, ranks in holders.items():
        shared[tuple(ranks)].append(box)
    for_dealers: dict[int, list[tuple[list[int], Boxes]]] = defaultdict(list)
    for together, some in shared.items():
        for_dealers[together[0]].append((list(together), _packed(some)))
    kind = list[tuple[list[int], Boxes]]
    to_deal = yield from peers.route((dealer, encode(some, kind)) for dealer, some in for_dealers.items())
    groups = [group for letter in to_deal for group in decode(letter.data, kind, f"rank {letter.sender}")]
    dealt = shares({box: ranks for ranks, some in groups for box in _unpacked(some)})
    mine = yield from peers.route((rank, encode(_packed(some), Boxes)) for rank, some in dealt.items())
    return [box for letter in mine for box in _unpacked(decode(letter.data, Boxes, f"rank {letter.sender}"))]


def shares(holders: dict[Box, list[int]]) -> dict[int, list[Box]]:
    """Deal boxes out, given the ranks that hold each: the largest first, each to the one with the least so far."""
    load: dict[int, int] = defaultdict(int)
    dealt: dict[int, list[Box]] = defaultdict(list)
    # Boxes that only one rank holds come first, and the others are dealt around them.
    for box in sorted(holders, key=lambda b: (len(holders[b]) > 1, -box_bytes(b), b.name, b.offset)):
        rank = min(holders[box], key=lambda r: (load[r], r))
        dealt[rank].append(box)
        load[rank] += box_bytes(box)
    return dealt


def have_all_two(peers: Peers, boxes: Collection[Box], where: str) -> Talk[bool]:
    """True if each box that any rank holds is held at two places at least. `where`: this rank's, such as its node."""
    kind = tuple[str, Boxes]
    posted = yield from peers.route(
        (owner, encode((where, _packed(some)), kind)) for owner, some in _by_owner(peers, boxes).items()
    )
    places: dict[Box, set[str]] = defaultdict(set)
    for letter in posted:
        there, some = decode(letter.data, kind, f"rank {letter.sender}")
        for box in _unpacked(some):
            places[box].add(there)
    are_two = all(len(some) > 1 for some in places.values())
    return (yield from peers.merge(are_two, bool, lambda one, other: one and other))


def _own(rank: int, held: Collection[Box], wanted: Iterable[Box]) -> tuple[list[Transfer], list[tuple[Box, Box]]]:
    """Return what a rank finds in its own memory, and what it lacks: each part with the box that it is of."""
    here, by_name = set(held), defaultdict(list)
    for box in held:
        by_name[box.name].append(box)
    transfers: list[Transfer] = []
    lacking: list[tuple[Box, Box]] = []
    for box in wanted:
        if box in here:  # most are
            transfers.append(Transfer(rank, rank, box, box, box))
            continue
        missing = [box] if box.elements else []
        for source in by_name[box.name]:
            if source.whole == box.whole:
                parts, missing = taken_from(missing, source)
                transfers += (Transfer(rank, rank, source, box, replace(p, dtype=source.dtype)) for p in parts)
        lacking += ((hole, box) for hole in missing)
    return transfers, lacking


def _settled(posted: Iterable[PeerMessage]) -> tuple[dict[int, Answer], Misfit | None]:
    """As an owner, match what ranks hold and lack of its tensors."""
    tensors: dict[str, _Tensor] = defaultdict(_Tensor)
    for letter in posted:
        held, lacking = decode(letter.data, Posting, f"rank {letter.sender}")
        for box in _unpacked(held):
            tensors[box.name].holders.setdefault(box, []).append(letter.sender)
        for number, box in enumerate(_unpacked(lacking)):
            tensors[box.name].wants.append((letter.sender, number, box))
    answers: dict[int, Answer] = defaultdict(lambda: ([], []))
    for tensor in tensors.values():
        for receiver, number, hole in tensor.wants:
            parts = tensor.cover(hole, receiver)
            if isinstance(parts, Misfit):
                return {}, parts
            for sender, source, part in parts:
                place, its, taken = _place(hole), _place(source), _place(part)
                supply = (number, sender, source.dtype, _unless(its, place), _unless(taken, place))
                answers[receiver][0].append(supply)
                answers[sender][1].append((receiver, _whole(source), its, _unless(taken, its)))
    return answers, None


@dataclass
class _Tensor:
    """An owner's knowledge of a tensor."""

    holders: dict[Box, list[int]] = field(default_factory=dict)
    wants: list[tuple[int, int, Box]] = field(default_factory=list)
    _turns: dict[Box, int] = field(default_factory=dict)
    _edges: tuple[list[Box], np.ndarray, np.ndarray] | None = None

    def cover(self, hole: Box, receiver: int) -> list[tuple[int, Box, Box]] | Misfit:
        """Return which rank sends which part of which box."""
        if hole in self.holders:
            return [(self._next_holder(hole, receiver), hole, hole)]
        found = cover(hole, [(box, box) for box in self._near(hole) or list(self.holders)[:1]])
        if isinstance(found, Misfit):
            return found
        return [(self._next_holder(box, receiver), box, part) for box, _, part in found]

    def _near(self, hole: Box) -> list[Box]:
        """Return the boxes that overlap `hole`, and any that are of a tensor of another shape."""
        if self._edges is None:
            boxes = list(self.holders)
            alike = [box for box in boxes if len(box.whole) == len(hole.whole)]
            shape = (len(alike), len(hole.whole))
            begins = np.array([box.offset for box in alike], dtype=np.int64).reshape(shape)
            ends = np.array([box.end for box in alike], dtype=np.int64).reshape(shape)
            self._edges = alike, begins, ends
            self._others = [box for box in boxes if box.whole != hole.whole]
        boxes, begins, ends = self._edges
        meets = ((begins < np.array(hole.end)) & (ends > np.array(hole.offset))).all(axis=1)
        return [*self._others, *(boxes[i] for i in np.flatnonzero(meets))]

    def _next_holder(self, box: Box, receiver: int) -> int:
        """Take turns, from a holder that differs from receiver to receiver: many want one box, or one of many."""
        ranks = self.holders[box]
        turn = self._turns.get(box, zlib.crc32(receiver.to_bytes(8, "little")))
        self._turns[box] = turn + 1
        return ranks[turn % len(ranks)]


def _first(one: Misfit | None, other: Misfit | None) -> Misfit | None:
    return min((some for some in (one, other) if some is not None), key=repr, default=None)


def _by_owner(peers: Peers, boxes: Iterable[Box]) -> dict[int, list[Box]]:
    by_owner: dict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        if box.elements:
            by_owner[peers.owner(box.name)].append(box)
    return by_owner


def _in_groups(boxes: Sequence[Box]) -> list[int]:
    """Return the places of `boxes` in the order in which `_packed` has them."""
    groups: dict[Whole, list[int]] = defaultdict(list)
    for index, box in enumerate(boxes):
        groups[_whole(box)].append(index)
    return [index for group in groups.values() for index in group]


def _packed(boxes: Iterable[Box]) -> Boxes:
    groups: dict[Whole, list[Place]] = defaultdict(list)
    for box in boxes:
        groups[_whole(box)].append(_place(box))
    return list(groups.items())


def _unpacked(boxes: Boxes) -> Iterator[Box]:
    return (_box(whole, place) for whole, places in boxes for place in places)


def _box(whole: Whole, place: Place) -> Box:
    name, dtype, shape = whole
    return Box(name, dtype, shape, *place)


def _whole(box: Box) -> Whole:
    return box.name, box.dtype, box.whole


def _place(box: Box) -> Place:
    return box.offset, box.shape


def _unless(place: Place, same: Place) -> Place | None:
    return None if place == same else place
