"""Which samples are dealt to whom, and when a worker has to wait: the decisions of the first server, without its wires.

Item i is the samples i G to (i + 1) G of the run, G those of sync.local_steps steps. An update is made from what one
worker computed of one item. Update u, from 0, makes version u + 1 of the weights. A worker that is dealt an item
computes its gradient with the version of that moment; how many updates others make before its own is the gradient's
staleness.

The bound holds for every order in which gradients may come (`Dealing.may_deal`): with n items out, the one dealt at
version v is at worst the last to come, after u - v updates that were made and n - 1 that others may make. As long as
no item is dealt that could lift that above the bound for itself or another, none exceeds it, and no gradient that was
computed is thrown away for being late. A stale-synchronous server (Ho et al. 2013) holds workers for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from argosy.data.order import Range


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

    def to_json(self, item_samples: int) -> dict[str, Any]:
        """Return the line of the ledger. item_samples: of each item."""
        samples: Range = (self.item * item_samples, (self.item + 1) * item_samples)
        return {
            "update": self.update, "item": self.item, "samples": [list(samples)], "site": self.site,
            "version": self.version, "staleness": self.staleness,
        }  # fmt: skip

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> AppliedUpdate:
        """Return the update of a line. Raises: KeyError, TypeError, ValueError if it is none."""
        return cls(int(line["update"]), int(line["item"]), str(line["site"]), int(line["version"]))


@dataclass(frozen=True)
class DealtItem:
    """An item that is out."""

    name: str
    item: int
    version: int


@dataclass
class Dealing:
    """What is out, what is done, and what comes next."""

    steps: int
    """Updates of the whole run."""
    bound: int
    """Staleness that no update exceeds."""
    epoch: str = ""
    done: dict[int, AppliedUpdate] = field(default_factory=dict)
    """Updates by item."""
    skipped: set[int] = field(default_factory=set)
    """Items that no update is made from, because of bad gradients; others stand in for them."""
    out: dict[str, DealtItem] = field(default_factory=dict)
    """By worker."""
    committed: dict[str, AppliedUpdate] = field(default_factory=dict)
    """The last update of each worker in this epoch by its lease, should it ask again."""
    _leases: int = 0
    _first: int = 0
    """No item before it is left."""

    @classmethod
    def after(
        cls, updates: Iterable[AppliedUpdate], skipped: Iterable[int], steps: int, bound: int, epoch: str = ""
    ) -> Dealing:
        """Return it as it was after these updates."""
        return cls(steps, bound, epoch, {update.item: update for update in updates}, set(skipped))

    @property
    def version(self) -> int:
        """Updates made so far."""
        return len(self.done)

    @property
    def is_over(self) -> bool:
        """True once all updates are made."""
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
        lease = DealtItem(f"{self.epoch}-{self._leases}", item, self.version)
        self.out[site] = lease
        return lease

    def give_back(self, site: str) -> DealtItem | None:
        """Take back what a worker was dealt, if anything: another gets it."""
        return self.out.pop(site, None)

    def commit(self, site: str, lease: str) -> AppliedUpdate | None:
        """Count a worker's gradient as the next update; None if what it was dealt has been taken back."""
        if lease in self.committed:
            return self.committed[lease]
        mine = self.out.get(site)
        if mine is None or mine.name != lease:
            return None
        del self.out[site]
        update = AppliedUpdate(self.version, mine.item, site, mine.version)
        self.done[mine.item] = update
        self.committed = {name: one for name, one in self.committed.items() if one.site != site} | {lease: update}
        return update

    def skip(self, site: str, lease: str) -> int | None:
        """Make no update from a worker's item, now or later; returns it, None if it was taken back."""
        mine = self.out.get(site)
        if mine is None or mine.name != lease:
            return None
        del self.out[site]
        self.skipped.add(mine.item)
        return mine.item

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
