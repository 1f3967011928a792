"""Rates of communication: each collective by message size, in groups of each size, alone and at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import torch
import torch.distributed as dist

from argosy.accelerator import synchronize
from argosy.parallel.world import World
from argosy.plan.hardware.measurements import CollectiveRate, Operation, four_digits
from argosy.probe.compute import LONGEST_SLICE_S, lower_quartile
from argosy.sync.compressor import all_gather_single, reduce_scatter_single

PROBED_MESSAGE_BYTES = {"cpu": [2**p for p in range(10, 27, 2)], "accelerator": [2**p for p in range(10, 31, 2)]}
"""Bytes of the messages, 1 KiB to 64 MiB or 1 GiB; larger ones are as fast."""
TIMED_SAMPLES, MOST_CALLS = 5, 50
MOST_PIECES, FEWEST_POINTS, NEGLIGIBLE, WORTH_A_PIECE = 3, 3, 0.1, 0.7
"""Limits for the straight segments of a row: their number; the fewest sizes of each; the error (root of the summed
squares) up to which no further segment is tried; the share of it that a further segment must bring it below."""


@dataclass(frozen=True)
class GroupLayout:
    """Groups of ranks that communicate at once."""

    tier: str
    ranks: tuple[tuple[int, ...], ...]
    groups_in_node: int


@dataclass(frozen=True)
class TimeSegment:
    """A straight part of time over message size."""

    from_bytes: int
    latency_s: float
    s_per_byte: float


def layouts(hosts: Sequence[str]) -> list[GroupLayout]:
    """Return the groups to measure on these hosts: inside each node and, between nodes, of like local ranks.

    Inside a node: groups of 2, 4, ... ranks and of all; each of them alone (one in every node), then all at once.
    """
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    local = min(map(len, nodes))
    nodes = [node[:local] for node in nodes]
    found = []
    for size in sorted({*(2**p for p in range(1, local.bit_length()) if local % 2**p == 0), local} - {1}):
        starts = range(0, local, size)
        for count in sorted({1, len(starts)}):
            ranks = tuple(tuple(node[i : i + size]) for node in nodes for i in starts[:count])
            found.append(GroupLayout("node", ranks, count))
    if len(nodes) > 1:
        for count in sorted({1, local}):
            found.append(GroupLayout("network", tuple(zip(*nodes, strict=True))[:count], count))
    return found


def measure_collectives(
    world: World, hosts: Sequence[str], sizes: Sequence[int], budget_s: float
) -> list[CollectiveRate]:
    """Measure every operation in every layout of a world on `hosts`, within about `budget_s`.

    sizes: bytes of the messages, rising. All processes of the world call it.
    """
    found = layouts(hosts)
    slice_s = min(LONGEST_SLICE_S, budget_s / (len(found) * len(PROBED_COLLECTIVES) * len(sizes)))
    rates: list[CollectiveRate] = []
    for layout in found:
        made = [dist.new_group(list(ranks)) for ranks in layout.ranks]
        mine = next((g for g, ranks in zip(made, layout.ranks, strict=True) if world.rank in ranks), None)
        for operation in PROBED_COLLECTIVES:
            points = list(_points(world, operation, len(layout.ranks[0]), mine, sizes, slice_s))
            rates += _rates(operation, layout, segments(points))
        for group in made:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
    return rates


def _rates(operation: Operation, layout: GroupLayout, found: Sequence[TimeSegment]) -> Iterator[CollectiveRate]:
    for segment in found:
        yield CollectiveRate(
            operation=operation,
            tier=layout.tier,
            ranks=len(layout.ranks[0]),
            groups=layout.groups_in_node,
            from_bytes=segment.from_bytes,
            latency_s=four_digits(segment.latency_s),
            bytes_per_s=four_digits(1 / segment.s_per_byte) if segment.s_per_byte else None,
        )


def _points(
    world: World,
    operation: Operation,
    ranks: int,
    group: dist.ProcessGroup | None,
    sizes: Sequence[int],
    slice_s: float,
) -> Iterator[tuple[int, float]]:
    """Return (message bytes, seconds of the slowest rank), up to the first size that takes longer than `slice_s`.

    A rank without a group waits for the others.
    """
    for size in sizes:
        message = size // (4 * ranks) * 4 * ranks
        call = PROBED_COLLECTIVES[operation](message, group, world.device) if group else _nothing
        seconds = _slowest(world, call, slice_s)
        yield message, seconds
        if seconds > slice_s:
            return


def _slowest(world: World, call: Callable[[], object], slice_s: float) -> float:
    _once(world, call, 1)  # connections are made by the first call
    calls = int(np.clip(slice_s / TIMED_SAMPLES / _once(world, call, 1), 1, MOST_CALLS))
    return lower_quartile([_once(world, call, calls) for _ in range(TIMED_SAMPLES)])


def _once(world: World, call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one of `calls` calls on the slowest rank, the same on all ranks."""
    synchronize(world.device)
    world.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(world.device)
    mine = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64, device=world.device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def segments(points: Sequence[tuple[int, float]]) -> list[TimeSegment]:
    """Fit straight segments latency + bytes * slope, of least squared relative error, to (bytes, seconds).

    As few as possible: a further segment, where algorithms or caches change, must make the error clearly smaller.
    """
    best, error = _split(points, 1)
    for count in range(2, min(MOST_PIECES, len(points) // FEWEST_POINTS) + 1):
        found, its_error = _split(points, count)
        if error < NEGLIGIBLE or its_error > WORTH_A_PIECE * error:
            break
        best, error = found, its_error
    return best


def _split(points: Sequence[tuple[int, float]], count: int) -> tuple[list[TimeSegment], float]:
    """Return the best `count` segments, and their error."""
    candidates = []
    for inner in combinations(range(1, len(points)), count - 1):
        cuts = [0, *inner, len(points)]
        if len(points) >= FEWEST_POINTS and min(b - a for a, b in pairwise(cuts)) < FEWEST_POINTS:
            continue
        fits = [_line(points[a:b], must_rise=b == len(points)) for a, b in pairwise(cuts)]
        candidates.append(([segment for segment, _ in fits], float(np.sqrt(sum(error for _, error in fits)))))
    return min(candidates, key=lambda candidate: candidate[1])


def _line(points: Sequence[tuple[int, float]], must_rise: bool) -> tuple[TimeSegment, float]:
    """Return the line of least squared relative error, neither latency nor slope negative, and that error.

    must_rise: the line needs a slope, since the largest messages give the bandwidth.
    """
    sizes, times = np.array(points).T
    both = np.stack([1 / times, sizes / times], 1)
    ones = np.ones_like(times)
    (latency,), (slope,) = (np.linalg.lstsq(both[:, i : i + 1], ones, rcond=None)[0] for i in (0, 1))
    candidates = [tuple(np.linalg.lstsq(both, ones, rcond=None)[0]), (0.0, slope)]
    if not must_rise:
        candidates.append((latency, 0.0))
    allowed = [c for c in candidates if c[0] >= 0 and (c[1] > 0 or (c[1] == 0 and not must_rise))]
    best = min(allowed, key=lambda c: _error(c, sizes, times))
    return TimeSegment(int(sizes[0]), float(best[0]), float(best[1])), _error(best, sizes, times)


def _error(line: Sequence[float], sizes: np.ndarray, times: np.ndarray) -> float:
    return float(np.sum(((line[0] + line[1] * sizes) / times - 1) ** 2))


# Calls of an operation: each takes the bytes of its message, and makes the tensors once.


def _nothing() -> None:
    """The part of a rank that has none."""


def _all_reduce(message: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    x = torch.zeros(message // 4, device=device)
    return lambda: dist.all_reduce(x, group=group)


def _all_gather(message: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    whole, part = (torch.zeros(message // 4 // ranks, device=device) for ranks in (1, group.size()))
    return lambda: all_gather_single(whole, part, group=group)


def _reduce_scatter(message: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    whole, part = (torch.zeros(message // 4 // ranks, device=device) for ranks in (1, group.size()))
    return lambda: reduce_scatter_single(part, whole, group=group)


def _all_to_all(message: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    mine = torch.zeros(message // 4, device=device)
    theirs = torch.zeros_like(mine)
    return lambda: dist.all_to_all_single(theirs, mine, group=group)


def _send(message: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    mine = torch.zeros(message // 4, device=device)
    theirs = torch.zeros_like(mine)
    ranks = dist.get_process_group_ranks(group)
    following, before = (ranks[(group.rank() + step) % len(ranks)] for step in (1, -1))

    def call() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, following, group), dist.P2POp(dist.irecv, theirs, before, group)]
        )
        for work in works:
            work.wait()

    return call


PROBED_COLLECTIVES: dict[Operation, Callable[[int, dist.ProcessGroup, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
