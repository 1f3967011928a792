"""Dealing samples out: to sites by rounds, to the workers of parameter servers one item at a time.

Sites: a pure function of the round while all take part, else what the ledger deals out. A site numbers its samples by
its own steps: step s of a site with b sequences takes its samples s b to (s + 1) b, whatever became of others.
`SiteOrder` turns these numbers into those of the run, of which each is trained on once.

Workers: item i is the samples i G to (i + 1) G of the run, G those of sync.local_steps steps. An update is made from
what one worker computed of one item. Update u, from 0, makes version u + 1 of the weights. A worker that is dealt an
item computes its gradient with the version of that moment; how many updates others make before its own is the
gradient's staleness.

The bound holds for every order in which gradients may come (`DealtItems.may_deal`): with n items out, the one dealt at
version v is at worst the last to come, after u - v updates that were made and n - 1 that others may make. As long as
no item is dealt that could lift that above the bound for itself or another, none exceeds it, and no gradient that was
computed is thrown away for being late. A stale-synchronous server (Ho et al. 2013) holds workers for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from argosy.data.order import Range, SampleOrder, Samples

RESERVE = 1 << 48
"""Samples from this number on stand in for those of bad steps; no run reaches them otherwise."""
RESERVE_OF_SITE = 1 << 40


@dataclass(frozen=True)
class Shares:
    """The part of each global batch that each site takes."""

    names: tuple[str, ...]
    batches: tuple[int, ...]
    """Sequences of a step, by site."""
    round_steps: int
    from_step: int = 0
    """Rounds that begin before this step have one step each."""
    ahead: int = 1
    """The ledger's line of a round deals out the round so many later: 2 if that round begins before the line is
    there."""

    def start(self, number: int) -> int:
        """Return how many steps are done when round `number` begins."""
        return number if number <= self.from_step else self.from_step + (number - self.from_step) * self.round_steps

    def round_of(self, step: int) -> int:
        return step if step < self.from_step else self.from_step + (step - self.from_step) // self.round_steps

    def steps_of(self, number: int) -> int:
        """Return the steps of a round, if the run does not end in it."""
        return self.start(number + 1) - self.start(number)

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all sites."""
        return sum(self.batches)

    def batch(self, site: str) -> int:
        return self.batches[self.names.index(site)]

    def first(self, site: str) -> int:
        """Return the place of a site's first sequence in each global batch."""
        return sum(self.batches[: self.names.index(site)])

    def of_round(self, number: int, site: str) -> list[Range]:
        """Return the samples of a site in a round in which all take part: its share of every global batch."""
        first, batch, whole = self.first(site), self.batch(site), self.global_batch
        steps = range(self.start(number), self.start(number + 1))
        return [(step * whole + first, step * whole + first + batch) for step in steps]

    def all_of_round(self, number: int) -> Range:
        """Return all samples of a round in which all take part."""
        return self.start(number) * self.global_batch, self.start(number + 1) * self.global_batch


def deal(
    shares: Shares, number: int, members: Iterable[str], returned: Sequence[Range]
) -> tuple[dict[str, list[Range]], list[Range]]:
    """Deal out the samples of round `number` to `members`, those that came back first.

    Returns the ranges of each member, and what is left. With all sites and nothing returned: each site's own share.
    """
    present = [name for name in shares.names if name in set(members)]
    if len(present) == len(shares.names) and not returned:
        return {name: shares.of_round(number, name) for name in present}, []
    pool = merged([*returned, shares.all_of_round(number)])
    dealt = {}
    for name in present:
        dealt[name], pool = _cut(pool, shares.steps_of(number) * shares.batch(name))
    return dealt, pool


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same samples as few ascending ranges."""
    return merged_in_order(sorted((first, end) for first, end in ranges if first < end))


def _cut(pool: Sequence[Range], samples: int) -> tuple[list[Range], list[Range]]:
    taken: list[Range] = []
    rest = list(pool)
    while samples:
        first, end = rest.pop(0)
        middle = min(end, first + samples)
        taken.append((first, middle))
        samples -= middle - first
        if middle < end:
            rest.insert(0, (middle, end))
    return taken, rest


class SiteOrder:
    """The order of one site's samples, by the site's own numbers; it stands in for the run's `SampleOrder`."""

    def __init__(
        self, order: SampleOrder, shares: Shares, site: str, dealt: Callable[[int], Mapping[str, list[Range]] | None]
    ):
        """`dealt(round)`: what the ledger deals out in a round, by site; None: each site's own share."""
        self._order, self._shares, self._site, self._dealt = order, shares, site, dealt
        self._batch = shares.batch(site)
        self.first_row = shares.first(site)
        """The place of the site's first sequence in each global batch."""
        self._reserve = RESERVE + shares.names.index(site) * RESERVE_OF_SITE
        self.skipped: tuple[Range, ...] = ()
        """The site's samples of bad steps, each a range within a step. Others stand in for them; for those as well if
        a range is there again."""

    def samples(self, start: int, stop: int) -> Samples:
        return Samples.joined([order.samples(*some) for order, some in self._parts(start, stop)])

    def numbers(self, start: int, stop: int) -> list[Range]:
        """Return the run's numbers of the site's samples `start` to `stop`."""
        return merged_in_order(some for _, some in self._parts(start, stop))

    def _parts(self, start: int, stop: int) -> Iterator[tuple[SampleOrder, Range]]:
        """Yield these samples by their numbers in an order: stand-ins have the mixture of those that they stand for."""
        replaced = {some: place for place, some in enumerate(self.skipped)}
        while start < stop:
            end = min(stop, (start // self._batch + 1) * self._batch)
            step = start // self._batch
            place = replaced.get((step * self._batch, (step + 1) * self._batch))
            if place is not None:
                base = self._reserve + place * self._batch - step * self._batch
                yield self._order.as_of(self.first_dealt(step)), (base + start, base + end)
            else:
                for some in self._of_step(step, start - step * self._batch, end - step * self._batch):
                    yield self._order, some
            start = end

    def first_dealt(self, step: int) -> int:
        """Return the run's number of the first sample that the site was dealt for a step, others stand in or not."""
        return self._of_step(step, 0, 1)[0][0]

    def replaced(self, start: int, stop: int) -> list[Range]:
        """Return the run's numbers of those of the site's samples `start` to `stop` that others stand in for."""
        steps = sorted({first // self._batch for first, _ in self.skipped if start <= first < stop})
        return merged_in_order(some for step in steps for some in self._of_step(step, 0, self._batch))

    def _of_step(self, step: int, first: int, end: int) -> list[Range]:
        number = self._shares.round_of(step)
        within = step - self._shares.start(number)
        dealt = self._dealt(number)
        if dealt is None or self._site not in dealt:
            begin = step * self._shares.global_batch + self.first_row
            return [(begin + first, begin + end)]
        _, rest = _cut(dealt[self._site], within * self._batch + first)
        taken, _ = _cut(rest, end - first)
        return taken


def merged_in_order(ranges: Iterable[Range]) -> list[Range]:
    """Join ranges that follow each other."""
    out: list[Range] = []
    for first, end in ranges:
        if out and out[-1][1] == first:
            out[-1] = (out[-1][0], end)
        else:
            out.append((first, end))
    return out


@dataclass(frozen=True)
class AppliedUpdate:
    """An update that was made, as the ledger has it."""

    update: int
    item: int
    site: str
    """The worker that computed its gradient."""
    version: int
    """Updates that had made the weights that it was computed with."""

    @property
    def staleness(self) -> int:
        """Updates that others made meanwhile."""
        return self.update - self.version


@dataclass(frozen=True)
class DealtItem:
    """An item that is out."""

    name: str
    item: int
    version: int


@dataclass
class DealtItems:
    """The items that are out, those that are done, and the next one."""

    steps: int
    """Updates of the whole run."""
    bound: int
    """Staleness that no update exceeds."""
    generation: str = ""
    done: dict[int, AppliedUpdate] = field(default_factory=dict)
    """Updates by item."""
    skipped: set[int] = field(default_factory=set)
    """Items that no update is made from, because of bad gradients; others stand in for them."""
    out: dict[str, DealtItem] = field(default_factory=dict)
    """Dealt items by worker."""
    committed: dict[str, AppliedUpdate] = field(default_factory=dict)
    """The last update of each worker in this generation by its lease, should it ask again."""
    _leases: int = 0
    _first: int = 0
    """No item before it is left."""

    @classmethod
    def after(
        cls, updates: Iterable[AppliedUpdate], skipped: Iterable[int], steps: int, bound: int, generation: str = ""
    ) -> DealtItems:
        """Return it as it was after these updates."""
        return cls(steps, bound, generation, {update.item: update for update in updates}, set(skipped))

    @property
    def version(self) -> int:
        return len(self.done)

    @property
    def is_over(self) -> bool:
        return self.version >= self.steps

    @property
    def may_deal(self) -> bool:
        """True if one more item can be out without any gradient becoming too stale."""
        others = len(self.out)
        oldest = min((lease.version for lease in self.out.values()), default=self.version)
        return self.version + others < self.steps and self.version - oldest + others <= self.bound

    @property
    def holds_up(self) -> list[str]:
        """Workers that others have to wait for."""
        if self.may_deal or not self.out:
            return []
        oldest = min(lease.version for lease in self.out.values())
        return [site for site, lease in self.out.items() if lease.version == oldest]

    def deal(self, site: str) -> DealtItem | None:
        """Deal the next item to a worker; None if it has to wait. What it had before is given back."""
        self.give_back(site)
        if not self.may_deal:
            return None
        taken = {lease.item for lease in self.out.values()}
        item = next(i for i in self._items() if i not in taken)
        self._leases += 1
        lease = DealtItem(f"{self.generation}-{self._leases}", item, self.version)
        self.out[site] = lease
        return lease

    def give_back(self, site: str) -> DealtItem | None:
        """Take back what a worker was dealt, if anything: another gets it."""
        return self.out.pop(site, None)

    def commit(self, site: str, lease: str) -> AppliedUpdate | None:
        """Count a worker's gradient as the next update; None if what it was dealt has been taken back."""
        if lease in self.committed:
            return self.committed[lease]
        mine = self._ended(site, lease)
        if mine is None:
            return None
        update = AppliedUpdate(self.version, mine.item, site, mine.version)
        self.done[mine.item] = update
        self.committed = {name: one for name, one in self.committed.items() if one.site != site} | {lease: update}
        return update

    def skip(self, site: str, lease: str) -> int | None:
        """Make no update from a worker's item, now or later; returns it, None if it was taken back."""
        mine = self._ended(site, lease)
        if mine is None:
            return None
        self.skipped.add(mine.item)
        return mine.item

    def _ended(self, site: str, lease: str) -> DealtItem | None:
        """Take from a worker what it was dealt under a lease; None if that has been taken back."""
        mine = self.out.get(site)
        return self.out.pop(site) if mine is not None and mine.name == lease else None

    def _items(self) -> Iterator[int]:
        """Return the items that are neither done nor skipped, in order."""
        while self._is_settled(self._first):
            self._first += 1
        return (item for item in count(self._first) if not self._is_settled(item))

    def _is_settled(self, item: int) -> bool:
        return item in self.done or item in self.skipped


def rate_of(staleness: int, how: str) -> float:
    """Return what the learning rate of a gradient is multiplied by (Zhang, Gupta, Lian and Liu 2016, equation 6)."""
    return 1.0 if how == "constant" else 1.0 / max(1, staleness)
