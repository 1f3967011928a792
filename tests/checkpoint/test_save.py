"""Saving: what is committed is the state at the moment of the call, whole, or there is no new checkpoint."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from argosy.checkpoint import store
from argosy.checkpoint.load import load_into
from argosy.checkpoint.save import Saver, SaveResult
from argosy.checkpoint.store import CheckpointManifest
from argosy.parallel.world import World

ALONE = World()
WIDTH = 20_000


def state(value: float, rank: int = 0) -> dict[str, Any]:
    """Some matrices that all ranks share, and something of each rank's own."""
    shared = {f"layer{i}": torch.full((WIDTH,), float(value + i)) for i in range(4)}
    return {"model": shared, "rng": {f"rank{rank}": torch.full((8,), rank, dtype=torch.uint8)}}


def manifest(step: int) -> CheckpointManifest:
    facts = {"tokens": 0, "saved_at_s": 0.0, "plan": "", "data_identity": "", "has_optimizer": True, "files": {}}
    return CheckpointManifest(step=step, **facts)


def saved(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Step -> the state in its checkpoint, of all that are committed; each must be whole."""
    found = {}
    for checkpoint in store.committed(run_dir):
        checkpoint.verify()
        found[checkpoint.step] = state(-1.0)
        load_into(found[checkpoint.step], checkpoint, ALONE)
    return found


@contextmanager
def a_disk_that_fails_past(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def results() -> list[SaveResult]:
    return []


@pytest.fixture
def saver(tmp_path, results) -> Saver:
    return Saver(tmp_path, ALONE, results.append)


def test_a_save_in_the_foreground_is_committed_when_it_returns(tmp_path, saver, results):
    saver.save(state(1.0), manifest(4), background=False)
    torch.testing.assert_close(saved(tmp_path), {4: state(1.0)})
    assert [(result.step, result.error) for result in results] == [(4, None)]
    assert results[0].bytes == store.committed(tmp_path)[0].bytes > 4 * 4 * WIDTH


def test_a_save_in_the_background_is_the_state_at_the_call_whatever_training_does_to_it_then(tmp_path, saver):
    live = state(1.0)
    saver.save(live, manifest(4), background=True)
    for tensor in live["model"].values():
        tensor.zero_()
    saver.wait()
    torch.testing.assert_close(saved(tmp_path), {4: state(1.0)})


def test_a_save_waits_for_the_one_before_it(tmp_path, saver, results):
    for step in (1, 2, 3):
        saver.save(state(step), manifest(step), background=True)
    saver.wait()
    torch.testing.assert_close(saved(tmp_path), {step: state(step) for step in (1, 2, 3)})
    assert [result.step for result in results] == [1, 2, 3]


def test_a_save_that_has_ended_is_reported_by_a_look(saver, results):
    saver.poll()
    assert results == []
    saver.save(state(1.0), manifest(4), background=True)
    deadline = time.monotonic() + 20
    while not results and time.monotonic() < deadline:
        saver.poll()
    assert [result.step for result in results] == [4]


def test_a_step_that_is_committed_stays_as_it_is(tmp_path, saver, results):
    for value in (1.0, 2.0):
        saver.save(state(value), manifest(4), background=False)
    torch.testing.assert_close(saved(tmp_path), {4: state(1.0)})
    assert len(results) == 1


def test_what_a_process_that_died_left_in_the_folder_is_swept_away(tmp_path, saver):
    folder = store.step_folder(tmp_path, 4)
    folder.mkdir(parents=True)
    (folder / "__7_0.distcp").write_bytes(b"half of somethi")
    saver.save(state(1.0), manifest(4), background=False)
    assert {path.name for path in folder.iterdir()} == {"__0_0.distcp", ".metadata", store.MANIFEST}


def test_a_disk_that_fails_leaves_the_checkpoint_before_as_the_newest_and_the_next_save_works(tmp_path, saver, results):
    saver.save(state(1.0), manifest(1), background=False)
    with a_disk_that_fails_past(WIDTH):
        saver.save(state(2.0), manifest(2), background=False)
    assert results[1].error == "[Errno 27] File too large"
    assert not store.step_folder(tmp_path, 2).exists()
    assert store.newest_whole(tmp_path).checkpoint.step == 1
    saver.save(state(3.0), manifest(3), background=False)
    torch.testing.assert_close(saved(tmp_path), {1: state(1.0), 3: state(3.0)})


@pytest.mark.parametrize("in_the_way", ["checkpoints", "checkpoints/step-00000002"])
def test_a_file_in_place_of_a_folder_is_an_error_and_no_end(tmp_path, saver, results, in_the_way):
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("not a folder")
    saver.save(state(2.0), manifest(2), background=False)
    assert in_the_way in results[0].error
    assert (tmp_path / in_the_way).read_text() == "not a folder"


def test_a_process_killed_at_any_moment_of_a_save_leaves_no_half_checkpoint(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(8):
        run_dir = tmp_path / str(attempt)
        saving = context.Process(target=save_forever, args=(run_dir,))
        saving.start()
        while not store.committed(run_dir):
            assert saving.is_alive()
        time.sleep(0.0015 * attempt)
        saving.kill()
        saving.join()
        found = saved(run_dir)
        torch.testing.assert_close(found, {step: state(step) for step in found})


def save_forever(run_dir: Path) -> None:
    saver = Saver(run_dir, ALONE, lambda result: None)
    for step in range(10_000):
        saver.save(state(step), manifest(step), background=True)


def test_two_processes_share_the_work_of_one_checkpoint(workers, tmp_path):
    first, second = workers.run(2, save_together, tmp_path, None)
    assert first == second and first[0].error is None
    torch.testing.assert_close(saved(tmp_path), {1: state(1.0), 2: state(2.0)})
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == store.committed(tmp_path)[0].manifest.files.keys()


@pytest.mark.parametrize("failing", [0, 1])
def test_if_the_disk_of_one_process_fails_all_are_told_the_same_and_go_on(workers, tmp_path, failing):
    first, second = workers.run(2, save_together, tmp_path, failing)
    assert first == second
    assert first[0].error == "[Errno 27] File too large"
    assert first[1].error is None
    torch.testing.assert_close(saved(tmp_path), {2: state(2.0)})


def save_together(world: World, run_dir: Path, failing: int | None) -> list[SaveResult]:
    """Two saves, during the first of which the disk of rank `failing` fails; without their times."""
    results: list[SaveResult] = []
    saver = Saver(run_dir, world, results.append)
    with a_disk_that_fails_past(WIDTH if world.rank == failing else resource.RLIM_INFINITY):
        saver.save(state(1.0, world.rank), manifest(1), background=False)
    saver.save(state(2.0, world.rank), manifest(2), background=False)
    return [replace(result, seconds=0.0) for result in results]


def test_if_the_marker_cannot_be_written_all_are_told_and_there_is_no_checkpoint(workers, tmp_path):
    assert workers.run(2, save_without_a_marker, tmp_path) == ["[Errno 5] no marker"] * 2
    assert not store.step_folder(tmp_path, 1).exists()


def save_without_a_marker(world: World, run_dir: Path) -> str | None:
    """A save whose last write the disk refuses; its error."""
    results: list[SaveResult] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refuse_the_marker)
        Saver(run_dir, world, results.append).save(state(1.0, world.rank), manifest(1), background=False)
    return results[0].error


def refuse_the_marker(file: int) -> None:
    if store.MANIFEST in Path(f"/proc/self/fd/{file}").readlink().name:
        raise OSError(errno.EIO, "no marker")


def test_a_save_does_not_meet_the_collectives_of_training(workers, tmp_path):
    assert workers.run(2, save_and_reduce, tmp_path) == [True, True]
    assert list(saved(tmp_path)) == [1, 2, 3]


def save_and_reduce(world: World, run_dir: Path) -> bool:
    saver = Saver(run_dir, world, lambda result: None)
    sums = []
    for step in (1, 2, 3):
        saver.save(state(step, world.rank), manifest(step), background=True)
        for i in range(50):
            sums.append(world.sum(torch.tensor(float(i + world.rank))).item() == 2 * i + 1)
    saver.wait()
    dist.barrier()
    return all(sums)
