"""Several jobs on the clusters that one has: an order, and a number of devices for each over time.

Jobs are placed one after the other, each where it ends first in what the jobs before it left free (serial schedule
generation with backfilling; Kolisch & Hartmann 1999). A rigid job keeps its devices; an elastic one takes more when
they become free and fewer when a more urgent job has them, at the cost of a restart, where that ends it notably sooner.
The order, and how many devices each job may take at most, are searched from the field's rules (earliest due date,
priority, weighted shortest time) by seeded random exchange: what costs least by being late is best, then what ends
soonest, weighted by priority."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from argosy.plan.cost.estimate import DAY
from argosy.plan.search.replan import REPLAN_S

TRIALS = 1500
"""Exchanges that are tried."""
PAYS = 0.05
"""An elastic job must take so much less, from when it may begin, than the best rigid one to be worth its restarts."""
NEVER_DONE = float("inf")


@dataclass(frozen=True)
class JobSize:
    """A job on some devices of a cluster."""

    devices: int
    time_s: float
    """Seconds of the whole job, failures included."""
    plan: str = ""


@dataclass(frozen=True)
class PlannedJob:
    name: str
    sizes: Mapping[str, Sequence[JobSize]]
    """Cluster -> the sizes that it could have there: the fewest devices first, each faster than those before."""
    priority: float = 1.0
    ready_s: float = 0.0
    """Time before which the job may not begin."""
    deadline_s: float = NEVER_DONE
    late_per_day: float | None = None
    """Money that a day after the deadline costs; None: nobody says, then its priority counts."""
    after: tuple[str, ...] = ()
    """Jobs that must have ended."""
    elastic: bool = True

    def late_s(self, end_s: float) -> float:
        return max(0.0, end_s - self.deadline_s)


@dataclass(frozen=True)
class Stint:
    """A time in which a job has the same devices."""

    begin_s: float
    end_s: float
    devices: int
    plan: str = ""


@dataclass(frozen=True)
class JobPlacement:
    """The cluster and times of a job."""

    job: str
    cluster: str
    stints: tuple[Stint, ...]
    is_elastic: bool
    most: int
    """Devices that it may take at most: of an elastic job, else those that it has."""

    @property
    def begin_s(self) -> float:
        return self.stints[0].begin_s

    @property
    def end_s(self) -> float:
        return self.stints[-1].end_s


class FreeDevices:
    """The devices of a cluster that nobody has, over time."""

    def __init__(self, devices: int):
        self.times, self.free = [0.0], [devices]

    def take(self, stint: Stint) -> None:
        first, last = self._cut(stint.begin_s), self._cut(stint.end_s)
        for i in range(first, last):
            self.free[i] -= stint.devices

    def _cut(self, at_s: float) -> int:
        i = bisect_right(self.times, at_s) - 1
        if self.times[i] != at_s:
            self.times.insert(i + 1, at_s)
            self.free.insert(i + 1, self.free[i])
            return i + 1
        return i

    def spans(self, from_s: float) -> list[tuple[float, float, int]]:
        """Return (begin, end, free devices) from a time on; the last never ends."""
        i = bisect_right(self.times, from_s) - 1
        ends = [*self.times[i + 1 :], NEVER_DONE]
        return [(max(from_s, self.times[i + k]), end, self.free[i + k]) for k, end in enumerate(ends)]

    def rigid(self, size: JobSize, from_s: float) -> Stint:
        """Return the earliest stint of so many devices."""
        begin_s = from_s
        for _, end_s, free in self.spans(from_s):
            if free < size.devices:
                begin_s = end_s
            elif end_s - begin_s >= size.time_s:
                break
        return Stint(begin_s, begin_s + size.time_s, size.devices, size.plan)

    def elastic(self, sizes: Sequence[JobSize], from_s: float) -> tuple[Stint, ...]:
        """Return the stints of a job that takes what is free, up to the largest of `sizes`."""
        stints: list[Stint] = []
        left, now, begun = 1.0, None, False
        for begin_s, end_s, free in self.spans(from_s):
            able = [size for size in sizes if size.devices <= free]
            chosen = _worth(now, able, left, end_s - begin_s, begun)
            if chosen is None:
                now = None
                continue
            lost_s = REPLAN_S if begun and chosen is not now else 0.0
            took_s = lost_s + left * chosen.time_s
            if took_s <= end_s - begin_s:
                return _joined([*stints, Stint(begin_s, begin_s + took_s, chosen.devices, chosen.plan)])
            left -= max(0.0, end_s - begin_s - lost_s) / chosen.time_s
            stints.append(Stint(begin_s, end_s, chosen.devices, chosen.plan))
            now, begun = chosen, True
        raise AssertionError("the last span never ends, and is as large as the cluster")


def _worth(now: JobSize | None, able: Sequence[JobSize], left: float, span_s: float, begun: bool) -> JobSize | None:
    """Return the size for a span: that which does most in it, restarts counted; None: wait."""

    def done(size: JobSize) -> tuple[float, float]:
        lost_s = REPLAN_S if begun and size is not now else 0.0
        finish_s = lost_s + left * size.time_s
        return min(left, max(0.0, span_s - lost_s) / size.time_s), -finish_s

    best = max(able, key=done, default=None)
    return None if best is None or done(best)[0] <= 0 else best


def _joined(stints: Sequence[Stint]) -> tuple[Stint, ...]:
    """Return the stints, those put together that follow each other on the same devices."""
    found: list[Stint] = []
    for stint in stints:
        before = found[-1] if found else None
        if before and (before.end_s, before.devices, before.plan) == (stint.begin_s, stint.devices, stint.plan):
            found[-1] = replace(before, end_s=stint.end_s)
        else:
            found.append(stint)
    return tuple(found)


@dataclass(frozen=True)
class Decisions:
    """The search space."""

    order: tuple[int, ...]
    """Jobs as they are placed, the first first."""
    most: tuple[float, ...]
    """Share of a cluster that each job may take at most."""


def placed(jobs: Sequence[PlannedJob], clusters: Mapping[str, int], decisions: Decisions) -> list[JobPlacement]:
    """Return where each job runs, in the order in which they were placed. clusters: name -> devices."""
    free = {name: FreeDevices(devices) for name, devices in clusters.items()}
    found: dict[str, JobPlacement] = {}
    waiting = list(decisions.order)
    while waiting:
        at = next(i for i in waiting if all(name in found for name in jobs[i].after))
        waiting.remove(at)
        job = jobs[at]
        from_s = max([job.ready_s, *(found[name].end_s for name in job.after)])
        best = min(
            (
                way
                for name in job.sizes
                for way in _ways(job, name, free[name], decisions.most[at] * clusters[name], from_s)
            ),
            key=lambda way: ((way.end_s - from_s) * (1 if not way.is_elastic else 1 / (1 - PAYS)), way.most),
        )
        for stint in best.stints:
            free[best.cluster].take(stint)
        found[job.name] = best
    return list(found.values())


def _ways(job: PlannedJob, cluster: str, free: FreeDevices, most: float, from_s: float) -> list[JobPlacement]:
    able = [size for size in job.sizes[cluster] if size.devices <= most] or list(job.sizes[cluster][:1])
    if not able:
        return []
    ways = [JobPlacement(job.name, cluster, (free.rigid(size, from_s),), False, size.devices) for size in able]
    if job.elastic and len(able) > 1:
        stints = free.elastic(able, from_s)
        if len(stints) > 1:
            ways.append(JobPlacement(job.name, cluster, stints, True, able[-1].devices))
    return ways


def again(
    jobs: Mapping[str, PlannedJob],
    clusters: Mapping[str, int],
    found: Sequence[JobPlacement],
    factors: Mapping[str, float],
) -> list[JobPlacement]:
    """Return the same decisions where each job takes `factors` times as long as was predicted."""
    free = {name: FreeDevices(devices) for name, devices in clusters.items()}
    done: dict[str, JobPlacement] = {}
    for each in found:
        job, factor = jobs[each.job], factors[each.job]
        sizes = [replace(s, time_s=s.time_s * factor) for s in job.sizes[each.cluster] if s.devices <= each.most]
        from_s = max([job.ready_s, *(done[name].end_s for name in job.after)])
        place = free[each.cluster]
        stints = place.elastic(sizes, from_s) if each.is_elastic else (place.rigid(sizes[-1], from_s),)
        for stint in stints:
            place.take(stint)
        done[each.job] = replace(each, stints=stints)
    return list(done.values())


def cost(jobs: Mapping[str, PlannedJob], found: Sequence[JobPlacement]) -> tuple[float, float, float]:
    """Return what is to be small, the first counts most: money for being late, days late and days until the end, both
    times priority."""
    money = late = end = 0.0
    for each in found:
        job = jobs[each.job]
        days = job.late_s(each.end_s) / DAY
        money += days * (job.late_per_day or 0.0)
        late += 0.0 if job.late_per_day is not None else days * job.priority
        end += job.priority * each.end_s / DAY
    return money, late, end


def schedule(jobs: Sequence[PlannedJob], clusters: Mapping[str, int]) -> list[JobPlacement]:
    """Return the best schedule that was found. Each job must have a size on some cluster, and `after` no circle."""
    by_name, random, whole = {job.name: job for job in jobs}, Random(0), (1.0,) * len(jobs)

    def shortest(job: PlannedJob) -> float:
        return min(size.time_s for sizes in job.sizes.values() for size in sizes)

    rules = (
        lambda i: (jobs[i].deadline_s, -jobs[i].priority),
        lambda i: (-(jobs[i].late_per_day or 0.0), -jobs[i].priority, jobs[i].deadline_s),
        lambda i: (shortest(jobs[i]) / jobs[i].priority, i),
        lambda i: (jobs[i].deadline_s - shortest(jobs[i]), i),
    )
    starts = [
        Decisions(tuple(sorted(range(len(jobs)), key=rule)), most) for rule in rules for most in (whole, _part(whole))
    ]
    scored = [(cost(by_name, found), k, found) for k, found in enumerate(placed(jobs, clusters, g) for g in starts)]
    score, at, found = min(scored, key=lambda each: each[:2])
    best = starts[at]
    for _ in range(TRIALS if len(jobs) > 1 else 0):
        other = _changed(best, random)
        tried = placed(jobs, clusters, other)
        if (its := cost(by_name, tried)) <= score:
            score, best, found = its, other, tried
    return found


def _part(most: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(each / 2 for each in most)


def _changed(decisions: Decisions, random: Random) -> Decisions:
    order, most = list(decisions.order), list(decisions.most)
    first, second = random.sample(range(len(order)), 2)
    kind = random.random()
    if kind < 0.35:
        order[first], order[second] = order[second], order[first]
    elif kind < 0.6:
        order.insert(second, order.pop(first))
    else:
        for i in (first, second) if random.random() < 0.5 else (first,):
            most[i] = random.choice((1.0, 0.75, 0.5, 1 / 3, 0.25, 0.125))
    return Decisions(tuple(order), tuple(most))
