"""Messages between agents and the coordinator: a class each, checked when it arrives.

They travel as JSON, in the frames of a `processes.connection`. A message that is not as written here is refused, with
the connection that it came on.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from argosy.observe.heartbeat import LAST_STEPS
from argosy.processes.connection import DEFERRED, Count, Text, WireRecord
from argosy.resilience.node_health import Health
from argosy.supervise.node_report import NodeReport, Step
from argosy.supervise.nodes import RankState

AGENT_BEAT_S = 0.5
"""Time between two heartbeats of an agent, in all but the largest runs."""
MOST_WORKERS = 4096
"""On one node."""
ONE_VERSION = "They are of different versions of Argosy: install the same one on all machines."

NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=255)]
Slot = Annotated[int, Field(ge=0, lt=MOST_WORKERS)]
ExitCode = Annotated[int, Field(ge=-255, le=255)]
"""Negative: a signal."""
Port = Annotated[int, Field(ge=1, le=65535)]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$", max_length=255)]


# ---- from an agent --------------------------------------------------------------------------------------------------


class KnownWorker(WireRecord):
    """A worker that an agent has when it connects."""

    slot: Slot
    state: RankState
    rank: Count | None
    generation: Count
    pid: Count


class AgentHello(WireRecord):
    """An agent has connected, for the first time or again."""

    kind: Literal["hello"] = "hello"
    folder: str
    """Name of the run's folder, unlike any other's (`checkpoint.fence`)."""
    name: NodeName
    host: Host
    """The address at which the other nodes reach it."""
    slots: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    workers: tuple[KnownWorker, ...] = ()
    health: Health | None = None
    is_checking: bool = False
    """True while a node health check runs."""
    process: Annotated[str, Field(max_length=64)] = ""
    """A name of the agent's process, made up by it: two processes of one node name are two machines, or one after the
    other."""

    @model_validator(mode="after")
    def _has_those_slots(self) -> Self:
        slots = [worker.slot for worker in self.workers]
        if len(set(slots)) < len(slots) or any(slot >= self.slots for slot in slots):
            raise ValueError(f"workers are in slots {slots[:8]}, each of which must be one of {self.slots}")
        return self


class WorkerStarted(WireRecord):
    """A worker process was started."""

    kind: Literal["started"] = "started"
    slot: Slot
    pid: Count


class WorkerReady(WireRecord):
    """A worker waits for a world."""

    kind: Literal["ready"] = "ready"
    slot: Slot
    generation: Count
    """The generation of the world that it left because of `why`; 0 if it was in none."""
    why: Text = ""


class WorkerDone(WireRecord):
    """A worker has reached the end of the run."""

    kind: Literal["done"] = "done"
    slot: Slot


class WorkerLost(WireRecord):
    """A worker process has ended before the run did. The rest is that of `nodes.Cause`."""

    kind: Literal["lost"] = "lost"
    slot: Slot
    why: Text
    error: Text = ""
    exit_code: ExitCode = 0
    step: Step = -1


class RunStopping(WireRecord):
    """A signal asked this node to end, and with it the run, if the node has a part in its state."""

    kind: Literal["stopping"] = "stopping"


class NodeHeartbeat(WireRecord):
    """The changes on a node. The coordinator answers it."""

    kind: Literal["heartbeat"] = "heartbeat"
    report: NodeReport = NodeReport()


class StoreOpened(WireRecord):
    """The rendezvous store of a generation is open."""

    kind: Literal["store"] = "store"
    generation: Count
    port: Port | None = None
    """None on a run's only node: its workers meet at a file there."""


class NodeChecked(WireRecord):
    """A node health check has ended."""

    kind: Literal["node_checked"] = "node_checked"
    health: Health


FromAgent = (
    AgentHello | WorkerStarted | WorkerReady | WorkerDone | WorkerLost | RunStopping | NodeHeartbeat | StoreOpened
    | NodeChecked
)  # fmt: skip

# ---- from the coordinator -------------------------------------------------------------------------------------------


class HeartbeatReply(WireRecord):
    """The answer to a heartbeat, and to a hello. It says what the next heartbeats are to be like."""

    kind: Literal["heard"] = "heard"
    every_s: Annotated[float, Field(gt=0, le=60)] = AGENT_BEAT_S
    """Time between two."""
    most_steps: Annotated[int, Field(ge=1, le=LAST_STEPS)] = LAST_STEPS
    """The most steps whose times one tells."""
    wants_all: bool = False
    """True if they are to have all that each rank shows."""


class StartWorker(WireRecord):
    """Start a worker in a slot."""

    kind: Literal["start"] = "start"
    slot: Slot


class OpenStore(WireRecord):
    """Open the rendezvous store of a generation."""

    kind: Literal["open_store"] = "open_store"
    generation: Count


class WorldPlace(WireRecord):
    """The rank of a worker of the node."""

    slot: Slot
    rank: Count
    local_rank: Slot


class JoinWorld(WireRecord):
    """Have workers join the world of a generation."""

    kind: Literal["join"] = "join"
    generation: Count
    size: Count
    plan: str
    host: Host
    port: Port | None = None
    """The port of the rendezvous store; None: a file of the only node."""
    places: tuple[WorldPlace, ...]
    """The places of all the members on this node; none if the world is made without it."""


class LeaveWorld(WireRecord):
    """The generation is over: its members leave its world and wait."""

    kind: Literal["break"] = "break"
    generation: Count
    why: Text


class HoldWorld(WireRecord):
    """Have the members of a generation hold after a step."""

    kind: Literal["hold"] = "hold"
    generation: Count
    on_disk: bool = False
    """Save a checkpoint before that: in-memory ones would go with the nodes that leave."""


class KillWorker(WireRecord):
    """Kill a worker, if it is still in that generation."""

    kind: Literal["kill"] = "kill"
    slot: Slot
    generation: Count
    why: Text


class RunNodeCheck(WireRecord):
    """Run a node health check."""

    kind: Literal["check_node"] = "check_node"


class EndRun(WireRecord):
    """The run is over. The rest is that of `nodes.FinishRun`."""

    kind: Literal["finish"] = "finish"
    exit_code: ExitCode
    why: Text
    error: Text = ""


FromCoordinator = (
    HeartbeatReply | StartWorker | OpenStore | JoinWorld | LeaveWorld | HoldWorld | KillWorker | RunNodeCheck | EndRun
)

FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="kind")], config=DEFERRED)
FROM_COORDINATOR: TypeAdapter[FromCoordinator] = TypeAdapter(
    Annotated[FromCoordinator, Field(discriminator="kind")], config=DEFERRED
)
