"""A site that was left out goes on from what the others agreed on, and trains on nothing that does not count."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from argosy.checkpoint.history import History
from argosy.checkpoint.memory import MEMORY_VARIABLE, memory_checkpoints_in
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from argosy.sync.average import RetainedAverages
from argosy.sync.layout import AdoptedState, LeftChange, RoundWait, Sites, read_record, write_record
from argosy.sync.ledger import Contribution, RoundLedger, next_line
from argosy.training import agreement
from argosy.training.recovery import SurvivorFacts, follow
from argosy.training.rounds import Rounds
from argosy.training.schedule import Pace, learning_rate_factor
from argosy.training.state import StepUpdate, Survivor, TrainState
from argosy.training.stop import WorldIsOver
from chats import conversations, rows_of
from one_site import gradient, run_of, site, train

CPU = torch.device("cpu")


def rounds_of(state: TrainState, records: MagicMock | None = None, has_signal: Callable[[], bool] = bool) -> Rounds:
    """The rounds of a rank whose run has no checkpoints or batches."""
    assert state.outer is not None
    run, records = state.outer.sites.run, records or MagicMock()
    parts = MagicMock(run=run, state=state, world=World(), survivor=Survivor(), records=records, has_signal=has_signal)
    parts.checkpointer.committed = []
    parts.clock = StepClock(World().device)
    return Rounds(parts, Pace(run))


def decide(sites: Sites, folder: Path, mean: np.ndarray, *names: str) -> None:
    """Have the next round decided, with this average, as the others do; B is left out unless it is named."""
    ledger = RoundLedger(folder)
    number = len(ledger.lines)
    sites.average(number).write_bytes(sites.wire_of(number).encode(mean.astype(np.float32)).tobytes())
    delivered = {name: Contribution(64, []) for name in names}
    ledger.append(next_line(sites.shares, ledger.lines, "A", delivered, sites.names, 1, [1], {}))


def test_a_site_makes_the_steps_that_others_made_without_it_from_their_gradients(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"from_step": 6, "every_steps": 4})
    state, _, sites = site(run, tmp_path / "A")
    wanted, *_ = site(run, tmp_path / "wanted")
    for step in range(3):
        train(wanted, step, lambda s, norm: StepUpdate(
            s.step, 1.0, float(f"{norm:.7g}"), run.optimizer.grad_clip,
            run.optimizer.lr * learning_rate_factor(s.step, run.train.steps, run.schedule), run.tokens_at(s.step), None,
        ))  # fmt: skip
        vector = np.zeros(sites.whole.elements, np.float32)
        for piece in wanted.model.pieces:
            part = sites.whole.part(vector, *piece.place)
            part[...] = gradient(wanted, step)[piece.name].numpy()
        decide(sites, tmp_path / "A", vector, "B")
    assert (rounds := rounds_of(state)).settle()
    assert (state.step, state.rounds, state.tokens) == (3, 3, wanted.tokens)
    late, *_ = site(run, tmp_path / "late")  # a rank that had the gradient, and not applied it when its world ended
    late.step, late.rounds, late.pending = 2, 2, True
    for piece in late.model.pieces:
        piece.value.grad = torch.zeros_like(piece.value)
    follow(late, [SurvivorFacts.of(state)])
    assert (late.step, late.rounds) == (3, 3) and not rounds.write_lines({}, {}), "nobody here knows a loss of it"
    for piece, twin in zip(state.model.masters, wanted.model.masters, strict=True):
        assert torch.equal(piece.value, twin.value), piece.name


def test_what_a_site_in_a_round_leaves_for_another_is_what_was_summed_before(tmp_path: Path) -> None:
    run, looks = run_of(tmp_path, {"from_step": 1, "every_steps": 2}), iter([False, True])
    state, _, sites = site(run, tmp_path / "A")
    train(state, 0)
    decide(sites, tmp_path / "A", np.zeros(sites.whole.elements), "A", "B")
    summed = {piece.name: piece.value.clone() for piece in state.model.masters}
    for seed in (1, 2):
        train(state, seed)
    sites.want_state.touch()
    assert not rounds_of(state, has_signal=lambda: next(looks)).settle() and sites.state_about(0).exists()
    other, files, its = site(run, tmp_path / "B")
    shutil.copy(sites.state(0), its.adopted)
    files.adopt(0)
    for piece, twin in zip(state.model.masters, other.model.masters, strict=True):
        assert torch.equal(state.outer.state_of(piece.name)["weights"], summed[piece.name]), piece.name
        assert torch.equal(twin.value, summed[piece.name]), piece.name


def test_a_site_whose_checkpoint_needs_a_sum_that_is_gone_asks_for_a_state(tmp_path: Path) -> None:
    run, looks = run_of(tmp_path, {"from_step": 2}), iter([False, True])
    state, _, sites = site(run, tmp_path / "A")
    decide(sites, tmp_path / "A", np.zeros(sites.whole.elements), "A", "B")
    sites.average(0).unlink()
    assert rounds_of(state, has_signal=lambda: next(looks)).sum_gradients(MagicMock()) is None
    assert sites.lost.exists()


def test_the_average_is_kept_of_a_round_at_whose_end_a_site_was_stopped(tmp_path: Path) -> None:
    state, _, sites = site(run_of(tmp_path, {"every_steps": 2}), tmp_path / "A")
    rounds = rounds_of(state, has_signal=lambda: True)
    rounds._checkpointer.committed, rounds._batches.skipped_numbers.return_value = [4], []
    for number in range(3):  # the checkpoint of step 4 is from before the outer step of round 1
        decide(sites, tmp_path / "A", np.zeros(sites.flat(0).elements), "A", "B")
        write_record(sites.about(number), rounds._about(number))
        RetainedAverages(sites).sweep(number)
    assert not sites.average(0).exists() and sites.average(1).exists()


def test_a_sum_of_gradients_is_over_the_tokens_that_are_learned(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"from_step": 1}).with_keys(train={"objective": "sft"})
    state, _, sites = site(run, tmp_path / "A")
    rounds, batch = rounds_of(state, has_signal=lambda: True), microbatches(rows_of(conversations(9))[:4], 2, 0, CPU)
    rounds.step.forward_backward(batch)
    assert rounds.sum_gradients(MagicMock()) is None
    learned = read_record(sites.about(0), LeftChange).tokens
    assert learned == sum(micro.counted for micro in batch) < 2 * batch[0].tokens_BT.numel()


def test_a_site_that_is_left_out_goes_back_to_the_end_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, {"every_steps": 4, "fragments": 2, "overlap_steps": 1})
    state, _, sites = site(run, tmp_path / "A")
    before = {piece.name: piece.value.clone() for piece in state.model.masters}
    state.history = History().next("abc", 0)
    (memory := tmp_path / "memory").mkdir()
    monkeypatch.setenv(MEMORY_VARIABLE, str(memory))
    outer = rounds_of(state)
    outer._memory.begin()
    for seed in range(2):
        train(state, seed)
    assert outer.is_due and outer.settle()
    assert state.rounds == 0 and state.in_flight() is not None  # it trains on while the fragment travels
    train(state, 2)
    mean = np.full(sites.flat(0).elements, 0.5, np.float32)
    decide(sites, tmp_path / "A", mean, "B")
    assert outer.is_left_behind and outer.settle()
    assert (state.step, state.rounds) == (2, 1) and state.in_flight() is None
    for piece in state.model.masters:
        moved = 0.7 * (0.5 + 0.9 * 0.5) if piece.name in sites.turn(0).shapes else 0.0
        torch.testing.assert_close(piece.value, before[piece.name] - moved)
    outer._memory.save()
    outer._memory.wait()
    (saved,) = memory_checkpoints_in(memory)
    assert state.history.admits(saved.world, saved.step + 1), "the run has turned away from what is saved from now on"


def test_an_outer_step_that_was_due_in_a_checkpoint_is_made_before_the_next_step(tmp_path: Path) -> None:
    state, _, sites = site(run_of(tmp_path, {"every_steps": 1}), tmp_path / "A")
    rounds = rounds_of(state)
    train(state, 0)  # the run has gone back to here: a checkpoint that was saved while the site waited
    decide(sites, tmp_path / "A", np.zeros(sites.flat(0).elements), "A", "B")
    assert next(rounds.steps()) == 1 and state.rounds == 1


def test_a_run_that_went_back_to_before_a_state_that_it_took_over_takes_one_over_again(tmp_path: Path) -> None:
    state, _, sites = site(run_of(tmp_path, {"every_steps": 9}), tmp_path / "A")
    steps = rounds_of(state, has_signal=lambda: True).steps()
    sites.adopted_at.write_text("2")
    state.step = 3
    assert next(steps) == 3 and not sites.lost.exists()
    state.step = 1
    assert next(steps, None) is None and sites.lost.exists()


def test_a_site_that_waits_leaves_a_world_that_is_over(tmp_path: Path) -> None:
    state, _, _ = site(run_of(tmp_path, {"every_steps": 1}), tmp_path / "A")
    rounds = rounds_of(state)
    rounds._parts.advance.side_effect = WorldIsOver
    train(state, 0)
    with pytest.raises(WorldIsOver):
        rounds.settle()


def test_what_a_site_left_before_it_took_another_state_over_is_left_anew(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"every_steps": 1})
    state, _, sites = site(run, tmp_path / "A")
    other, its_files, its = site(run, tmp_path / "B")
    for one, of, seed in (state, sites, 1), (other, its, 2):  # each goes on alone
        train(one, seed)
        decide(of, of.folder.parent, np.full(of.flat(0).elements, float(seed)), "A", "B")
        assert rounds_of(one).settle()
    rounds = rounds_of(state, has_signal=lambda: True)
    train(state, 3)
    state.tokens, state.skipped = 2 * run.tokens_per_step, ((0, 4), (4, 8))
    assert not rounds.settle() and sites.about(1).exists()
    its.want_state.touch()
    its_files.leave_state(0)
    shutil.copy(its.state(0), sites.adopted)
    shutil.copy(tmp_path / "B/ledger.jsonl", tmp_path / "A/ledger.jsonl")
    write_record(sites.adoption, AdoptedState(rounds=1, chain=RoundLedger(tmp_path / "B").lines[0].chain))
    assert rounds.settle() and (state.step, state.rounds) == (1, 1) and not sites.adoption.exists()
    assert state.tokens == run.tokens_per_step  # of the step that it has gone back from none count
    assert state.skipped == ((0, 4),)  # nor was what it is dealt for it now bad
    train(state, 4)
    moved = {piece.name: other.outer.state_of(piece.name)["weights"] - piece.value for piece in state.model.masters}
    assert not rounds.settle()
    change = np.fromfile(sites.change(1), np.float32)
    for piece in state.model.masters:
        part = torch.from_numpy(sites.flat(1).part(change, *piece.place).copy())
        torch.testing.assert_close(part, moved[piece.name])


def test_a_site_keeps_a_share_of_its_own_weights(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"every_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.25})
    state, _, sites = site(run, tmp_path / "A")
    before = {piece.name: piece.value.clone() for piece in state.model.masters}
    outer = rounds_of(state)
    for seed in range(2):
        train(state, seed)
    assert outer.settle()
    decide(sites, tmp_path / "A", np.zeros(sites.flat(0).elements), "A", "B")
    assert outer.settle() and state.rounds == 0  # it has come early
    train(state, 2)
    own = {piece.name: piece.value.clone() for piece in state.model.masters}
    assert outer.is_due and outer.settle() and state.rounds == 1
    line = outer.line()["sites"]
    assert line["fragment"] == 0 and math.isclose(line["ratio"], 1.0, rel_tol=0.1)
    for piece in state.model.masters:
        is_turn = piece.name in sites.turn(0).shapes
        agreed = 0.25 * own[piece.name] + 0.75 * before[piece.name] if is_turn else own[piece.name]
        torch.testing.assert_close(piece.value, agreed)


def test_it_is_said_which_site_a_round_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SAID_S", 0.01)
    state, _, sites = site(run_of(tmp_path, {"every_steps": 1}), tmp_path / "A")
    write_record(sites.status, RoundWait(connected=[], waiting_for=["B"], round=0, quorum_missing=True))
    looks, records = iter([False] * 9 + [True]), MagicMock()
    outer = rounds_of(state, records, lambda: next(looks))
    train(state, 0)
    assert not outer.settle()
    said = [call.args[0] for call in records.progress.say.call_args_list]
    assert said == [" waiting: B is not ready for round 0; a round needs 2 sites"]
