"""Recovery: the newest state that there is all of, alike on all ranks, and the run goes on to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.accelerator import CPU
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.exchange import CorruptMessage
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.memory import NODE_VARIABLE, MemoryCheckpointer, memory_checkpoints_in
from argosy.config.schema import CheckpointConfig, RunConfig
from argosy.errors import StorageError
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.observe.events import Events
from argosy.observe.screen import Progress
from argosy.parallel.apply import apply
from argosy.parallel.peers import Peers, Talk, together
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.checkpointer import Checkpointer
from argosy.training.recovery import (
    Claim,
    Recovery,
    RecoveryOffer,
    SurvivorFacts,
    WholeState,
    follow,
    newest_whole_state,
    recover,
)
from argosy.training.state import StepUpdate, TrainState
from argosy.training.step import Step
from tiny import eager, run_config
from workers import next_world


def box(rows: tuple[int, int], name: str = "model.w") -> Box:
    return Box(name, "float32", (4,), (rows[0],), (rows[1] - rows[0],))


WHOLE, UPPER, LOWER = box((0, 4)), box((0, 2)), box((2, 4))
FIRST = History().next("a1", 0)
SECOND = FIRST.next("b2", 20)


def offer(step: int, *boxes: Box, history: History = FIRST, live: bool = False, skipped: int = 0) -> RecoveryOffer:
    return RecoveryOffer(Claim(history, Position(step, 0, ((7, 8),) * skipped), live), boxes)


def asked(
    *offers: Sequence[RecoveryOffer],
    history: History = FIRST,
    wanted: Sequence[Box] = (WHOLE,),
    damaged: Sequence[RecoveryOffer] = (),
) -> list[WholeState | None]:
    """What each rank finds."""

    def rank(peers: Peers, mine: Sequence[RecoveryOffer]) -> Talk[WholeState | None]:
        claims = yield from peers.union((offer.claim for offer in mine), Claim)
        is_whole = lambda i: all(mine[i] is not bad for bad in damaged)  # noqa: E731
        return (yield from newest_whole_state(peers, mine, claims, lambda past: wanted, history, is_whole))

    return together([rank(Peers(i, len(offers)), mine) for i, mine in enumerate(offers)])


def newest(*offers: Sequence[RecoveryOffer], history: History = FIRST, damaged: Sequence[RecoveryOffer] = ()) -> object:
    (answer,) = {
        None if found is None else (found.history.world, found.position.step, found.is_live)
        for found in asked(*offers, history=history, damaged=damaged)
    }
    return answer


def test_what_one_survivor_has_all_of_is_taken():
    assert newest([offer(5, WHOLE, live=True)], []) == ("a1", 5, True)


def test_survivors_and_in_memory_checkpoints_of_one_step_make_a_whole():
    assert newest([offer(5, UPPER, live=True)], [offer(5, LOWER), offer(3, LOWER), offer(3, UPPER)]) == ("a1", 5, False)


def test_parts_of_different_steps_are_no_whole():
    assert newest([offer(5, UPPER, live=True), offer(3, UPPER)], [offer(4, LOWER)]) is None
    assert newest([offer(5, UPPER, live=True), offer(3, UPPER)], [offer(4, LOWER), offer(3, LOWER)]) == ("a1", 3, False)


def test_parts_of_different_worlds_are_no_whole_even_of_one_step():
    assert newest([offer(20, UPPER)], [offer(20, LOWER, history=SECOND)], history=SECOND) is None


def test_what_the_run_has_turned_away_from_is_not_taken_up_again():
    stray = [offer(step, WHOLE) for step in (15, 20, 25, 30)]
    assert newest(stray, [], history=SECOND) == ("a1", 20, False)
    assert newest(stray, [], history=SECOND.next("c3", 15)) == ("a1", 15, False)
    assert newest(stray, [], history=FIRST.turned_back(15)) == ("a1", 15, False)
    assert newest(stray, [], history=History().next("d4", 0)) is None


def test_an_in_memory_checkpoint_that_is_damaged_is_none():
    damaged = offer(5, LOWER)
    others = [offer(5, UPPER), offer(3, UPPER)], [damaged, offer(3, LOWER)]
    assert newest(*others, damaged=[damaged]) == ("a1", 3, False)
    assert newest(*others, [offer(5, LOWER)], damaged=[damaged]) == ("a1", 5, False)


def test_skipped_samples_that_one_rank_knows_of_count_for_all():
    for found in asked([offer(5, WHOLE, live=True)], [offer(5, WHOLE, live=True, skipped=1)]):
        assert found is not None and found.position.skipped == ((7, 8),)


def test_the_loss_scale_is_one_rank_s_for_all_and_may_be_missing():
    scale = box((0, 4), "scaler.scale")
    held = [[offer(5, WHOLE, scale, live=True)], [offer(5, WHOLE, scale, live=True, skipped=1)]]
    for found in asked(*held, wanted=[WHOLE, scale]):
        assert found is not None and found.leader == 1 and all(t.wanted != scale for t in found.transfers)
    alike = [offer(5, WHOLE, scale, live=True)]
    assert [found.leader for found in asked([], alike, alike) if found] == [1, 1, 1]
    assert None not in asked([offer(5, WHOLE, live=True)], wanted=[WHOLE, scale])


EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 16, "balance": "bias"}
MIXTURE = {"moe": EXPERTS, "family": "qwen3_moe", "qk_norm": True}
NODES = "xyzw"
"""By rank, if nothing else is said."""


class Behind:
    """A survivor of step 3 that has its gradient."""

    step, tokens, skipped, pending, in_update, last_update, rounds, outer = 3, 0, (), True, False, None, 0, None

    def __init__(self, history: History = FIRST, pending: bool = True, can_follow: bool = True):
        self.history, self.pending, self.can_follow, self.applied = history, pending, can_follow, list[Any]()

    def apply(self, update: Any) -> None:
        self.applied.append(update)


@pytest.mark.parametrize(
    ("survivor", "ahead", "follows"),
    [
        (Behind(), 3, True),
        (Behind(), 2, False),  # as far as this one is
        (Behind(pending=False), 3, False),
        (Behind(history=SECOND), 3, False),
        (Behind(can_follow=False), 3, False),  # its update takes ranks that are gone
    ],
)
def test_a_survivor_follows_a_rank_that_is_a_step_ahead(survivor, ahead, follows):
    update = StepUpdate(ahead, 1.0, 2.0, 1.0, 0.1, 256, None)
    facts = [SurvivorFacts(FIRST, Position(ahead, 0), None), SurvivorFacts(FIRST, Position(ahead + 1, 0), update)]
    follow(survivor, facts)
    assert survivor.applied == [update] * follows


# Runs


class NoDisk:
    """There never was a checkpoint."""

    def newest_step(self) -> int | None:
        return None

    def restore(self, state: TrainState) -> object | None:
        return None


class Training:
    """One rank's part of a run in one world, from what `recover` finds."""

    def __init__(
        self,
        world: World,
        plan: str,
        survivor: TrainState | None = None,
        disk: Checkpointer | None = None,
        folder: Path | None = None,
        nodes: str = NODES,
        **model: Any,
    ):
        self.world, self.plan = world, eager(plan)
        self.run: RunConfig = run_config(Path("no data"), model={"layers": 2, **model})
        self.state = TrainState.begin(apply(self.plan, self.run, world), self.plan, self.run)
        self.step = Step(self.run, self.state, world, StepClock(CPU))
        self.node = None if folder is None else folder / nodes[world.rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(NODE_VARIABLE, nodes[world.rank])
            self.recovery: Recovery = recover(self.state, survivor, disk or NoDisk(), self.node, world)
            self._copies = None
            if self.node is not None:
                self.node.mkdir(exist_ok=True)
                self._copies = MemoryCheckpointer(
                    self.node, list(self.state.boxes()), world, self.state.history, pytest.fail
                )

    def until(self, step: int, copy_at: Sequence[int] = ()) -> Training:
        """Train until `step` steps are done."""
        while self.state.step < step:
            self.apply(self.update())
            if self._copies is not None and self.state.step in copy_at:
                self._copies.save(self.state.position, self.state.boxes())
                self._copies.wait()
        return self

    def update(self) -> StepUpdate:
        """All of a step but the update."""
        state, step = self.state, self.state.step
        rows = np.random.default_rng(step).integers(1, 400, (8, 33)).astype(np.int32)
        share = len(rows) // self.plan.dp
        mine = rows[state.model.dp_rank * share :][:share]
        outcome = self.step.exchange(self.step.forward_backward(microbatches(mine, self.plan.microbatch, 0, CPU)))
        return self.step.update(outcome, learning_rate=0.01 / (step + 1))

    def apply(self, update: StepUpdate) -> None:
        self.state.apply(update)
        self.state.model.after_update()
        self.state.drop_gradient()

    def values(self) -> dict[Box, Tensor]:
        return {box: tensor.clone() for box, tensor in self.state.boxes().items()}


def train_undisturbed(world: World, plan: str, steps: int, model: dict[str, Any]) -> dict[Box, Tensor]:
    return Training(world, plan, **model).until(steps).values()


@pytest.fixture(scope="module")
def undisturbed(workers) -> Callable[..., list[dict[Box, Tensor]]]:
    """By rank, what a run holds after some steps that nothing stopped."""
    known: dict[str, list[dict[Box, Tensor]]] = {}

    def run(plan: str, steps: int, **model: Any) -> list[dict[Box, Tensor]]:
        key = f"{plan} {steps} {model}"
        if key not in known:
            known[key] = workers.run(Plan.parse(plan).world_size, train_undisturbed, plan, steps, model)
        return known[key]

    return run


def assert_same_bits(found: list[dict[Box, Tensor]], expected: list[dict[Box, Tensor]]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), f"rank {rank}: {name}"


def lose(world: World, store: Path, plan: str, lost: Sequence[int], model: dict[str, Any]) -> tuple[Any, ...]:
    """After 3 of 5 steps the ranks `lost` are replaced by processes that know nothing."""
    before = Training(world, plan, **model).until(3)
    after = Training(next_world(world, store), plan, None if world.rank in lost else before.state, **model)
    return after.recovery, after.until(5).values()


@pytest.mark.parametrize(
    ("plan", "lost", "model"),
    [
        ("dp_replicate=2", (1,), {}),
        pytest.param("dp_replicate=2", (0,), {"tie_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2", (1, 2), {}, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2,zero=1", (3,), {}, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,tp=2", (0,), {}, marks=pytest.mark.slow),
        ("dp_replicate=2,pp=2", (0,), {"tie_embeddings": True}),
        pytest.param("dp_shard=4,ep=2,zero=0", (2,), MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_a_lost_replica_comes_back_from_the_others_and_no_step_is_lost(
    workers, tmp_path, undisturbed, plan, lost, model
):
    answers = workers.run(Plan.parse(plan).world_size, lose, tmp_path / "store", plan, lost, model)
    for recovery, _ in answers:
        assert (recovery.tier, recovery.step, recovery.steps_lost) == ("live", 3, 0)
        assert recovery.sent_bytes > 0 and recovery.last_update.step == 2
    assert_same_bits([values for _, values in answers], undisturbed(plan, 5, **model))


def test_an_adapter_s_next_world_knows_which_weights_it_stands_beside():
    before = Training(World(), "")
    before.state.base_sha256 = "5a"
    after = Training(World(), "", before.state)
    assert (after.recovery.tier, after.state.base_sha256) == ("live", "5a")


def test_moments_that_stay_where_they_are_are_in_memory_once():
    def places(state: TrainState) -> list[int]:
        return [t.data_ptr() for piece in state.model.masters for t in state.optimizer.kept_of(piece).values()]

    before = Training(World(), "").until(2)
    after = Training(World(), "", before.state)
    assert places(after.state) == places(before.state)
    taken = [tensor.nbytes for box, tensor in after.state.boxes().items() if not box.name.startswith("scaler.")]
    assert after.recovery.own_bytes == sum(taken)
    assert_same_bits([after.until(3).values()], [Training(World(), "").until(3).values()])


def fall_behind(world: World, store: Path, plan: str, behind: Sequence[int], model: dict[str, Any]) -> tuple[Any, ...]:
    """The ranks `behind` have the gradient of step 3, and the exchange fails them; the others have applied it, and the
    last is lost.
    """
    before = Training(world, plan, **model).until(3)
    update = before.update()
    if world.rank not in behind:
        before.state.apply(update)
    survivor = None if world.rank == world.size - 1 else before.state
    after = Training(next_world(world, store), plan, survivor, **model)
    return after.recovery, after.until(5).values()


@pytest.mark.parametrize(
    ("plan", "behind", "model"),
    [
        pytest.param("dp_replicate=3", (0,), {}, marks=pytest.mark.slow),
        pytest.param("dp_shard=2,dp_replicate=2,zero=1", (1,), {}, marks=pytest.mark.slow),
        ("dp_replicate=2,pp=2", (2,), MIXTURE),
    ],
)
def test_a_rank_with_the_gradient_follows_one_that_has_applied_it(workers, tmp_path, undisturbed, plan, behind, model):
    answers = workers.run(Plan.parse(plan).world_size, fall_behind, tmp_path / "store", plan, behind, model)
    for recovery, _ in answers:
        assert (recovery.tier, recovery.step, recovery.steps_lost) == ("live", 4, 0)
        assert recovery.last_update.step == 3
    assert_same_bits([values for _, values in answers], undisturbed(plan, 5, **model))


def nobody_ahead(world: World, store: Path) -> tuple[Any, ...]:
    """All have their gradient of step 3 when one dies: it may have applied it, which no rank knows."""
    before = Training(world, "dp_replicate=2").until(3)
    before.update()
    after = Training(next_world(world, store), "dp_replicate=2", None if world.rank else before.state)
    return after.recovery, after.until(5).values()


def test_a_step_that_no_survivor_has_applied_is_made_again(workers, tmp_path, undisturbed):
    answers = workers.run(2, nobody_ahead, tmp_path / "store")
    assert [(r.tier, r.step, r.last_update.step) for r, _ in answers] == [("live", 3, 2)] * 2
    assert_same_bits([values for _, values in answers], undisturbed("dp_replicate=2", 5))


def tear(world: World, store: Path, torn: Sequence[int]) -> Recovery:
    before = Training(world, "dp_replicate=2").until(3)
    if world.rank in torn:
        before.state.in_update = True
        for piece in before.state.model.pieces:
            piece.value.fill_(torch.nan)
    after = Training(next_world(world, store), "dp_replicate=2", before.state)
    assert all(tensor.isfinite().all() for tensor in after.values().values())
    return after.recovery


def test_a_rank_lost_amid_an_update_takes_the_state_of_one_that_was_not(workers, tmp_path):
    assert [(r.tier, r.step) for r in workers.run(2, tear, tmp_path / "store", [0])] == [("live", 3)] * 2


def test_if_all_were_amid_an_update_there_is_nothing_live(workers, tmp_path):
    answers = workers.run(2, tear, tmp_path / "store", [0, 1])
    assert [(r.tier, r.step, r.steps_lost) for r in answers] == [("none", 0, 3)] * 2


def fall_back(world: World, folder: Path, plan: str, nodes_lost: str, damaged: str) -> tuple[Any, ...]:
    """Save in memory after steps 2 and 4; then lose the last rank and `nodes_lost`, with some files `damaged`."""
    before = Training(world, plan, folder=folder).until(5, copy_at=(2, 4))
    world = next_world(world, folder / "store")
    if world.is_first:
        for node in nodes_lost:
            shutil.rmtree(folder / node)
        for name in damaged:
            newest = max(memory_checkpoints_in(folder / name), key=lambda saved: saved.step)
            data = bytearray(newest.path.read_bytes())
            data[len(data) // 2] ^= 1
            newest.path.write_bytes(data)
    dist.barrier()
    after = Training(world, plan, None if world.rank == world.size - 1 else before.state, folder=folder)
    return after.recovery, after.until(7, copy_at=(6,)).values()


@pytest.mark.parametrize(
    ("plan", "nodes_lost", "damaged", "step"),
    [
        pytest.param("dp_shard=2", "", "", 4, marks=pytest.mark.slow),
        # Its own file is lost with its node; the other node has one.
        pytest.param("dp_shard=2", "y", "", 4, marks=pytest.mark.slow),
        ("pp=2", "y", "", 4),
        pytest.param(
            "tp=2", "", "x", 4, marks=pytest.mark.slow
        ),  # of rank 0 or of rank 1; of both the other node has another
        ("dp_shard=2", "y", "x", 2),  # x has both ranks' files, and one of them is not what was written
        pytest.param("pp=2,dp_shard=2,zero=2", "w", "", 4, marks=pytest.mark.slow),
    ],
)
def test_state_without_a_replica_comes_back_from_in_memory_checkpoints(
    workers, tmp_path, undisturbed, plan, nodes_lost, damaged, step
):
    answers = workers.run(Plan.parse(plan).world_size, fall_back, tmp_path, plan, nodes_lost, damaged)
    for recovery, _ in answers:
        assert (recovery.tier, recovery.step, recovery.steps_lost) == ("memory", step, 5 - step)
        assert len(recovery.refused) == len(damaged)
        assert all(" of node x" in name for name in recovery.refused)
    assert_same_bits([values for _, values in answers], undisturbed(plan, 7))


def change_plan(world: World, folder: Path, before: str, after: str, in_memory: bool) -> tuple[Any, ...] | None:
    """After 3 steps the last ranks are gone, with their node if there are 4, and the run goes on with those that are
    left, under another plan.
    """
    memory, nodes = folder if in_memory else None, "xxyy"
    first = Training(world, before, folder=memory, nodes=nodes).until(3, copy_at=(3,))
    dist.barrier()
    size = Plan.parse(after).world_size
    if world.rank >= size:
        return None
    shutil.rmtree(folder / "y", ignore_errors=True)
    second = Training(next_world(world, folder / "store", size), after, first.state, folder=memory, nodes=nodes)
    return second.recovery, second.values()


@pytest.mark.parametrize(
    ("before", "after", "in_memory", "tier"),
    [
        ("dp_replicate=4", "dp_replicate=2,zero=1", False, "live"),
        pytest.param("dp_replicate=2,dp_shard=2", "tp=2", False, "live", marks=pytest.mark.slow),
        ("pp=2,tp=2", "dp_shard=2", True, "memory"),
        pytest.param("dp_shard=4,zero=1", "pp=2", True, "memory", marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2,zero=2", "dp_shard=2", True, "live", marks=pytest.mark.slow),
    ],
)
def test_the_state_is_laid_out_anew_for_those_that_are_left(
    workers, tmp_path, undisturbed, before, after, in_memory, tier
):
    answers = workers.run(Plan.parse(before).world_size, change_plan, tmp_path, before, after, in_memory)
    left = [answer for answer in answers if answer is not None]
    wholes: dict[str, Tensor] = {}
    for values in undisturbed(before, 3):
        for part, tensor in values.items():
            whole = wholes.setdefault(part.name, torch.zeros(part.whole, dtype=tensor.dtype))
            whole[part.within(Box(part.name, part.dtype, part.whole, (0,) * len(part.whole), part.whole))] = tensor
    for recovery, values in left:
        assert (recovery.tier, recovery.step, recovery.steps_lost) == (tier, 3, 0)
        for part, tensor in values.items():
            everywhere = replace(part, offset=(0,) * len(part.whole), shape=part.whole)
            assert torch.equal(tensor, wholes[part.name][part.within(everywhere)]), part.name


def lose_everything(world: World, folder: Path, plan: str, nodes: str, in_memory: bool) -> tuple[Any, ...]:
    """A checkpoint after step 2, one in memory after step 4, and both ranks lost; with `in_memory` that stays."""

    def checkpointer(world: World) -> Checkpointer:
        events = Events(folder, f"rank-{world.rank}")
        return Checkpointer(folder, CheckpointConfig(), eager(plan), "corpus", world, events, Progress(enabled=False))

    keeping = checkpointer(world)
    before = Training(world, plan, folder=folder, nodes=nodes).until(2)
    keeping.save(before.state, background=False)
    keeping.close()
    before.until(5, copy_at=(4,))
    world = next_world(world, folder / "store")
    if not in_memory:
        shutil.rmtree(folder / nodes[world.rank])
    dist.barrier()
    keeping = checkpointer(world)
    after = Training(world, plan, disk=keeping, folder=folder, nodes=nodes)
    keeping.close()
    return after.recovery, after.until(7, copy_at=(6,)).values()


@pytest.mark.parametrize(
    ("plan", "nodes", "in_memory", "tier", "step"),
    [
        ("dp_shard=2", "xy", True, "memory", 4),
        ("dp_shard=2", "xy", False, "disk", 2),
        ("pp=2,precision=fp16", "xx", True, "memory", 4),  # the loss scale is in files of both
    ],
)
def test_if_all_processes_are_lost_memory_has_the_state_and_if_that_is_lost_the_disk_has(
    workers, tmp_path, undisturbed, plan, nodes, in_memory, tier, step
):
    answers = workers.run(2, lose_everything, tmp_path, plan, nodes, in_memory)
    assert [(r.tier, r.step) for r, _ in answers] == [(tier, step)] * 2
    assert_same_bits([values for _, values in answers], undisturbed(plan, 7))


class Checkpoints:
    """A disk whose newest checkpoint is of step 9, or seems to be: what is whole is of step `whole`, if any is."""

    def __init__(self, whole: int | None):
        self._whole = whole

    def newest_step(self) -> int | None:
        return 9

    def restore(self, state: TrainState) -> object | None:
        if self._whole is None:
            raise StorageError("all are damaged")
        state.step = self._whole
        return self


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        (9, ("disk", 9, 0, ())),
        (2, ("live", 3, 6, ())),  # newer than it, as the newest turned out to be damaged
        (None, ("live", 3, 6, ("all are damaged",))),
    ],
)
def test_a_newer_checkpoint_comes_first_if_it_is_whole(whole, expected):
    before = Training(World(), "").until(3)
    found = Training(World(), "", before.state, Checkpoints(whole)).recovery
    assert (found.tier, found.step, found.steps_lost, found.refused) == expected


def test_if_neither_survivors_nor_checkpoints_can_be_used_the_run_does_not_start_again():
    with pytest.raises(StorageError, match="all are damaged"):
        Training(World(), "", None, Checkpoints(None))


def damage_messages(world: World, store: Path, times: int) -> str:
    """A recovery in which the first messages of rank 0 arrive damaged, so many times."""
    before = Training(world, "dp_replicate=2").until(1)
    real, left = dist.batch_isend_irecv, [None] * times

    def damaging(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            if operation.op is dist.isend and left:
                left.pop()
                operation.tensor[5] ^= 1
        return real(operations)

    world = next_world(world, store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", damaging)
        try:
            after = Training(world, "dp_replicate=2", None if world.rank else before.state)
        except CorruptMessage as error:
            return str(error)
    assert_same_bits([after.values()], [before.values()])
    return "recovered"


def test_a_damaged_message_is_sent_again(workers, tmp_path):
    assert workers.run(2, damage_messages, tmp_path / "store", 2) == ["recovered"] * 2


def test_messages_that_are_damaged_again_and_again_end_it_on_all_ranks(workers, tmp_path):
    first, second = workers.run(2, damage_messages, tmp_path / "store", 100)
    assert first == second and "what rank 0 sent to rank 1 " in first
