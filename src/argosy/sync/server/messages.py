"""What servers and workers say to each other: a head of JSON, which is checked before it is used, and bytes behind it.

A worker asks the first server, which deals samples out, for work; pulls weights from all servers; pushes its gradient
to all of them; and commits it at the first, which then tells the others to apply it. See `training.server`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from argosy.config.sync import MOST_LOCAL_STEPS
from argosy.processes.messages import BadMessage, Count, WireRecord, decoded, encoded

VERSION = 2
PIECE_BYTES = 1 << 20
"""Weights and gradients travel in pieces of so many bytes."""
AHEAD_BYTES = 1 << 23
"""So much of a gradient is under way before its arrival is confirmed."""
HEAD_BYTES = 1 << 15
"""No head is longer."""

Id = Annotated[str, Field(max_length=64)]
Reason = Annotated[str, Field(max_length=1000)]
Losses = Annotated[list[float], Field(min_length=1, max_length=MOST_LOCAL_STEPS)]
Norms = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1, max_length=MOST_LOCAL_STEPS)]


class ServerMessage(WireRecord, strict=True):
    """A message without its bytes."""


# ---- a worker says ----------------------------------------------------------------------------------------------


class Hello(ServerMessage):
    """The first message of a connection."""

    kind: Literal["hello"] = "hello"
    version: Count
    site: Id
    session: Id
    """Another one for each process."""
    model: Id
    run: Id


class Ping(ServerMessage):
    """It lives."""

    kind: Literal["ping"] = "ping"


class AskForWork(ServerMessage):
    """It wants samples."""

    kind: Literal["work"] = "work"
    ask: Count
    """Number of the question; the answer has it too."""


class PullWeights(ServerMessage):
    """It wants weights of that version, or newer ones."""

    kind: Literal["pull"] = "pull"
    ask: Count
    epoch: Id
    version: Count


class PushPiece(ServerMessage):
    """A piece of its gradient."""

    kind: Literal["put"] = "put"
    lease: Id
    at: Count


class Commit(ServerMessage):
    """All of its gradient, or of what its steps have changed, is at all servers."""

    kind: Literal["commit"] = "commit"
    ask: Count
    lease: Id
    losses: Losses
    """The loss of each of its steps."""
    norms: Norms
    """The gradient's norm in each, before clipping."""


class BadGradient(ServerMessage):
    """Its loss or gradient is not finite, and nothing was pushed."""

    kind: Literal["bad"] = "bad"
    ask: Count
    lease: Id
    why: Reason


class Scored(ServerMessage):
    """How well the weights that it pulled to be scored predict held-out text."""

    kind: Literal["scored"] = "scored"
    version: Count
    loss: float | None
    bits_per_byte: float | None


class Bye(ServerMessage):
    """It ends; what was dealt to it is dealt to another."""

    kind: Literal["bye"] = "bye"


# ---- the first server says to the others ------------------------------------------------------------------------


class Begin(ServerMessage):
    """Go to a version: that of a checkpoint, or 0."""

    kind: Literal["begin"] = "begin"
    epoch: Id
    version: Count


class Apply(ServerMessage):
    """Apply a gradient as the update that makes version `update` + 1."""

    kind: Literal["apply"] = "apply"
    epoch: Id
    update: Count
    lease: Id
    rate: float
    save: bool


class CheckServer(ServerMessage):
    """Say where you are; this is where you should be."""

    kind: Literal["look"] = "look"
    epoch: Id
    version: Count


class Finish(ServerMessage):
    """End, once the state is saved."""

    kind: Literal["finish"] = "finish"


# ---- a server says ----------------------------------------------------------------------------------------------


class Welcome(ServerMessage):
    """Hello."""

    kind: Literal["welcome"] = "welcome"


class Refused(ServerMessage):
    """You cannot take part."""

    kind: Literal["refused"] = "refused"
    why: Reason
    is_input: bool = True
    """False if the run has failed, and nobody can."""


class HelloNeeded(ServerMessage):
    """Say hello first: this server was started again."""

    kind: Literal["stranger"] = "stranger"


class DealtWork(ServerMessage):
    """Samples, and the version of the weights to use."""

    kind: Literal["dealt"] = "dealt"
    ask: Count
    lease: Id
    item: Count
    epoch: Id
    version: Count


class ScoreRequest(ServerMessage):
    """Score the weights of this version on held-out text, and ask again."""

    kind: Literal["judge"] = "judge"
    ask: Count
    epoch: Id
    version: Count


class RunIsOver(ServerMessage):
    """There is nothing left to do."""

    kind: Literal["over"] = "over"
    ask: Count
    version: Count


class WaitForWork(ServerMessage):
    """Wait."""

    kind: Literal["held"] = "held"
    ask: Count
    by: list[Id]
    """The server that is not ready, or the slow workers that are waited for."""


class Weights(ServerMessage):
    """A piece of the weights."""

    kind: Literal["weights"] = "weights"
    ask: Count
    version: Count
    at: Count


class PieceReceived(ServerMessage):
    """A piece of the gradient has come."""

    kind: Literal["got"] = "got"
    lease: Id
    at: Count


class Committed(ServerMessage):
    """The gradient is an update; or it is no longer wanted (`update` is None): its samples are another's."""

    kind: Literal["committed"] = "committed"
    ask: Count
    update: Count | None
    staleness: Count = 0
    rate: float = 0.0


class ServerStatus(ServerMessage):
    """Where a server is; `problem`: why it cannot go on."""

    kind: Literal["at"] = "at"
    epoch: Id
    version: Count
    problem: Reason = ""


Message = (
    Hello
    | Ping
    | AskForWork
    | PullWeights
    | PushPiece
    | Commit
    | BadGradient
    | Scored
    | Bye
    | Begin
    | Apply
    | CheckServer
    | Finish
    | Welcome
    | Refused
    | HelloNeeded
    | DealtWork
    | ScoreRequest
    | RunIsOver
    | WaitForWork
    | Weights
    | PieceReceived
    | Committed
    | ServerStatus
)
_READER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def packed(message: ServerMessage, data: bytes | memoryview = b"") -> list[Any]:
    """Return the frames of a message."""
    head = encoded(message)
    return [head, data] if len(data) else [head]


def unpacked(frames: list[bytes]) -> tuple[Message, bytes]:
    """Return the message of these frames, and its bytes. Raises: BadMessage."""
    if not 1 <= len(frames) <= 2 or len(frames[0]) > HEAD_BYTES:
        raise BadMessage("it is no head with bytes behind it")
    data = frames[1] if len(frames) > 1 else b""
    if len(data) > PIECE_BYTES:
        raise BadMessage(f"a piece of {len(data)} bytes, where {PIECE_BYTES} are the most")
    return decoded(frames[0], _READER), data
