"""How far a site has come, as it says of itself, and which of two sites gives way if they went on without each other.

Sites have gone apart if their ledgers differ in a round that both have. The one whose ledger counts fewer tokens gives
way; of as many, the later one of the run file. A site that gives way decides no more rounds until it has the other's
state, and what a ledger counts only grows: so two sites never give way to each other, whatever they heard too late.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy.processes.messages import Count, WireRecord
from argosy.sync.sites.ledger import Chain


class Standing(WireRecord):
    """How far a site has come."""

    rounds: Count = 0
    """Rounds in its ledger."""
    chain: Chain = ""
    """Checksum of its ledger."""
    tokens: Count = 0
    """Tokens that its ledger counts, of all sites."""
    reached: Count = 0
    """Rounds that its ranks have made; they train in the next one, or wait for it."""
    adopts: bool = False
    """True while it is to take over another site's state, or lines of its ledger: it decides nothing."""


def gives_way(me: str, mine: Standing, other: str, its: Standing, names: Sequence[str]) -> bool:
    """Return True if the site `me` gives way to `other`, from which it has gone apart. names: as in the run file."""
    return (its.tokens, -names.index(other)) > (mine.tokens, -names.index(me))
