"""Saving: what is committed is the state at the moment of the call, whole, or there is no new checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from argosy.checkpoint import fence, store
from argosy.checkpoint import save as save_module
from argosy.checkpoint.checksums import shard_name
from argosy.checkpoint.fence import OWNER
from argosy.checkpoint.remote import Remote
from argosy.checkpoint.save import Saver
from argosy.checkpoint.writer import Upkeep
from argosy.parallel.world import World
from argosy.training.stop import WorldIsOver
from checkpoint.saving import ALONE, WIDTH, Saving, a_disk_that_fails_past, manifest, saved, state
from waiting import is_alive, wait_until


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    found = Saving(tmp_path)
    yield found
    found.saver.abandon()


def assert_saved(run_dir: Path, values: dict[int, float]) -> None:
    torch.testing.assert_close(saved(run_dir), {step: state(value) for step, value in values.items()}, rtol=0, atol=0)


def test_a_save_that_was_waited_for_is_committed(tmp_path, saving):
    saving.save(1.0, step=4)
    assert_saved(tmp_path, {4: 1.0})
    (told,) = saving.told("save")
    assert told["step"] == 4 and told["bytes"] == store.committed(tmp_path)[0].bytes > 4 * 4 * WIDTH
    assert saving.saver.last_error is None and saving.saver.committed == {4}


def test_what_is_saved_is_the_state_at_the_call_whatever_training_does_to_it_then(tmp_path, saving):
    live = state(1.0)
    saving.saver.save(live, manifest(4))
    for tensor in live.values():
        tensor.zero_()
    saving.saver.wait()
    assert_saved(tmp_path, {4: 1.0})


def test_a_save_waits_for_the_one_before_it(tmp_path, saving):
    for step in (1, 2, 3):
        saving.save(step, step, wait=False)
    saving.saver.wait()
    assert_saved(tmp_path, {step: step for step in (1, 2, 3)})
    assert [told["step"] for told in saving.told("save")] == [1, 2, 3]


def test_a_save_that_has_ended_is_reported_without_waiting(saving):
    saving.saver.poll()
    saving.save(1.0, step=4, wait=False)
    wait_until(lambda: saving.saver.poll() or saving.told("save"))


def test_a_step_that_is_committed_is_not_saved_again(tmp_path, saving):
    saving.save(1.0, step=4)
    saving.save(2.0, step=4)
    assert_saved(tmp_path, {4: 1.0})
    assert len(saving.told("save")) == 1


def test_what_a_process_that_died_left_in_the_folder_is_swept_away(tmp_path):
    saving = Saving(tmp_path)
    folder = fence.partial_folder(tmp_path, 4, 0)
    folder.mkdir(parents=True)
    (folder / "rank-00007.safetensors").write_bytes(b"half of somethi")
    (folder / "rank-00000.json").write_bytes(b'{"ticket": "another", "bytes": 15, "sha256": ""}')
    saving.save(1.0, step=4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    saving.close()
    names = {path.name for path in store.step_folder(tmp_path, 4).iterdir()}
    assert names == {"rank-00000.safetensors", store.MANIFEST, store.VERIFIED}


def test_a_disk_that_fails_leaves_the_checkpoint_before_as_the_newest_and_the_next_save_works(tmp_path, saving):
    saving.save(1.0, step=1)
    with a_disk_that_fails_past(WIDTH, saving.saver.writer_pid):
        saving.save(2.0, step=2)
    assert saving.told("save_failed") == [{"step": 2, "error": "[Errno 27] File too large"}]
    assert saving.saver.last_error == "[Errno 27] File too large"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    saving.save(3.0, step=3)
    assert_saved(tmp_path, {1: 1.0, 3: 3.0})
    assert saving.saver.last_error is None


@pytest.mark.parametrize("in_the_way", ["checkpoints", "checkpoints/step-00000002"])
def test_a_file_in_place_of_a_folder_is_an_error_and_no_end(tmp_path, saving, in_the_way):
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("not a folder")
    saving.save(2.0, step=2)
    assert in_the_way in saving.told("save_failed")[0]["error"]
    assert (tmp_path / in_the_way).read_text() == "not a folder"


def test_memory_that_is_short_is_an_error_and_no_end(tmp_path, saving):
    with a_disk_that_fails_past(WIDTH, os.getpid()):
        saving.save(1.0, step=1)
    assert saving.told("save_failed") == [{"step": 1, "error": "[Errno 27] File too large"}]
    saving.save(2.0, step=2)
    assert_saved(tmp_path, {2: 2.0})


def test_a_writer_that_is_killed_is_reported_and_replaced_at_the_next_save(tmp_path, saving):
    saving.save(1.0, step=1)
    pid = saving.saver.writer_pid
    os.kill(pid, signal.SIGSTOP)
    saving.save(2.0, step=2, wait=False)
    os.kill(pid, signal.SIGKILL)
    saving.saver.wait()
    assert saving.told("writer_died") == [{"pid": pid, "why": "signal SIGKILL"}]
    assert saving.told("save_failed") == [{"step": 2, "error": "the writer process died (signal SIGKILL)"}]
    assert saving.saver.writer_pid is None
    saving.save(3.0, step=3)
    assert_saved(tmp_path, {1: 1.0, 3: 3.0})


def test_a_writer_that_hangs_does_not_hold_up_training_for_ever(tmp_path, saving, monkeypatch):
    saving.save(1.0, step=1)
    monkeypatch.setattr(save_module, "HUNG_S", 0.5)
    os.kill(saving.saver.writer_pid, signal.SIGSTOP)
    saving.save(2.0, step=2)
    assert "hung" in saving.told("save_failed")[0]["error"] and len(saving.told("writer_died")) == 1
    monkeypatch.setattr(save_module, "HUNG_S", 60.0)
    saving.save(3.0, step=3)
    assert_saved(tmp_path, {1: 1.0, 3: 3.0})


def test_a_writer_that_stands_still_is_replaced_in_seconds(tmp_path, saving, monkeypatch):
    monkeypatch.setattr(save_module, "WRITER_SILENT_S", 0.5)
    saving.save(1.0, step=1)
    os.kill(saving.saver.writer_pid, signal.SIGSTOP)
    saving.save(2.0, step=2, wait=False)
    wait_until(lambda: saving.saver.poll() or saving.told("writer_died"))  # training need not wait for that
    assert "stopped" in saving.told("writer_died")[0]["why"]
    assert saving.told("save_failed")[0]["step"] == 2 and not saving.saver.is_in_flight
    monkeypatch.setattr(save_module, "WRITER_SILENT_S", 10.0)
    saving.save(3.0, step=3)
    assert_saved(tmp_path, {1: 1.0, 3: 3.0})


def test_a_writer_that_stands_still_when_all_is_saved_does_not_hold_up_the_end(tmp_path, saving, monkeypatch):
    monkeypatch.setattr(save_module, "WRITER_SILENT_S", 0.5)
    saving.save(1.0, step=1)
    os.kill(saving.saver.writer_pid, signal.SIGSTOP)
    saving.close()
    assert len(saving.told("writer_died")) == 1 and list(saved(tmp_path)) == [1]


def test_a_writer_whose_disk_is_slow_answers(tmp_path, saving, monkeypatch):
    monkeypatch.setattr(save_module, "WRITER_SILENT_S", 4.0)
    monkeypatch.setattr(save_module, "WRITER_ASK_S", 0.1)
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@save:step=1,fraction=0.9,seconds=8")
    saving.save(1.0, step=1)
    saving.close()
    assert list(saved(tmp_path)) == [1] and not saving.told("writer_died")


def test_what_is_waited_for_can_be_given_up(tmp_path):
    """Where the world is over, the parts of the dead will never come."""
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise WorldIsOver

    saver = Saver(tmp_path, ALONE, lambda news, **facts: None, check=check)
    saver.save(state(1.0), manifest(1))
    saver.wait()
    assert saver.writer_pid is not None
    os.kill(saver.writer_pid, signal.SIGSTOP)
    saver.save(state(2.0), manifest(2))
    threading.Timer(0.3, is_over.set).start()
    for waiting in (saver.wait, saver.close):
        with pytest.raises(WorldIsOver):
            waiting()
    saver.abandon()


@pytest.mark.parametrize(
    ("fault", "survives"),
    [
        ("kill@save:step=2,fraction=0.1", False),
        ("kill@save:step=2,fraction=0.5", False),
        ("kill@save:step=2,fraction=0.9", False),
        ("kill@rename:step=2", False),
        ("kill@renamed:step=2", True),
        ("eio@save:step=2,fraction=0.5", False),
        ("enospc@rename:step=2", False),
        ("kill@verify:step=2", True),
    ],
)
def test_a_writer_killed_or_failing_anywhere_leaves_whole_checkpoints_only(tmp_path, monkeypatch, fault, survives):
    monkeypatch.setenv("ARGOSY_FAULTS", fault)
    monkeypatch.setenv("ARGOSY_RUN_DIR", str(tmp_path))
    saving = Saving(tmp_path)
    for step in (1, 2):
        saving.save(step, step)
    assert_saved(tmp_path, {1: 1.0, **({2: 2.0} if survives else {})})
    assert len(saving.told("save")) == 1 + survives
    if fault.startswith("kill"):  # in the midst of verifying it may take up the next save before it dies
        wait_until(lambda: saving.saver.poll() or saving.told("writer_died"))
    saving.save(3.0, step=3)
    saving.close()
    assert all(checkpoint.is_verified for checkpoint in store.committed(tmp_path))
    assert_saved(tmp_path, {1: 1.0, 3: 3.0, **({2: 2.0} if survives else {})})
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_a_slow_disk_does_not_hold_up_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGOSY_FAULTS", "sleep@save:step=2,seconds=3")
    saving = Saving(tmp_path)
    saving.save(1.0, step=1)
    began = time.monotonic()
    saving.save(2.0, step=2, wait=False)
    assert time.monotonic() - began < 2 and not saving.told("save")[1:]
    saving.close()
    assert saving.told("save")[1]["seconds"] > 3
    assert_saved(tmp_path, {1: 1.0, 2: 2.0})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for little more than one checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={5 * 4 * WIDTH}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs the rights of root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_full_leaves_what_is_there_and_is_used_again_once_there_is_room(small_disk):
    saving = Saving(small_disk / "run")
    saving.save(1.0, step=1)
    saving.save(2.0, step=2)
    assert saving.told("save_failed") == [{"step": 2, "error": "[Errno 28] No space left on device"}]
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert_saved(small_disk / "run", {1: 1.0})
    wait_until(lambda: saving.saver.poll() or saving.told("verified"))  # a file that is read takes room, deleted or not
    store.remove(store.step_folder(small_disk / "run", 1))
    saving.save(3.0, step=3)
    saving.close()
    assert_saved(small_disk / "run", {3: 3.0})


def test_a_disk_that_may_only_be_read_leaves_what_is_there_and_is_used_again_once_it_may_be_written(small_disk):
    saving = Saving(small_disk / "run")
    saving.save(1.0, step=1)
    wait_until(lambda: saving.saver.poll() or saving.told("verified"))  # a disk that is written to stays writable
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    saving.save(2.0, step=2)
    assert "[Errno 30] Read-only file system" in saving.told("save_failed")[0]["error"]
    assert_saved(small_disk / "run", {1: 1.0})
    subprocess.run(["mount", "-o", f"remount,rw,size={20 * 4 * WIDTH}", str(small_disk)], check=True)
    saving.save(3.0, step=3)
    saving.close()
    assert_saved(small_disk / "run", {1: 1.0, 3: 3.0})


def test_a_process_killed_at_any_moment_of_a_save_leaves_no_half_checkpoint_and_no_writer(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        run_dir, pids = tmp_path / str(attempt), context.SimpleQueue()
        process = context.Process(target=save_forever, args=(run_dir, pids))
        process.start()
        writer = pids.get()
        wait_until(lambda run_dir=run_dir: store.committed(run_dir))
        time.sleep(0.003 * attempt)
        process.kill()
        process.join()
        wait_until(lambda writer=writer: not is_alive(writer))
        assert_saved(run_dir, {step: step for step in saved(run_dir)})


def save_forever(run_dir: Path, pids: Any) -> None:
    saving = Saving(run_dir)
    for step in range(10_000):
        saving.save(step, step, wait=False)
        if step == 0:
            pids.put(saving.saver.writer_pid)


def test_a_writer_ends_with_its_parent_even_if_another_process_keeps_the_pipe_open(tmp_path):
    context = multiprocessing.get_context("fork")
    pids = context.SimpleQueue()
    process = context.Process(target=save_and_fork, args=(tmp_path, pids))
    process.start()
    writer, child = pids.get(), pids.get()
    process.kill()
    process.join()
    wait_until(lambda: not is_alive(writer), 10)
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)


def save_and_fork(run_dir: Path, pids: Any) -> None:
    saving = Saving(run_dir)
    saving.save(1.0, step=1)
    pids.put(saving.saver.writer_pid)
    child = os.fork()
    if child:
        pids.put(child)
    time.sleep(60)


def test_what_is_of_a_generation_before_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(fence.GENERATION_VARIABLE, "4")
    saving = Saving(tmp_path)
    saving.save(1.0, step=1)
    assert store.committed(tmp_path)[0].manifest.generation == 4
    fence.begin_generation(tmp_path, 5)
    saving.save(2.0, step=2)
    assert "generation 5" in saving.told("save_failed")[0]["error"]
    saving.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_what_is_committed_is_verified_and_older_ones_are_deleted_after_that(tmp_path):
    saving = Saving(tmp_path, upkeep=Upkeep(keep_last=1))
    for step in (1, 2, 3, 4):
        saving.save(step, step)
    saving.close()
    assert [told["step"] for told in saving.told("verified")] == [1, 2, 3, 4]
    assert [told["step"] for told in saving.told("prune")] == [1, 2]
    order = [(news, facts["step"]) for news, facts in saving.news]
    assert order.index(("verified", 3)) < order.index(("prune", 1))
    assert_saved(tmp_path, {3: 3.0, 4: 4.0})


def test_one_that_is_kept_for_good_is_copied_later_if_its_own_copy_failed(tmp_path):
    run_dir, there, other = tmp_path / "mine", tmp_path / "there", tmp_path / "other/mine"
    for folder in (run_dir, other):
        folder.mkdir(parents=True)
    assert Remote(str(there), other).steps() == []  # the place is another run's
    failing = Saving(run_dir, upkeep=Upkeep(2, 2, str(there)))
    for step in (1, 2, 3):
        failing.save(step, step)
    failing.close()
    (there / "mine" / OWNER).unlink()
    saving = Saving(run_dir, upkeep=Upkeep(2, 2, str(there)))
    saving.save(5.0, step=5)
    saving.close()
    assert failing.told("drain_failed") and [told["step"] for told in saving.told("drained")] == [5, 2]
    assert Remote(str(there), run_dir).steps() == [2, 5]


def test_one_that_is_found_damaged_when_it_is_read_back_is_set_aside(tmp_path):
    first = Saving(tmp_path)
    first.save(1.0, step=1)
    first.close()
    folder = store.step_folder(tmp_path, 1)
    (folder / store.VERIFIED).unlink()
    data = bytearray((folder / shard_name(0)).read_bytes())
    data[-1] ^= 1
    (folder / shard_name(0)).write_bytes(data)
    second = Saving(tmp_path)
    second.save(2.0, step=2)
    second.close()
    assert "rank-00000.safetensors does not match" in second.told("damaged_checkpoint")[0]["problem"]
    assert_saved(tmp_path, {2: 2.0})


def test_processes_share_the_work_of_one_checkpoint(workers, tmp_path):
    first, *others = workers.run(3, save_together, tmp_path, None)
    assert [kind for kind, _ in first if kind == "save"] == ["save"] * 2
    assert not any(others)
    assert_saved(tmp_path, {1: 1.0, 2: 2.0})
    sizes = [file.bytes for file in store.committed(tmp_path)[0].manifest.files.values()]
    assert len(sizes) == 3 and max(sizes) - min(sizes) < 1.1 * 4 * WIDTH


@pytest.mark.parametrize("failing", [0, 1])
def test_if_the_disk_of_one_process_fails_there_is_no_checkpoint_and_the_next_save_works(workers, tmp_path, failing):
    first, _ = workers.run(2, save_together, tmp_path, failing)
    (error,) = [facts["error"] for kind, facts in first if kind == "save_failed"]
    assert error.startswith(("rank 1: " if failing else "") + "[Errno 28] No space left on device")
    assert_saved(tmp_path, {2: 2.0})


def save_together(world: World, run_dir: Path, failing: int | None) -> list[tuple[str, dict[str, Any]]]:
    """Two saves, during the first of which the disk of rank `failing` fails; what was told."""
    saving = Saving(run_dir, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARGOSY_FAULTS", f"enospc@save:step=1,rank={failing}" if failing is not None else "")
        saving.save(1.0, step=1)
        dist.barrier()
        saving.save(2.0, step=2)
        saving.close()
    return saving.news


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_death_of_another_ranks_writer_is_reported_by_the_first(workers, tmp_path, number):
    first, second = workers.run(2, save_while_a_writer_dies, tmp_path, number)
    assert "rank 1: the writer process" in first[0] and second == ["writer_died"]
    assert_saved(tmp_path, {1: 1.0, 3: 3.0})


def save_while_a_writer_dies(world: World, run_dir: Path, number: int) -> list[str]:
    saving = Saving(run_dir, world)
    saving.save(1.0, step=1)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(save_module, "HUNG_S", 0.5)
            os.kill(saving.saver.writer_pid, signal.SIGSTOP)
        saving.save(2.0, step=2, wait=False)
        if world.rank == 1:
            os.kill(saving.saver.writer_pid, number)
        saving.saver.wait()
    dist.barrier()
    saving.save(3.0, step=3)
    saving.close()
    return [facts["error"] for facts in saving.told("save_failed")] or [kind for kind, _ in saving.news]


def test_a_save_does_not_meet_the_collectives_of_training(workers, tmp_path):
    assert workers.run(2, save_and_reduce, tmp_path) == [True, True]
    assert list(saved(tmp_path)) == [1, 2, 3]


def save_and_reduce(world: World, run_dir: Path) -> bool:
    saving = Saving(run_dir, world)
    sums = []
    for step in (1, 2, 3):
        saving.save(step, step, wait=False)
        for i in range(50):
            sums.append(world.sum(torch.tensor(float(i + world.rank))).item() == 2 * i + 1)
    saving.close()
    dist.barrier()
    return all(sums)
