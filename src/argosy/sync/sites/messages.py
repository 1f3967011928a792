"""What the exchanges of sites say to each other: a class for each message, checked when it arrives.

A frame is one line of JSON, with bytes behind it if the message is a `FilePiece`. One that is no message ends the
connection on which it came.

`Standing` is how far a site has come. Sites have gone apart if their ledgers differ in a round that both have. The one
whose ledger counts fewer tokens gives way; of as many, the later one of the run file. A site that gives way decides no
more rounds until it has the other's state, and what a ledger counts only grows: so two sites never give way to each
other, whatever they heard too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from argosy.processes.messages import Count, Text, WireRecord, decoded, encoded
from argosy.sync.sites.ledger import AnyFloat, Chain, Crc, Line, Ranges, SiteName, Tokens


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


VERSION = 4
PIECE_BYTES = 1 << 18
"""Files travel in pieces of so many bytes at most."""
Source = Literal["sent", "slice", "average", "state", "ledger"]
"""sent: a site's change; slice: a slice of the average, at the site that summed it; average; state; ledger."""


class SiteHello(WireRecord, extra="ignore"):
    """The first message of both ends. What another version says more is left out, so that it can be refused by name."""

    kind: Literal["hello"] = "hello"
    version: int
    site: SiteName
    run: str = ""
    model: str = ""
    """These two must be the same at both ends."""
    standing: Standing = Standing()
    cluster: str = ""
    """Of a probe: the site's devices."""


class SiteRefused(WireRecord):
    """The end of a connection."""

    kind: Literal["refused"] = "refused"
    why: Text


class SitePing(WireRecord):
    """The site lives."""

    kind: Literal["ping"] = "ping"


class StandingNotice(WireRecord):
    """Where the site stands."""

    kind: Literal["at"] = "at"
    standing: Standing


class ReadyNotice(WireRecord):
    """The site's change of a round is there."""

    kind: Literal["ready"] = "ready"
    round: Count
    chain: Chain
    attempt: Count
    """The last one that the site has heard of."""
    tokens: Tokens
    skipped: Ranges


class ProposalNotice(WireRecord):
    """The leader says who takes part in a round."""

    kind: Literal["propose"] = "propose"
    round: Count
    chain: Chain
    attempt: Count
    weights: Annotated[dict[SiteName, Tokens], Field(min_length=1)]
    """Of those who take part, in the order of the run file."""


class SliceSummed(WireRecord, ser_json_inf_nan="constants"):
    """The site has summed a slice."""

    kind: Literal["reduced"] = "reduced"
    round: Count
    attempt: Count
    part: Count
    sum: Crc
    products: list[list[AnyFloat]]
    """Inner products of the changes within the slice."""


class LineRequest(WireRecord):
    """The site wants the ledger's line of a round."""

    kind: Literal["want_line"] = "want_line"
    round: Count


class LineNotice(WireRecord):
    """A line of the ledger."""

    kind: Literal["line"] = "line"
    line: Line


class StateRequest(WireRecord):
    """The site wants the whole state."""

    kind: Literal["want_state"] = "want_state"


class StateOffer(WireRecord):
    """The state after a round is there, and the ledger up to it."""

    kind: Literal["state"] = "state"
    round: Count
    size: Count
    sum: Crc
    ledger_size: Count


class PieceRequest(WireRecord):
    """The site wants some bytes of a file."""

    kind: Literal["get"] = "get"
    what: Source
    round: Count
    attempt: Count
    start: Count
    """First byte of what is fetched, within the whole."""
    at: Count
    """First byte that is wanted, after `start`."""
    bytes: Annotated[int, Field(ge=1, le=PIECE_BYTES)]


class FilePiece(WireRecord):
    """Some bytes of a file, behind the message."""

    kind: Literal["data"] = "data"
    what: Source
    round: Count
    start: Count
    at: Count


class NotThere(WireRecord):
    """What is wanted is not there, or not any more."""

    kind: Literal["gone"] = "gone"
    what: Source
    round: Count
    start: Count


FromSite = (
    SiteHello | SiteRefused | SitePing | StandingNotice | ReadyNotice | ProposalNotice | SliceSummed | LineRequest
    | LineNotice | StateRequest | StateOffer | PieceRequest | FilePiece | NotThere
)  # fmt: skip
OfRound = ReadyNotice | ProposalNotice | SliceSummed | FilePiece | NotThere
"""What is said about one round, while it is made."""
FROM_SITE: TypeAdapter[FromSite] = TypeAdapter(Annotated[FromSite, Field(discriminator="kind")])
M = TypeVar("M")


def packed(message: WireRecord, data: bytes | memoryview = b"") -> bytes:
    """Return the frame of a message."""
    return b"".join([encoded(message), b"\n", data])


def unpacked(frame: bytes, kinds: TypeAdapter[M]) -> tuple[M, bytes]:
    """Return the message of a frame, one of `kinds`, and the bytes behind it. Raises: BadMessage."""
    head, _, data = frame.partition(b"\n")
    return decoded(head, kinds), data
