"""Keeping a run's state safe: when it is saved, what is kept, where a run goes on from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint import store
from argosy.config.schema import CheckpointConfig, OptimizerConfig
from argosy.errors import ArgosyError, RunFailed, UserError
from argosy.observe.events import Events, read_lines
from argosy.observe.progress import Progress
from argosy.optim.optimizer import Optimizer
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.precision.scaler import LossScaler
from argosy.training.keeper import Keeper
from argosy.training.state import TrainState
from tiny import EAGER, run_config

ALONE = World()


def keeper(run_dir: Path, world: World = ALONE, **settings: Any) -> Keeper:
    events = Events(run_dir, f"rank-{world.rank}")
    return Keeper(run_dir, CheckpointConfig(**settings), EAGER, "corpus", world, events, Progress(enabled=False))


def state(step: int = 0, seed: int = 0, **model: Any) -> TrainState:
    """A state that has taken one real optimizer step, and is said to have taken `step`."""
    run = run_config(Path("no data"), model=model).model_copy(update={"seed": seed})
    own = apply(EAGER, run, ALONE)
    taken = TrainState(own, Optimizer(own.masters, OptimizerConfig()), LossScaler(scale=2.0**seed), step, step * 100)
    for piece in own.pieces:
        piece.value.grad = torch.ones_like(piece.value) * (seed + 1)
    taken.optimizer.step()
    return taken


def save(run_dir: Path, *steps: int, **settings: Any) -> None:
    keeping = keeper(run_dir, **settings)
    for step in steps:
        keeping.save(state(step, seed=step), background=False)


def kept(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed(run_dir)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / "events" / "rank-0.jsonl") if event["event"] == kind]


def damage(run_dir: Path, step: int) -> None:
    file = next(store.step_folder(run_dir, step).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_save_is_due_at_every_multiple_of_the_steps(tmp_path):
    keeping = keeper(tmp_path, every_steps=3)
    assert [done for done in range(1, 10) if keeping.is_due_by_steps(done)] == [3, 6, 9]
    assert not any(keeper(tmp_path, every_steps=0).is_due_by_steps(done) for done in range(1, 10))


def test_a_save_is_due_once_the_minutes_have_passed_since_the_last_one(tmp_path):
    keeping = keeper(tmp_path, every_minutes=0.3 / 60)
    assert not keeping.is_due_by_time
    time.sleep(0.3)
    assert keeping.is_due_by_time
    keeping.save(state(1), background=True)
    assert not keeping.is_due_by_time
    keeping.wait()
    assert not keeper(tmp_path, every_minutes=0).is_due_by_time


def test_the_newest_are_kept_and_those_at_round_steps(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, 6, keep_last=2, keep_every=3)
    assert kept(tmp_path) == [3, 5, 6]
    assert [event["step"] for event in events(tmp_path, "prune")] == [1, 2, 4]
    assert [event["step"] for event in events(tmp_path, "save")] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_a_checkpoint_starts_from_its_initial_state(tmp_path):
    fresh = state(seed=1)
    assert keeper(tmp_path).restore(fresh) is None
    assert _same(fresh, state(seed=1)) and fresh.step == 0


def test_all_of_the_state_comes_back(tmp_path):
    torch.manual_seed(7)
    save(tmp_path, 4)
    expected = torch.rand(3)
    torch.manual_seed(8)
    restored = state(seed=1)
    assert keeper(tmp_path).restore(restored).step == 4
    assert _same(restored, state(4, seed=4))
    assert (restored.step, restored.tokens) == (4, 400)
    assert torch.equal(torch.rand(3), expected)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it_and_the_event_says_so(tmp_path):
    save(tmp_path, 4, 6)
    damage(tmp_path, 6)
    restored = state(seed=1)
    assert keeper(tmp_path).restore(restored).step == 4
    assert _same(restored, state(4, seed=4))
    (event,) = events(tmp_path, "damaged_checkpoint")
    assert "step-00000006" in event["problem"] and "does not match its checksum" in event["problem"]


def test_a_damaged_checkpoint_neither_keeps_its_step_from_being_saved_nor_counts_as_kept(tmp_path):
    save(tmp_path, 4, 6)
    damage(tmp_path, 6)
    keeping = keeper(tmp_path, keep_last=1)
    keeping.restore(state())
    for step in (5, 6):
        keeping.save(state(step, seed=step), background=False)
        assert store.newest_whole(tmp_path).checkpoint.step == step


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(tmp_path):
    save(tmp_path, 4, 6)
    damage(tmp_path, 4)
    damage(tmp_path, 6)
    with pytest.raises(RunFailed, match=r"No checkpoint of .* is whole"):
        keeper(tmp_path).restore(state())


def test_a_checkpoint_of_another_model_is_refused_and_nothing_of_it_is_read(tmp_path):
    save(tmp_path, 4)
    other = state(seed=1, ffn_width=48, layers=3)
    with pytest.raises(UserError, match=r"(?s)is of another model: .*and \d+ more.*another --run-dir"):
        keeper(tmp_path).restore(other)
    assert _same(other, state(seed=1, ffn_width=48, layers=3))


def test_a_refusal_is_the_same_on_every_process(workers, tmp_path):
    save(tmp_path, 4)
    damage(tmp_path, 4)
    first, second = workers.run(2, refusal, tmp_path)
    assert first == second and "is whole" in first


def refusal(world: World, run_dir: Path) -> str:
    try:
        keeper(run_dir, world).restore(state())
    except ArgosyError as error:
        return str(error)
    return ""


def test_weights_alone_leave_the_optimizer_and_the_step_as_they_are(tmp_path):
    save(tmp_path, 4)
    fresh = state(seed=1)
    keeper(tmp_path / "another").read_weights(fresh, tmp_path)
    assert _model(fresh).keys() == _model(state()).keys()
    torch.testing.assert_close(_model(fresh), _model(state(seed=4)), rtol=0, atol=0)
    torch.testing.assert_close(_optimizer(fresh), _optimizer(state(seed=1)), rtol=0, atol=0)
    assert fresh.step == 0


def test_a_save_that_fails_is_told_and_forgotten_once_one_succeeds(tmp_path):
    blocked = store.step_folder(tmp_path, 1)
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    keeping = keeper(tmp_path)
    keeping.save(state(1), background=False)
    assert "Not a directory" in keeping.last_error == events(tmp_path, "save_failed")[0]["error"]
    keeping.save(state(2), background=False)
    assert keeping.last_error is None and kept(tmp_path) == [2]


@pytest.mark.parametrize(
    ("saved", "own", "expected"),
    [
        (LossScaler(2.0**14), LossScaler(2.0**16), 2.0**14),
        # A plan of another precision: a scale that does not seek is not the one that fp16 needs, nor the other way.
        (LossScaler(1.0, growth_steps=0), LossScaler(2.0**16), 2.0**16),
        (LossScaler(2.0**14), LossScaler(1.0, growth_steps=0), 1.0),
    ],
)
def test_a_loss_scale_is_taken_back_only_from_a_run_that_sought_one_by_a_run_that_does(tmp_path, saved, own, expected):
    before, after = state(2), state()
    before.scaler, after.scaler = saved, own
    keeper(tmp_path).save(before, background=False)
    assert keeper(tmp_path).restore(after) is not None
    assert after.scaler.scale == expected


def _model(of: TrainState) -> dict[str, torch.Tensor]:
    return of.weights()


def _optimizer(of: TrainState) -> dict[str, dict[str, torch.Tensor]]:
    return of.tensors(ALONE)["optimizer"]


def _same(one: TrainState, other: TrainState) -> bool:
    pairs = [(_model(one), _model(other)), *zip(_optimizer(one).values(), _optimizer(other).values(), strict=True)]
    same = all(torch.equal(a[key], b[key]) for a, b in pairs for key in a | b)
    return same and one.scaler.scale == other.scaler.scale
