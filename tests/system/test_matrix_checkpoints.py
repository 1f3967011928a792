"""The matrix of faults: checkpoints of a real run that are damaged, and disks that do not take them."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import PLANS, Disturbed

FLIPS = 200


@pytest.fixture(scope="module")
def paused(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """A run that was stopped after step 10, with the checkpoints of steps 5 and 10."""
    folder = Folder(tmp_path_factory.mktemp("paused"), corpus)
    run = Disturbed(folder, options=("--train.pause_at", "10")).start().end()
    assert [(c.step, c.is_verified) for c in store.committed(run.run_dir)] == [(5, True), (10, True)]
    return run


@pytest.fixture
def resumed(paused: Disturbed, folder: Folder) -> Disturbed:
    """The same, of which anything may be damaged, to be started again."""
    shutil.copytree(paused.folder.path, folder.path, dirs_exist_ok=True)
    return Disturbed(folder)


def newest(run: Disturbed) -> Path:
    return store.step_folder(run.run_dir, 10)


def flip_a_bit(run: Disturbed, seed: int) -> tuple[Path, bytes]:
    """Flip a random bit of a random byte of the newest checkpoint; returns the file, and what it was."""
    chance = random.Random(seed)
    files = sorted(newest(run).iterdir())
    path = chance.choices(files, [file.stat().st_size for file in files])[0] if seed % 4 else chance.choice(files)
    before = path.read_bytes()
    data = bytearray(before)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path, before


def cut_off(run: Disturbed) -> str:
    path = newest(run) / "rank-00001.safetensors"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1)
    return path.name


def remove(run: Disturbed) -> str:
    path = newest(run) / "rank-00000.safetensors"
    path.unlink()
    return path.name


def zero(run: Disturbed) -> str:
    path = newest(run) / "rank-00001.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    return path.name


def put_in_a_stale_file(run: Disturbed) -> str:
    older = store.step_folder(run.run_dir, 5) / "rank-00000.safetensors"
    shutil.copy(older, newest(run))
    return older.name


def put_in_a_stale_manifest(run: Disturbed) -> str:
    shutil.copy(store.step_folder(run.run_dir, 5) / store.MANIFEST, newest(run))
    return store.MANIFEST


def flip(run: Disturbed) -> str:
    return flip_a_bit(run, seed=1)[0].name


@pytest.mark.slow
def test_of_200_flipped_bits_each_is_found_and_its_file_named(resumed: Disturbed) -> None:
    for seed in range(FLIPS):
        path, before = flip_a_bit(resumed, seed)
        choice = store.newest_whole(resumed.run_dir)
        assert choice is not None and choice.checkpoint.step == 5, path
        assert len(choice.damaged) == 1 and path.name in choice.damaged[0], choice.damaged
        path.write_bytes(before)
        choice = store.newest_whole(resumed.run_dir)
        assert choice is not None and choice.checkpoint.step == 10 and not choice.damaged, "no false alarm"


@pytest.mark.slow
@pytest.mark.parametrize("harm", [flip, cut_off, remove, zero, put_in_a_stale_file, put_in_a_stale_manifest])
def test_a_damaged_checkpoint_is_refused_its_file_named_and_the_older_one_used(resumed, undisturbed, harm):
    name = harm(resumed)
    resumed.start().end()
    assert name in resumed.text and "Using step-00000005" in resumed.text
    (found,) = resumed.events("damaged_checkpoint")
    assert name in found["problem"] and resumed.events("resume")[-1]["step"] == 5
    resumed.check(undisturbed(), "damaged_checkpoint")


@pytest.mark.slow
def test_if_all_are_damaged_the_run_does_not_start_from_zero(resumed):
    for seed, step in enumerate((5, 10)):
        path = store.step_folder(resumed.run_dir, step) / f"rank-0000{seed}.safetensors"
        path.write_bytes(path.read_bytes()[::-1])
    before = resumed.losses()
    resumed.start().end(code=74)
    assert "step-00000005" in resumed.text and "step-00000010" in resumed.text
    assert resumed.losses() == before
    resumed.check_nothing_is_left()


# ---- the disk under the checkpoints --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(folder: Folder) -> Iterator[Path]:
    """A file system of its own for the checkpoints, with room for some three of them."""
    disk = folder.path / "runs/tiny/checkpoints"
    disk.mkdir(parents=True)
    if mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", disk):
        pytest.skip("mounting needs the rights of root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def mount(*words: object) -> int:
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode


def wait_for(run: Disturbed, kind: str, step: int = 0) -> None:
    run.wait_until(lambda: [e for e in run.events(kind) if e["step"] >= step])


def is_whole(run: Disturbed, step: int) -> Callable[[], bool]:
    """Asks whether the checkpoint of that step is as it was written."""
    return lambda: store.Checkpoint(store.step_folder(run.run_dir, step)).is_verified


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_of_and_used_again_once_there_is_room(disturbed, undisturbed, small_disk):
    run = disturbed(PLANS["replicas"], "slow@forward:seconds=0.1")
    run.wait_until(is_whole(run, 5))
    filler = small_disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True, check=False)
    wait_for(run, "save_failed")
    assert "No space left on device" in run.events("save_failed")[0]["error"]
    assert is_whole(run, 5)()
    filler.unlink()
    # One whose file was on the disk already may still be read back, but no mark is left of that.
    run.end().check(undisturbed(), "save_failed", *{e["event"] for e in run.events("upkeep_failed")})


@pytest.mark.slow
def test_a_disk_that_may_only_be_read_is_told_of_and_used_again(disturbed, undisturbed, small_disk):
    run = disturbed(PLANS["replicas"], "slow@forward:seconds=0.1")
    run.wait_until(is_whole(run, 5))
    mount("-o", "remount,ro", small_disk)
    wait_for(run, "save_failed")
    assert "Read-only file system" in run.events("save_failed")[0]["error"]
    assert is_whole(run, 5)()
    mount("-o", "remount,rw", small_disk)
    run.end().check(undisturbed(), "save_failed")


@pytest.mark.slow
def test_a_slow_disk_does_not_hold_up_training(disturbed, undisturbed):
    faults = "sleep@save:fraction=0.5,step=5,rank=0,seconds=3; slow@forward:seconds=0.1"
    run = disturbed(PLANS["replicas"], faults).end()
    (slow,) = run.struck("sleep@")
    saved = next(e for e in run.events("save") if e["step"] == 5)
    assert saved["time_s"] - slow["time_s"] >= 3
    made = [r for r in run.records() if r["step"] in range(5, 10)]
    during = [r for r in made[:-1] if r["seconds"].get("checkpoint", 0.0) < 3]
    assert len(during) == len(made) - 1, "steps went on while it was written"
    run.check(undisturbed())


@pytest.mark.slow
def test_the_disk_of_the_whole_run_may_be_read_only_for_a_while(folder, undisturbed):
    """Then not even the event log can be written: it is told on the terminal."""
    disk = folder.path / "runs"
    disk.mkdir()
    if mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", disk):
        pytest.skip("mounting needs the rights of root")
    try:
        run = Disturbed(folder, PLANS["replicas"], "slow@forward:seconds=0.2").start()
        run.wait_until(is_whole(run, 5))
        assert not mount("--bind", disk, disk)  # on top: a mount with logs open for writing cannot become read-only
        assert not mount("-o", "remount,bind,ro", disk)
        time.sleep(5)
        subprocess.run(["umount", "-l", disk], check=True)
        run.end()
        assert "a trial write failed: Read-only file system" in run.text
        run.check_state_is_sound()
        assert run.weights() == undisturbed().weights()
        run.check_nothing_is_left()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
