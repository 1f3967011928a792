"""A site that cannot go on from its own files: what it lacks, or has otherwise, it takes from other sites.

It adopts another site's whole state (`adoption`) if its ranks lack an average, or if it gives way to a site from which
it has gone apart (`standing`); it takes lines for a ledger that is damaged (`mending`). Meanwhile it takes part in no
round.
"""

from __future__ import annotations

from contextlib import suppress

from argosy.observe.events import Events
from argosy.sync.sites import messages as say
from argosy.sync.sites.adoption import Adoption
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Ledger, Line, chain_of
from argosy.sync.sites.links import Links
from argosy.sync.sites.mending import Mending
from argosy.sync.sites.others import Others
from argosy.sync.sites.standing import Standing, gives_way


class SiteRecovery:
    """What an exchange does about its own site's state and ledger, and does for other sites that need a state."""

    def __init__(self, sites: Sites, ledger: Ledger, events: Events, links: Links[say.FromSite], others: Others):
        self._sites, self._ledger, self._events, self._links, self._others = sites, ledger, events, links, others
        self._adoption = Adoption(sites, ledger)
        self._mending = Mending(sites, ledger, events)

    @property
    def is_under_way(self) -> bool:
        """True while this site decides nothing."""
        return self._adoption.is_under_way or self._mending.is_under_way

    def standing(self) -> Standing:
        """Return where this site stands."""
        lines, reached = self._ledger.lines, 0
        with suppress(OSError, ValueError):
            reached = int(self._sites.reached.read_text())
        facts = {"tokens": self._ledger.tokens, "reached": reached, "adopts": self.is_under_way}
        return Standing(rounds=len(lines), chain=chain_of(lines), **facts)

    def tend(self) -> bool:
        """Do what can be done now. Returns True once the ledger is another, or whole again."""
        self._mending.look()
        if not self._mending.is_under_way:
            self._adoption.offer(self._links.tell)
        self._adoption.check(self._others.is_alive)
        is_lost = self._sites.lost.exists() or self._mending.is_of_others
        if is_lost and self._links.sites and not self._adoption.is_under_way:
            self.adopt_from(max(self._links.sites, key=lambda name: self._others.standing(name).rounds))
        if self._adoption.is_under_way:
            if not self._adoption.tend(self._links.tell):
                return False
            self._events.write("state_taken", rounds=len(self._ledger.lines))
            self._others.apart.clear()
            return True
        return self._mending.is_under_way and self._mending.tend(
            self._links.tell, self._others.holder(self._mending.wanted)
        )

    def again(self) -> None:
        """Ask again, in case that what was said was lost."""
        self._adoption.again(self._links.tell)

    def connected_again(self, name: str) -> None:
        """Ask that site again for what has not come."""
        self._adoption.connected_again(name)

    def asked(self, name: str) -> None:
        """Have the ranks leave their state for another site."""
        self._adoption.asked(name)

    def hear(self, name: str, message: say.StateOffer | say.FilePiece | say.NotThere, data: bytes) -> None:
        """Hear of another site's state, or of its ledger."""
        self._adoption.hear(name, message, data)

    def hear_line(self, name: str, line: Line) -> None:
        """Hear a line of another site's ledger, for one of this site's that is damaged."""
        if self._mending.is_under_way and not self._mending.hear(line):
            self.went_apart(name)

    def went_apart(self, name: str) -> None:
        """Give way to a site that has gone on without this one and otherwise, or leave that to it."""
        self._others.apart.add(name)
        mine, its = self.standing(), self._others.standing(name)
        if not self._adoption.is_under_way and gives_way(self._sites.me, mine, name, its, self._sites.names):
            self._events.write("site_gives_way", site=name, rounds=mine.rounds, its_rounds=its.rounds)
            self.adopt_from(name)

    def adopt_from(self, name: str) -> None:
        """Take another site's state over."""
        self._adoption.begin(name, self._links.tell)
        self._links.tell_all(say.StandingNotice(standing=self.standing()))
