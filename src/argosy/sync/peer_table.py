"""The other sites, as a site's exchange knows them: who is there, where each stands, who leads."""

from __future__ import annotations

import time

from argosy.sync.layout import Sites
from argosy.sync.links import Links
from argosy.sync.messages import FromSite, Standing

BEHIND = 1
"""Rounds that a site's ranks may be behind when a round is decided, and be dealt samples of the next one."""


class PeerTable:
    """The other sites, as one of them sees them."""

    def __init__(self, sites: Sites, links: Links[FromSite]):
        self._sites, self._links = sites, links
        self._standings: dict[str, Standing] = {}
        self.apart: set[str] = set()
        """Sites that have gone on without this one, and otherwise."""

    def note(self, name: str, standing: Standing) -> None:
        self._standings[name] = standing

    def standing(self, name: str) -> Standing:
        return self._standings.get(name, Standing())

    def is_connected(self, name: str) -> bool:
        """Return True if the site can be spoken to; a site always can speak to itself."""
        return name == self._sites.me or name in self._links.sites

    def is_alive(self, name: str) -> bool:
        """Return True if the site was heard within sync.patience_s."""
        if self.is_connected(name):
            return True
        return time.monotonic() - self._links.heard_s[name] < self._sites.run.sync.patience_s

    def leader(self, number: int) -> str:
        return next(name for name in self._sites.names if name == self._sites.me or self._may_lead(name, number))

    def _may_lead(self, name: str, number: int) -> bool:
        its = self._standings.get(name)
        is_behind = its is not None and (its.rounds < number or its.adopts)
        return self.is_alive(name) and not is_behind and name not in self.apart

    def is_near(self, name: str, number: int, mine: Standing) -> bool:
        """Return True if a site's ranks have nearly come to round `number`. mine: where this site stands."""
        reached = mine.reached if name == self._sites.me else self.standing(name).reached
        return self.is_connected(name) and name not in self.apart and reached >= number - BEHIND

    def holder(self, number: int) -> str | None:
        """Return a connected site that has the average of round `number`."""
        here = (name for name in self._links.sites if name not in self.apart)
        return next((name for name in here if self.standing(name).rounds > number), None)
