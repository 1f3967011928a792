"""Messages between parts of a run: exchanges of sites, parameter servers and workers. Each is checked when it arrives.

A frame is one line of JSON, with bytes behind it if the message is a piece of a file, of weights or of a gradient. One
that is no message ends the connection on which it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from argosy.config.sync import MOST_LOCAL_STEPS
from argosy.processes.connection import DEFERRED, Count, Text, WireRecord, decoded, encoded
from argosy.sync.ledger import AnyFloat, Chain, Crc, Line, Ranges, SiteName, Tokens

VERSION = 7
MESSAGE_PIECE_BYTES = 1 << 18
"""Files, weights and gradients travel in pieces of so many bytes at most."""
AHEAD_BYTES = 1 << 23
"""Bytes that may be under way: what a link of 1 Gbit/s and 60 ms holds."""
Id = Annotated[str, Field(max_length=64)]
Reason = Annotated[str, Field(max_length=1000)]
Losses = Annotated[list[float], Field(min_length=1, max_length=MOST_LOCAL_STEPS)]
Norms = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1, max_length=MOST_LOCAL_STEPS)]
M = TypeVar("M")


def framed(message: WireRecord, data: bytes | memoryview = b"") -> bytes:
    """Return the frame of a message and the bytes that come with it."""
    return b"".join([encoded(message), b"\n", data])


def unframed(frame: bytes, kinds: TypeAdapter[M]) -> tuple[M, bytes]:
    """Return the message of a frame, one of `kinds`, and the bytes behind it. Raises: BadMessage."""
    head, _, data = frame.partition(b"\n")
    return decoded(head, kinds), data


# ---- all parts ------------------------------------------------------------------------------------------------------


class Hello(WireRecord, extra="ignore"):
    """The first message of both ends. What another version says more is left out, so that it can be refused by name."""

    kind: Literal["hello"] = "hello"
    version: int
    site: SiteName
    run: str = ""
    model: str = ""
    """These two must be the same at both ends."""


class Refusal(WireRecord):
    """The end of a connection."""

    kind: Literal["refused"] = "refused"
    why: Text


class Ping(WireRecord):
    """The sender lives."""

    kind: Literal["ping"] = "ping"


# ---- exchanges of sites ---------------------------------------------------------------------------------------------


class SiteProgress(WireRecord):
    """A site's progress.

    Sites have gone apart if their ledgers differ in a round that both have. The one whose ledger counts fewer tokens
    gives way; of as many, the later one of the run file. A site that gives way decides no more rounds until it has the
    other's state, and what a ledger counts only grows: so two sites never give way to each other, whatever they heard
    too late.
    """

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
    connected: tuple[SiteName, ...] = ()
    """Sites that it is connected with."""


def gives_way(me: str, mine: SiteProgress, other: str, its: SiteProgress, names: Sequence[str]) -> bool:
    """Return True if the site `me` gives way to `other`, from which it has gone apart. names: as in the run file."""
    return (its.tokens, -names.index(other)) > (mine.tokens, -names.index(me))


Source = Literal["sent", "slice", "average", "state", "ledger"]
"""sent: a site's change; slice: a slice of the average, at the site that summed it; average; state; ledger."""


class SiteHello(Hello):
    """The hello of a site's exchange, or of a probe."""

    standing: SiteProgress = SiteProgress()
    cluster: str = ""
    """Devices of the site, in a probe."""


class ProgressNotice(WireRecord):
    """The site's standing."""

    kind: Literal["progress"] = "progress"
    standing: SiteProgress


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
    """The leader names the sites that take part in a round."""

    kind: Literal["propose"] = "propose"
    round: Count
    chain: Chain
    attempt: Count
    weights: Annotated[dict[SiteName, Tokens], Field(min_length=1)]
    """Tokens of each site that takes part, in the order of the run file."""


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
    bytes: Annotated[int, Field(ge=1, le=MESSAGE_PIECE_BYTES)]


class FilePiece(WireRecord):
    """Some bytes of a file, behind the message."""

    kind: Literal["data"] = "data"
    what: Source
    round: Count
    start: Count
    at: Count


class BytesMissing(WireRecord):
    """The wanted bytes are not there, or not any more."""

    kind: Literal["missing"] = "missing"
    what: Source
    round: Count
    start: Count


FromSite = (
    SiteHello | Refusal | Ping | ProgressNotice | ReadyNotice | ProposalNotice | SliceSummed | LineRequest | LineNotice
    | StateRequest | StateOffer | PieceRequest | FilePiece | BytesMissing
)  # fmt: skip
OfRound = ReadyNotice | ProposalNotice | SliceSummed | FilePiece | BytesMissing
"""Messages about one round, while it is made."""
FROM_SITE: TypeAdapter[FromSite] = TypeAdapter(Annotated[FromSite, Field(discriminator="kind")], config=DEFERRED)


# ---- a worker says to parameter servers -----------------------------------------------------------------------------


class PartHello(Hello):
    """The hello of a parameter server, or of a worker."""

    session: Id
    """Another one for each process."""


class NumberedMessage(WireRecord, strict=True):
    """A question, or its answer."""

    ask: Count
    """Number of the question, which the answer has too."""


class AskForWork(NumberedMessage):
    """A worker wants samples."""

    kind: Literal["work"] = "work"


class PullWeights(NumberedMessage):
    """A worker wants weights of that version, or newer ones."""

    kind: Literal["pull"] = "pull"
    generation: Id
    version: Count


class PushPiece(WireRecord, strict=True):
    """A piece of its gradient."""

    kind: Literal["put"] = "put"
    lease: Id
    at: Count


class Commit(NumberedMessage):
    """All of its gradient, or of what its steps have changed, is at all servers."""

    kind: Literal["commit"] = "commit"
    lease: Id
    losses: Losses
    """The loss of each of its steps."""
    norms: Norms
    """The gradient's norm in each, before clipping."""


class BadGradient(NumberedMessage):
    """Its loss or gradient is not finite, and nothing was pushed."""

    kind: Literal["bad"] = "bad"
    lease: Id
    why: Reason


class Scored(WireRecord, strict=True):
    """The score, on held-out text, of the weights that it pulled to be scored."""

    kind: Literal["scored"] = "scored"
    version: Count
    loss: float | None
    bits_per_byte: float | None


class WorkerLeaves(WireRecord, strict=True):
    """A worker ends; its items are dealt to another."""

    kind: Literal["leaves"] = "leaves"


# ---- the first server says to the others ----------------------------------------------------------------------------


class GoToVersion(WireRecord, strict=True):
    """Go to a version: that of a checkpoint, or 0."""

    kind: Literal["go_to_version"] = "go_to_version"
    generation: Id
    version: Count


class Apply(WireRecord, strict=True):
    """Apply a gradient as the update that makes version `update` + 1."""

    kind: Literal["apply"] = "apply"
    generation: Id
    update: Count
    lease: Id
    rate: float
    save: bool


class CheckServer(WireRecord, strict=True):
    """Say which version you have; this is the one that you should have."""

    kind: Literal["check"] = "check"
    generation: Id
    version: Count


class Finish(WireRecord, strict=True):
    """End, once the state is saved."""

    kind: Literal["finish"] = "finish"


# ---- a server says --------------------------------------------------------------------------------------------------


class NextTask(NumberedMessage):
    """The next task."""

    generation: Id
    version: Count
    """The version of the weights to use."""


class DealtWork(NextTask):
    """Compute the gradient of samples."""

    kind: Literal["dealt"] = "dealt"
    lease: Id
    item: Count


class ScoreRequest(NextTask):
    """Score the weights of this version on held-out text, and ask again."""

    kind: Literal["score"] = "score"


class RunIsOver(NextTask):
    """There is nothing left to do."""

    kind: Literal["run_is_over"] = "run_is_over"


class WaitForWork(NumberedMessage):
    """Wait."""

    kind: Literal["wait"] = "wait"
    by: list[Id]
    """The server that is not ready, or the slow workers that are waited for."""


class Weights(NumberedMessage):
    """A piece of the weights."""

    kind: Literal["weights"] = "weights"
    version: Count
    at: Count


class WeightsGone(NumberedMessage):
    """The servers have gone back to a checkpoint: ask for work again."""

    kind: Literal["weights_gone"] = "weights_gone"


class PieceReceived(WireRecord, strict=True):
    """A piece of the gradient has come."""

    kind: Literal["piece_received"] = "piece_received"
    lease: Id
    at: Count


class Committed(NumberedMessage):
    """The gradient is an update; or it is no longer wanted (`update` is None): its samples are another's."""

    kind: Literal["committed"] = "committed"
    update: Count | None
    staleness: Count = 0
    rate: float = 0.0


class FailureNotice(WireRecord, strict=True):
    """The run has failed: no worker can go on."""

    kind: Literal["failed"] = "failed"
    why: Reason


class ServerStatus(WireRecord, strict=True):
    """The version of a server; `problem`: why it cannot go on."""

    kind: Literal["status"] = "status"
    generation: Id
    version: Count
    problem: Reason = ""


Order = GoToVersion | Apply | CheckServer | Finish
"""Messages that the first server alone may send."""
FromPart = (
    PartHello | Refusal | Ping | AskForWork | PullWeights | PushPiece | Commit | BadGradient | Scored | WorkerLeaves
    | Order | DealtWork | ScoreRequest | RunIsOver | WaitForWork | Weights | WeightsGone | PieceReceived | Committed
    | FailureNotice | ServerStatus
)  # fmt: skip
FROM_PART: TypeAdapter[FromPart] = TypeAdapter(Annotated[FromPart, Field(discriminator="kind")], config=DEFERRED)
