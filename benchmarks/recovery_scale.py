"""What recovery costs a rank before state travels: to agree on the state, and to find each other, at any scale.

    python benchmarks/recovery_scale.py [--scenario NAME ...] [--model llama3.1-405b] [--smaller 1] [--json]

All ranks run the real code (`training.recovery`, `checkpoint.directory`, `parallel.peers`), one after the other in this
process, which passes their messages on. Seconds are a rank's own CPU time, and its messages one after the other at a
latency and bandwidth that are given below. Then the ranks that own most tensors, and some others, do all of it again,
each alone in a new process that is given the messages which it had received: this gives their memory.

The boxes that ranks hold follow from the plan (`plan.cost.exact_state`); a test holds them to the trainer's.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.history import History, Position
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.parallel.peers import Peers, Talk, together
from argosy.plan.cost.exact_state import local_shard_of, place_of, stages_on
from argosy.plan.parameters import Parameter, Stage, parameter_table
from argosy.plan.plan import Plan
from argosy.training.recovery import Claim, RecoveryOffer, SurvivorFacts, newest_whole_state

GPUS = 8
"""Ranks of a node."""
LATENCY_S, BYTES_PER_S = 50e-6, 1e9
"""A message between hosts over TCP, below what a 10 Gb/s network gives: no measured figures."""
OWNERS = 2
"""Owners of the most tensors whose memory is measured."""
LIVE, SAVED = 1000, 990
"""Steps that survivors and in-memory checkpoints have."""
HISTORY = History().next("a1", 0)


@dataclass(frozen=True)
class Scenario:
    """A recovery: of which plan, how many ranks are lost, and which plan goes on."""

    before: str
    after: str
    lost: range = range(0)
    """Ranks of `before` that are gone; new processes take their places."""
    in_memory: bool = False
    """Each rank has its own in-memory checkpoint and that of a neighbour on another node."""


SCENARIOS = {
    "hybrid, a node lost": Scenario(
        "pp=16,dp_replicate=16,dp_shard=8,tp=8,zero=3", "pp=16,dp_replicate=16,dp_shard=8,tp=8,zero=3", range(80, 88)
    ),
    "fully sharded, a node lost": Scenario(
        "pp=16,dp_shard=128,tp=8,zero=3", "pp=16,dp_shard=128,tp=8,zero=3", range(80, 88), in_memory=True
    ),
    "another plan": Scenario(
        "pp=16,dp_replicate=16,dp_shard=8,tp=8,zero=3", "pp=8,dp_replicate=8,dp_shard=32,tp=8,zero=3"
    ),
    "another plan, fully sharded": Scenario("pp=16,dp_shard=128,tp=8,zero=3", "pp=8,dp_shard=512,tp=4,zero=3"),
}


def state_boxes(plan: Plan, run: RunConfig, rank: int) -> Iterator[Box]:
    """Yield what `rank` holds of weights and AdamW's moments, in fp32, without the scalars of the loss scale."""
    seen: set[str] = set()
    for stage in _stages(plan, run, place_of(rank, plan)["pp"]):
        for name, parameter in parameter_table(run.model, stage, plan.tp).items():
            if name in seen:
                continue
            seen.add(name)
            yield from _boxes_of(name, parameter, plan, rank)


def _boxes_of(name: str, parameter: Parameter, plan: Plan, rank: int) -> Iterator[Box]:
    at, cut = place_of(rank, plan), local_shard_of(parameter, plan, rank)
    offset = [0] * len(parameter.shape)
    if parameter.tp_dim is not None:
        size = parameter.shape[parameter.tp_dim]
        offset[parameter.tp_dim] = min(-(-size // plan.tp) * at["tp"], size)
    if parameter.is_expert:
        among = at["dp_shard"] * plan.cp + at["cp"]
        offset[0] += among % plan.ep * (parameter.shape[0] // plan.ep)
    share = list(offset)
    share[0] += min(-(-cut.local[0] // cut.ranks) * cut.rank, cut.local[0])
    held = (tuple(share), cut.mine)
    yield _box(f"model.{name}", parameter.shape, *(held if plan.zero in (1, 2, 3) else (tuple(offset), cut.local)))
    for moment in ("exp_avg", "exp_avg_sq"):
        yield _box(f"optimizer.{name}.{moment}", parameter.shape, *held)
    yield _box(f"optimizer.{name}.step", (), (), ())


_STAGES: dict[tuple[str, int], list[Stage]] = {}


def _stages(plan: Plan, run: RunConfig, pp: int) -> list[Stage]:
    """Return the stages of a rank, from a table: to cut the layers takes longer than all of a rank's recovery."""
    key = (f"{plan} {run.model.layers} {run.model.width}", pp)
    if key not in _STAGES:
        _STAGES[key] = list(stages_on(plan, run, pp * plan.world_size // plan.pp).values())
    return _STAGES[key]


@cache
def _box(name: str, whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    return Box(name, "float32", whole, offset, shape)


def recovery(peers: Peers, scenario: Scenario, run: RunConfig) -> Talk[int]:
    """Hold the talks of `training.recovery.recover` as one rank. Returns the number of its transfers."""
    before, after, rank = Plan.parse(scenario.before), Plan.parse(scenario.after), peers.rank
    offers = []
    if rank not in scenario.lost and rank < before.world_size:
        live = Claim(HISTORY, Position(LIVE, LIVE), is_live=True)
        offers.append(RecoveryOffer(live, tuple(state_boxes(before, run, rank))))
    if scenario.in_memory and rank not in scenario.lost:
        saved = Claim(HISTORY, Position(SAVED, SAVED), is_live=False)
        for kept in (rank, (rank - GPUS) % before.world_size):
            offers.append(RecoveryOffer(saved, tuple(state_boxes(before, run, kept))))
    wanted = list(state_boxes(after, run, rank))
    facts = [SurvivorFacts(HISTORY, offer.claim.position, None) for offer in offers if offer.claim.is_live]
    yield from peers.union(facts, SurvivorFacts)
    yield from peers.alike(f"node-{rank // GPUS}")
    claims = yield from peers.union([offer.claim for offer in offers], Claim)
    found = yield from newest_whole_state(peers, offers, claims, lambda past: wanted, HISTORY)
    yield from peers.union([], str)
    assert found is not None and found.is_live != scenario.in_memory
    return len(found.transfers)


@dataclass
class Cost:
    """What a rank did."""

    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    wire_s: float = 0.0
    """What its messages take, one after the other."""
    received: list[bytes] | None = None


def measured(talk: Talk[int], cost: Cost) -> Talk[int]:
    """Hold a talk, and note what it costs its rank."""
    came: bytes | None = None
    while True:
        began = time.process_time()
        try:
            swap = next(talk) if came is None else talk.send(came)
        except StopIteration as end:
            cost.seconds += time.process_time() - began
            result: int = end.value
            return result
        cost.seconds += time.process_time() - began
        came = yield swap
        cost.sent_bytes += len(swap.data)
        cost.received_bytes += len(came)
        cost.messages += 1
        cost.wire_s += LATENCY_S + max(len(swap.data), len(came)) / BYTES_PER_S
        if cost.received is not None:
            cost.received.append(came)


@dataclass
class Result:
    scenario: str
    ranks: int
    seconds_most: float
    """Work and messages of the rank that takes longest."""
    work_s_most: float
    work_s_mean: float
    received_mb_most: float
    sent_mb_most: float
    messages_most: int
    memory_mb_most: float = 0.0
    """Growth of a rank's process, of the ranks that were run alone."""
    alone_s_most: float = 0.0
    """Their work when nothing else is in memory."""
    transfers: int = 0
    sampled: list[int] = field(default_factory=list)


def simulate(name: str, scenario: Scenario, run: RunConfig) -> Result:
    """Hold the recovery of all ranks here, then that of some alone."""
    ranks = Plan.parse(scenario.after).world_size
    sampled = sample(scenario, run, ranks)
    costs = [Cost(received=[] if r in sampled else None) for r in range(ranks)]
    gc.disable()  # its pauses grow with all ranks' objects
    transfers = together([measured(recovery(Peers(r, ranks), scenario, run), costs[r]) for r in range(ranks)])
    gc.enable()
    alone = [_alone(rank, ranks, scenario, run, costs[rank].received or []) for rank in sampled]
    return Result(
        name,
        ranks,
        max(c.seconds + c.wire_s for c in costs),
        max(c.seconds for c in costs),
        sum(c.seconds for c in costs) / ranks,
        max(c.received_bytes for c in costs) / 1e6,
        max(c.sent_bytes for c in costs) / 1e6,
        max(c.messages for c in costs),
        max(memory for memory, _ in alone),
        max(seconds for _, seconds in alone),
        sum(transfers),
        sampled,
    )


def sample(scenario: Scenario, run: RunConfig, ranks: int) -> list[int]:
    """Return the ranks that own the most tensors, one that is new, and the first one."""
    plan = Plan.parse(scenario.before)
    stage = plan.world_size // plan.pp
    names = {box.name for pp in range(plan.pp) for box in state_boxes(plan, run, pp * stage)}
    owned = Counter(Peers(0, ranks).owner(name) for name in names)
    return list(dict.fromkeys([*(r for r, _ in owned.most_common(OWNERS)), *scenario.lost[:1], 0]))


def _alone(rank: int, ranks: int, scenario: Scenario, run: RunConfig, received: list[bytes]) -> tuple[float, float]:
    """Return megabytes and seconds of one rank in a new process."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        Path(file.name).write_bytes(pickle.dumps((rank, ranks, scenario, run, received)))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found: tuple[float, float] = pool.apply(_replay, (file.name,))
    return found


def _replay(path: str) -> tuple[float, float]:
    rank, ranks, scenario, run, received = pickle.loads(Path(path).read_bytes())
    # What the benchmark itself makes first is not the rank's.
    _ = _stages(Plan.parse(scenario.before), run, 0), _stages(Plan.parse(scenario.after), run, 0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak is counted anew
    before_kb = _status("VmRSS")
    talk, came, began = recovery(Peers(rank, ranks), scenario, run), None, time.process_time()
    try:
        for came in [None, *received]:
            next(talk) if came is None else talk.send(came)
    except StopIteration:
        pass
    seconds = time.process_time() - began
    return (_status("VmHWM") - before_kb) / 1024, seconds


def _status(field: str) -> int:
    """Return a figure of this process, kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def smaller(scenario: Scenario, factor: int) -> Scenario:
    """Return the scenario with that many times fewer replicas or shards."""
    plans: list[str] = []
    for text in (scenario.before, scenario.after):
        plan = Plan.parse(text)
        axis = "dp_shard" if plan.dp_replicate == 1 else "dp_replicate"
        plans.append(str(plan.model_copy(update={axis: getattr(plan, axis) // factor})))
    before, after = plans
    return Scenario(before, after, scenario.lost, scenario.in_memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--model", default="llama3.1-405b")
    parser.add_argument("--smaller", type=int, default=1, help="so many times fewer ranks")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    run = load(None, {"model.preset": asked.model})
    for name in asked.scenario:
        result = simulate(name, smaller(SCENARIOS[name], asked.smaller), run)
        if asked.json:
            print(json.dumps(asdict(result)), flush=True)
            continue
        print(f"{name}: {result.ranks:,} ranks, {result.transfers:,} transfers")
        print(f"  a rank takes {result.seconds_most:.2f} s at most: {result.work_s_most:.2f} s of work ", end="")
        print(f"({result.work_s_mean:.3f} s on average, alone {result.alone_s_most:.2f} s), the rest messages")
        print(f"  it hears {result.received_mb_most:.1f} MB and says {result.sent_mb_most:.1f} MB at most, ", end="")
        print(f"in {result.messages_most} messages; its process grows by {result.memory_mb_most:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
