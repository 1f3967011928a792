"""Keeping a run's state safe: when it is saved, what is kept, where a run goes on from."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint import store
from argosy.checkpoint.boxes import PLACES
from argosy.checkpoint.checksums import shard_name
from argosy.checkpoint.history import History
from argosy.checkpoint.remote import Remote
from argosy.checkpoint.store import Checkpoint
from argosy.config.optimizer import OptimizerConfig
from argosy.config.schema import CheckpointConfig
from argosy.errors import ArgosyError, StorageError, UserError
from argosy.launch import run_folder
from argosy.observe.events import Events
from argosy.observe.screen import Progress
from argosy.optim.optimizer import Optimizer
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.precision import LossScaler
from argosy.training.checkpointer import Checkpointer
from argosy.training.state import TrainState
from checkpoint.saving import flip_a_bit, rewrite
from run_folder import events
from tiny import EAGER, run_config

ALONE = World()


def checkpointer(
    run_dir: Path, world: World = ALONE, progress: Progress | None = None, config_sha256: str = "", **settings: Any
) -> Checkpointer:
    records, progress = Events(run_dir, f"rank-{world.rank}"), progress or Progress(enabled=False)
    return Checkpointer(run_dir, CheckpointConfig(**settings), EAGER, "corpus", world, records, progress, config_sha256)


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
    keeping = checkpointer(run_dir, **settings)
    for step in steps:
        keeping.save(state(step, seed=step), background=False)
    keeping.close()


def kept(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed(run_dir)]


def damage(run_dir: Path, step: int) -> None:
    file = store.step_folder(run_dir, step) / shard_name(0)
    flip_a_bit(file, file.stat().st_size * 4)


def test_a_save_is_due_at_every_multiple_of_the_steps(tmp_path):
    keeping = checkpointer(tmp_path, every_steps=3)
    assert [done for done in range(1, 10) if keeping.is_due_by_steps(done)] == [3, 6, 9]
    assert not any(checkpointer(tmp_path, every_steps=0).is_due_by_steps(done) for done in range(1, 10))


def test_a_save_is_due_once_the_minutes_have_passed_since_the_last_one(tmp_path):
    keeping = checkpointer(tmp_path, every_minutes=0.3 / 60)
    assert not keeping.is_due_by_time
    time.sleep(0.3)
    assert keeping.is_due_by_time
    keeping.save(state(1), background=True)
    assert not keeping.is_due_by_time
    keeping.close()
    assert not checkpointer(tmp_path, every_minutes=0).is_due_by_time


def test_the_newest_are_kept_and_those_at_round_steps(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, 6, keep_last=2, keep_every=3)
    assert kept(tmp_path) == [3, 5, 6]
    assert [event["step"] for event in events(tmp_path, "prune")] == [1, 2, 4]
    for kind in ("save", "verified"):
        assert [event["step"] for event in events(tmp_path, kind)] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_a_checkpoint_starts_from_its_initial_state(tmp_path):
    fresh = state(seed=1)
    assert checkpointer(tmp_path).restore(fresh) is None
    assert _same(fresh, state(seed=1)) and fresh.step == 0


def test_all_of_the_state_comes_back(tmp_path):
    torch.manual_seed(7)
    save(tmp_path, 4)
    expected = torch.rand(3)
    torch.manual_seed(8)
    restored = state(seed=1)
    assert checkpointer(tmp_path).restore(restored).step == 4
    assert _same(restored, state(4, seed=4))
    assert (restored.step, restored.tokens) == (4, 400)
    assert torch.equal(torch.rand(3), expected)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it_and_the_event_says_so(tmp_path):
    save(tmp_path, 4, 6)
    damage(tmp_path, 6)
    restored = state(seed=1)
    assert checkpointer(tmp_path).restore(restored).step == 4
    assert _same(restored, state(4, seed=4))
    (event,) = events(tmp_path, "damaged_checkpoint")
    assert "step-00000006" in event["problem"] and "does not match its checksum" in event["problem"]


def test_places_that_cannot_be_give_way_to_the_checkpoint_before_though_every_checksum_is_right(tmp_path):
    save(tmp_path, 4, 6)
    rewrite(Checkpoint(store.step_folder(tmp_path, 6)), _misplace)
    restored = state(seed=1)
    assert checkpointer(tmp_path).restore(restored).step == 4
    assert _same(restored, state(4, seed=4))
    (event,) = events(tmp_path, "damaged_checkpoint")
    assert "step-00000006: file rank-00000.safetensors cannot be read (its metadata argosy.places" in event["problem"]
    assert kept(tmp_path) == [4]


def test_places_that_cannot_be_in_a_remote_copy_give_way_too_and_the_run_never_starts_anew(tmp_path):
    run_dir, there = tmp_path / "run", str(tmp_path / "there")
    save(run_dir, 4, 6, remote=there)
    (copy,) = (tmp_path / "there").glob("**/step-00000006")
    rewrite(Checkpoint(copy), _misplace)
    store.remove(store.step_folder(run_dir, 6))
    assert checkpointer(run_dir, remote=there).restore(state()).step == 4
    store.remove(store.step_folder(run_dir, 4))
    for copy in (tmp_path / "there").glob("**/step-00000004"):
        rewrite(Checkpoint(copy), _misplace)
    with pytest.raises(StorageError, match=r"(?s)rank-00000.*cannot be read.*leave the key out"):
        checkpointer(run_dir, remote=there).restore(state())


def _misplace(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata[PLACES] = '{"model.head.weight": ["model.head.weight", [4], [-2]]}'


def test_processes_share_the_reading_and_agree_on_what_is_damaged(workers, tmp_path):
    """What one of them finds in its share is why all of them go on from the checkpoint before."""
    assert workers.run(2, restored_together, tmp_path) == [(4, ["rank-00001"]), (4, ["rank-00000"])]
    (event,) = events(tmp_path, "damaged_checkpoint")
    assert "file rank-00000.safetensors does not match" in event["problem"]


def restored_together(world: World, run_dir: Path) -> tuple[int, list[str]]:
    """The step that two processes go on from, the newer one being damaged, and the files of it that this one read."""
    keeping = checkpointer(run_dir, world)
    for step in (4, 6):
        keeping.save(state(step), background=False)
    keeping.close()
    if world.is_first:
        damage(run_dir, 6)
    world.barrier()
    read, plain = [], store.check_files

    def check_files(folder: Path, files: dict[str, Any]) -> None:
        read.extend(Path(name).stem for name in files if folder == store.step_folder(run_dir, 4))
        plain(folder, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "check_files", check_files)
        checkpoint = checkpointer(run_dir, world).restore(state(seed=1))
    return checkpoint.step, read


def test_a_damaged_checkpoint_neither_keeps_its_step_from_being_saved_nor_counts_as_kept(tmp_path):
    save(tmp_path, 4, 6)
    damage(tmp_path, 6)
    keeping = checkpointer(tmp_path, keep_last=1)
    keeping.restore(state())
    for step in (5, 6):
        keeping.save(state(step, seed=step), background=False)
        assert store.newest_whole(tmp_path).checkpoint.step == step
    keeping.close()
    assert kept(tmp_path) == [5, 6]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(tmp_path):
    save(tmp_path, 4, 6)
    damage(tmp_path, 4)
    damage(tmp_path, 6)
    with pytest.raises(StorageError, match=r"No checkpoint of .* is whole"):
        checkpointer(tmp_path).restore(state())


def test_a_checkpoint_of_another_model_is_refused_and_nothing_of_it_is_read(tmp_path):
    save(tmp_path, 4)
    other = state(seed=1, ffn_width=48, layers=3)
    with pytest.raises(UserError, match=r"(?s)is of another model: .*and \d+ more.*another --run-dir"):
        checkpointer(tmp_path).restore(other)
    with pytest.raises(UserError, match=r"(?s)is of another model: .*Leave out the sizes"):
        checkpointer(tmp_path).read_weights(other, tmp_path, lambda: None)
    assert _same(other, state(seed=1, ffn_width=48, layers=3))


def test_a_refusal_is_the_same_on_every_process(workers, tmp_path):
    save(tmp_path, 4)
    damage(tmp_path, 4)
    first, second = workers.run(2, refusal, tmp_path)
    assert first == second and "is whole" in first


def refusal(world: World, run_dir: Path) -> str:
    try:
        checkpointer(run_dir, world).restore(state())
    except ArgosyError as error:
        return str(error)
    return ""


def test_weights_alone_leave_the_optimizer_and_the_step_as_they_are(tmp_path):
    save(tmp_path, 4)
    fresh = state(seed=1)
    checkpointer(tmp_path / "another").read_weights(fresh, tmp_path, lambda: None)
    assert _model(fresh).keys() == _model(state()).keys()
    torch.testing.assert_close(_model(fresh), _model(state(seed=4)), rtol=0, atol=0)
    torch.testing.assert_close(_rest(fresh), _rest(state(seed=1)), rtol=0, atol=0)
    assert fresh.step == 0


def test_a_save_that_fails_is_reported_and_training_goes_on(tmp_path, capsys):
    blocked = store.step_folder(tmp_path, 1)
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    keeping = checkpointer(tmp_path, progress=Progress(enabled=True))
    keeping.save(state(1), background=False)
    assert "Not a directory" in events(tmp_path, "save_failed")[0]["error"]
    assert "checkpoint of step 1 FAILED" in "".join(capsys.readouterr())
    keeping.save(state(2), background=False)
    keeping.close()
    assert kept(tmp_path) == [2]


def test_the_last_state_is_saved_unless_it_is_already_and_all_processes_know_whether_it_was(workers, tmp_path):
    for found in workers.run(2, finish, tmp_path):
        failed, succeeded, again = found
        assert "Not a directory" in failed and succeeded is None and again is None
    assert kept(tmp_path) == [2, 3]
    assert [event["step"] for event in events(tmp_path, "save")] == [2, 3]
    assert [event["step"] for event in events(tmp_path, "verified")] == [2, 3]


def finish(world: World, run_dir: Path) -> list[str | None]:
    """Three runs that end with the same folder: at a step that cannot be saved, one that can, one that is."""
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "checkpoints" / "step-00000001").write_text("in the way")
    keeping = checkpointer(run_dir, world)
    found = [keeping.finish(state(1)), keeping.finish(state(2))]
    keeping.save(state(3), background=True)
    found.append(keeping.finish(state(3)))
    keeping.close()
    return found


def test_the_last_state_is_saved_once_more_if_a_writer_stands_still_over_it(workers, tmp_path):
    assert workers.run(2, finish_while_a_writer_stands_still, tmp_path) == [None, None]
    (failed,) = events(tmp_path, "save_failed")
    assert kept(tmp_path) == [1, 2] and "rank 1: the writer process hung" in failed["error"]


def finish_while_a_writer_stands_still(world: World, run_dir: Path) -> str | None:
    keeping = checkpointer(run_dir, world)
    keeping.save(state(1), background=False)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("argosy.checkpoint.save.WRITER_SILENT_S", 1.0)
            os.kill(keeping._saver.writer_pid, signal.SIGSTOP)
        error = keeping.finish(state(2))
    keeping.close()
    return error


def test_a_run_that_turns_away_from_its_last_steps_forgets_their_checkpoints(tmp_path):
    there = tmp_path / "there"
    save(tmp_path / "run", 2, 4, 6, keep_last=3)
    for step in (2, 4, 6):
        Remote(str(there), tmp_path / "run").put(Checkpoint(store.step_folder(tmp_path / "run", step)), lambda: None)
    keeping, restored = checkpointer(tmp_path / "run", remote=str(there), keep_last=3), state(seed=1)
    assert keeping.restore(restored, at_most=5).step == restored.step == 4
    keeping.save(state(6, seed=9), background=False)
    keeping.close()
    assert kept(tmp_path / "run") == [2, 4, 6]
    again = state()
    assert checkpointer(tmp_path / "run").restore(again) is not None
    assert _same(again, state(6, seed=9))
    assert Remote(str(there), tmp_path / "run").steps() == [2, 4, 6]
    keeping.forget_from(4)
    assert kept(tmp_path / "run") == Remote(str(there), tmp_path / "run").steps() == [2]


def test_a_run_that_turns_away_from_all_its_checkpoints_can_be_started_again(tmp_path):
    save(tmp_path, 2)
    checkpointer(tmp_path).forget_from(1)
    assert checkpointer(tmp_path).restore(state()) is None


@pytest.mark.parametrize("lost", ["all", "newest", "newest damaged", "all damaged"])
def test_what_is_lost_here_is_taken_from_the_remote_place(tmp_path, lost):
    run_dir, there = tmp_path / "run", str(tmp_path / "there")
    save(run_dir, 2, 4, remote=there)
    assert events(run_dir, "drained")[-1]["step"] == 4
    for step in (2, 4):
        if lost == "all" or (lost == "newest" and step == 4):
            store.remove(store.step_folder(run_dir, step))
        elif lost == "all damaged" or (lost == "newest damaged" and step == 4):
            damage(run_dir, step)
    keeping, restored = checkpointer(run_dir, remote=there), state(seed=1)
    assert keeping.newest_step() == 4
    assert keeping.restore(restored).step == 4
    assert _same(restored, state(4, seed=4))
    assert store.newest_whole(run_dir).damaged == () and events(run_dir, "fetched")[0]["step"] == 4


def test_a_copy_that_was_trained_with_other_data_is_refused_where_nothing_else_told(tmp_path, monkeypatch):
    run_dir, there = tmp_path / "run", str(tmp_path / "there")
    save(run_dir, 4, remote=there)
    store.remove(store.step_folder(run_dir, 4))
    changed = checkpointer(run_dir, remote=there)
    monkeypatch.setattr(changed, "_data_identity", "another corpus")
    with pytest.raises(UserError, match=r"data corpus and these are another corpus\..*--accept-changes"):
        changed.restore(state())
    assert changed.restore(state()).step == 4, "it is here now, and the start of the run has asked"


def test_a_copy_that_was_trained_with_other_data_is_taken_at_once_if_changes_are_accepted(tmp_path, monkeypatch):
    run_dir, there = tmp_path / "run", str(tmp_path / "there")
    save(run_dir, 4, remote=there)
    store.remove(store.step_folder(run_dir, 4))
    run_folder.enter(run_dir, run_config(tmp_path, checkpoint={"remote": there}), "another corpus", accept_changes=True)
    changed = checkpointer(run_dir, remote=there)
    monkeypatch.setattr(changed, "_data_identity", "another corpus")
    assert changed.restore(state()).step == 4
    assert events(run_dir, "resume")[-1]["config_changed"]


def test_a_run_does_not_start_anew_because_the_remote_place_cannot_be_reached(tmp_path, monkeypatch):
    def refuse(*asked: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Remote, "newest", refuse)
    keeping = checkpointer(tmp_path / "run", remote=str(tmp_path / "there"))
    with pytest.raises(StorageError, match=r"checkpoint\.remote = .*no route to host.*leave the key out"):
        keeping.restore(state())
    save(tmp_path / "run", 4)
    assert keeping.restore(state()).step == 4
    assert keeping.restore(state(), at_most=5).step == 4, "a run goes back although the copies cannot be deleted"


def test_a_copy_that_cannot_be_read_now_is_named_and_what_is_here_goes_on(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("the token has expired")

    run_dir, there = tmp_path / "run", str(tmp_path / "there")
    save(run_dir, 2, 4, remote=there)
    store.remove(store.step_folder(run_dir, 4))
    monkeypatch.setattr(Remote, "fetch", refuse)
    keeping = checkpointer(run_dir, remote=there)
    assert keeping.restore(state()).step == 2
    store.remove(store.step_folder(run_dir, 2))
    with pytest.raises(StorageError, match=r"checkpoint\.remote = .*step 4 cannot be read \(the token has expired\)"):
        keeping.restore(state())


def test_a_change_of_the_run_file_is_noted_when_it_goes_on(tmp_path):
    keeping = checkpointer(tmp_path, config_sha256="before")
    keeping.save(state(4), background=False)
    keeping.close()
    for now in ("before", "after"):
        checkpointer(tmp_path, config_sha256=now).restore(state())
    assert ["config_changed" in event for event in events(tmp_path, "resume")] == [False, True]
    assert store.committed(tmp_path)[0].manifest.config_sha256 == "before"


def test_the_data_cursor_and_the_history_come_back(tmp_path):
    before, after = state(4), state()
    before.skipped, before.history = ((3, 5), (7, 8)), History().next("a world", 2)
    keeping = checkpointer(tmp_path)
    keeping.save(before, background=False)
    keeping.restore(after)
    assert (after.step, after.tokens, after.skipped, after.history) == (4, 400, before.skipped, before.history)
    keeping.close()


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
    keeping = checkpointer(tmp_path)
    keeping.save(before, background=False)
    keeping.close()
    assert checkpointer(tmp_path).restore(after) is not None
    assert after.scaler.scale == expected


def _model(of: TrainState) -> dict[str, torch.Tensor]:
    return {box.name: tensor for box, tensor in of.weights().items()}


def _rest(of: TrainState) -> dict[str, torch.Tensor]:
    return {box.name: tensor for box, tensor in of.boxes().items() if not box.name.startswith("model.")}


def _same(one: TrainState, other: TrainState) -> bool:
    pairs = [(_model(one), _model(other)), (_rest(one), _rest(other))]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a | b)
