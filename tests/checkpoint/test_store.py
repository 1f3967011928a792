"""Checkpoints on disk: which exist, whether they are whole, which are kept."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from argosy.checkpoint import fence, store
from argosy.checkpoint.checksums import DamagedCheckpoint, file_sum, signed
from argosy.checkpoint.fence import Fenced
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.store import MANIFEST, VERIFIED, Checkpoint
from argosy.errors import StorageError, UserError
from argosy.files import PARTIAL
from checkpoint.saving import flip_a_bit, manifest

FILES = {"rank-00000.safetensors": bytes(range(100)), "rank-00001.safetensors": b"names and shapes"}
ALL = [*FILES, MANIFEST, VERIFIED]


def write(run_dir: Path, step: int, verified: bool = False, **facts: object) -> Path:
    """A checkpoint as a save leaves it."""
    folder = fence.partial_folder(run_dir, step, generation=0)
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data[: 50 + step % 50])
    files = {name: file_sum(folder / name) for name in FILES}
    found = store.commit(folder, manifest(step, tokens=step * 1024, saved_at_s=1_700_000_000.25, files=files, **facts))
    if verified:
        found.mark_verified()
    return found.folder


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed(run_dir)]


def test_what_was_committed_is_there_and_whole(tmp_path):
    write(tmp_path, 300)
    write(tmp_path, 20)
    assert steps(tmp_path) == [20, 300]
    for checkpoint in store.committed(tmp_path):
        checkpoint.verify()
        assert checkpoint.manifest.tokens == checkpoint.step * 1024
        assert checkpoint.bytes == sum(path.stat().st_size for path in checkpoint.folder.glob("rank-*"))


def test_the_saved_step_is_that_of_the_newest_committed_checkpoint(tmp_path):
    assert store.saved_step(tmp_path) == 0
    write(tmp_path, 3)
    write(tmp_path, 7)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    assert store.saved_step(tmp_path) == 7


def test_of_the_folder_of_a_run_of_sites_theirs_are_named(tmp_path):
    write(tmp_path / "sites/oslo", 4)
    with pytest.raises(UserError, match=r"that of a site of this run \(.*/sites/oslo\)"):
        store.find(tmp_path, Checkpoint.problem)


@pytest.mark.parametrize("marker", [None, f"{MANIFEST}{PARTIAL}"])
def test_a_folder_without_its_manifest_does_not_exist(tmp_path, marker):
    folder = write(tmp_path, 4)
    (folder / MANIFEST).rename(folder / marker) if marker else (folder / MANIFEST).unlink()
    assert store.committed(tmp_path) == []
    assert store.newest_whole(tmp_path) is None
    for named in (tmp_path, folder):
        with pytest.raises(UserError, match="no committed checkpoint there"):
            store.find(named, Checkpoint.problem)


@pytest.mark.parametrize(
    "name", ["step-1", "step-00000003.old", "old-step-00000003", "step-00000003.generation-0001.partial"]
)
def test_other_folders_are_no_checkpoints(tmp_path, name):
    write(tmp_path, 3).rename(tmp_path / "checkpoints" / name)
    assert store.committed(tmp_path) == []


@pytest.mark.parametrize("name", ALL)
def test_one_flipped_bit_is_found_wherever_it_is(tmp_path, name):
    path = write(tmp_path, 4, verified=True) / name
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 11):
        flip_a_bit(path, bit)
        with pytest.raises(DamagedCheckpoint, match=name):
            Checkpoint(path.parent).verify()
        path.write_bytes(whole)
    Checkpoint(path.parent).verify()


@pytest.mark.parametrize("flips", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_bits_that_flip_anywhere_are_found_named_and_the_older_one_is_used(tmp_path, flips):
    older, newer = write(tmp_path, 4, verified=True), write(tmp_path, 6, verified=True)
    assert store.newest_whole(tmp_path).checkpoint.folder == newer
    choose = random.Random(6)
    for _ in range(flips):
        name = choose.choice(ALL)
        whole = (newer / name).read_bytes()
        flip_a_bit(newer / name, choose.randrange(8 * len(whole)))
        choice = store.newest_whole(tmp_path)
        assert choice.checkpoint.folder == older
        assert name in choice.damaged[0] and "step-00000006" in choice.damaged[0]
        (newer / name).write_bytes(whole)
        assert store.newest_whole(tmp_path).damaged == ()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("harm", ["emptied", "cut to a byte", "cut by a byte", "longer by a byte", "zeroed", "stale"])
def test_a_file_that_is_not_what_was_written_is_found_and_named(tmp_path, name, harm):
    other, path = write(tmp_path, 2, verified=True) / name, write(tmp_path, 4, verified=True) / name
    whole = path.read_bytes()
    path.write_bytes(
        {
            "emptied": b"",
            "cut to a byte": whole[:1],
            "cut by a byte": whole[:-1],
            "longer by a byte": whole + b"\0",
            "zeroed": bytes(len(whole)),
            "stale": other.read_bytes(),
        }[harm]
    )
    if path.read_bytes() == whole:
        pytest.skip("this file is the same in both")
    with pytest.raises(DamagedCheckpoint, match=name):
        Checkpoint(path.parent).verify()
    choice = store.newest_whole(tmp_path)
    assert choice.checkpoint.step == 2 and name in choice.damaged[0]


def test_a_missing_file_is_named(tmp_path):
    folder = write(tmp_path, 4)
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"step-00000004: file rank-00000\.safetensors is missing"):
        Checkpoint(folder).verify()


def test_a_verified_marker_may_be_missing_but_not_be_that_of_another(tmp_path):
    older, newer = write(tmp_path, 4, verified=True), write(tmp_path, 6)
    Checkpoint(newer).verify()
    assert not Checkpoint(newer).is_verified
    shutil.copyfile(older / VERIFIED, newer / VERIFIED)
    assert not Checkpoint(newer).is_verified
    with pytest.raises(DamagedCheckpoint, match=r"verified\.json is that of another checkpoint"):
        Checkpoint(newer).verify()


def test_a_checkpoint_of_the_format_before_is_refused_and_not_taken_for_damaged(tmp_path):
    folder = write(tmp_path, 4)
    record = {"format": 1, "step": 4, "tokens": 0, "files": {}}
    (folder / MANIFEST).write_bytes(signed(record))
    for look in (store.newest_whole, partial(store.find, check=Checkpoint.problem)):
        with pytest.raises(UserError, match=r"manifest\.json: format = 1, and this version reads .* format 2\. Go on"):
            look(tmp_path)


def test_the_newest_whole_one_is_taken_and_each_damaged_one_is_named(tmp_path):
    write(tmp_path, 2)
    (write(tmp_path, 4) / "rank-00001.safetensors").unlink()
    (write(tmp_path, 6) / MANIFEST).write_text("{")
    choice = store.newest_whole(tmp_path)
    assert choice.checkpoint.step == 2
    assert "step-00000006" in choice.damaged[0] and "step-00000004" in choice.damaged[1]
    assert str(choice).endswith("Using step-00000002, verified just now.")


def test_one_of_at_most_a_given_step_can_be_asked_for(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, step)
    assert [store.newest_whole(tmp_path, at_most=step).checkpoint.step for step in (2, 3, 5, 9)] == [2, 2, 4, 6]
    assert store.newest_whole(tmp_path, at_most=1) is None


def test_if_all_are_damaged_the_run_does_not_silently_start_again(tmp_path):
    for step in (2, 4):
        (write(tmp_path, step) / "rank-00000.safetensors").unlink()
    with pytest.raises(StorageError, match=r"(?s)step-00000004.*step-00000002.*another --run-dir"):
        store.newest_whole(tmp_path)
    for checkpoint in store.committed(tmp_path):
        store.withdraw(checkpoint)
    with pytest.raises(StorageError, match=r"(?s)step-00000002\.withdrawn: was withdrawn before"):
        store.newest_whole(tmp_path)


def test_a_user_names_a_run_or_one_of_its_checkpoints(tmp_path):
    older, newer = write(tmp_path, 2), write(tmp_path, 4)
    assert store.find(tmp_path, Checkpoint.problem).folder == newer
    assert store.find(older, Checkpoint.problem).folder == older


@pytest.mark.parametrize("kind", ["pipe", "endless", "longer"])
def test_no_more_is_read_than_the_manifest_says(tmp_path, kind):
    path = write(tmp_path, 4) / "rank-00001.safetensors"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**42)  # a hole that would take hours
    with pytest.raises(UserError, match=r"rank-00001\.safetensors (cannot be read \(.*regular|has \d+ bytes, its man)"):
        store.find(path.parent, Checkpoint.problem)


def test_a_damaged_checkpoint_is_refused_even_by_name(tmp_path):
    folder = write(tmp_path, 4)
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"rank-00001\.safetensors is missing\. Name the run's folder instead"):
        store.find(folder, Checkpoint.problem)


def test_a_checkpoint_that_is_withdrawn_keeps_its_files_and_leaves_its_place(tmp_path):
    write(tmp_path, 2)
    for _ in range(2):
        folder = write(tmp_path, 4)
        store.withdraw(Checkpoint(folder))
        assert steps(tmp_path) == [2]
        aside = folder.with_name(folder.name + ".withdrawn")
        assert {path.name for path in aside.iterdir()} == {*FILES, MANIFEST}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [7]), (3, 0, [5, 6, 7]), (1, 3, [3, 6, 7]), (2, 1, [1, 2, 3, 4, 5, 6, 7]), (9, 0, [1, 2, 3, 4, 5, 6, 7])],
)
def test_pruning_keeps_the_newest_and_the_round_steps(tmp_path, keep_last, keep_every, kept):
    for step in range(1, 8):
        write(tmp_path, step)
    dropped = store.prune(tmp_path, keep_last, keep_every)
    assert steps(tmp_path) == kept
    assert [checkpoint.step for checkpoint in dropped] == [step for step in range(1, 8) if step not in kept]
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(kept)


@pytest.mark.parametrize(
    ("verified", "kept"),
    [((), [6, 7]), ((1,), [1, 6, 7]), ((1, 2, 3), [2, 3, 6, 7]), ((3, 6), [3, 6, 7]), (range(1, 8), [6, 7])],
)
def test_pruning_keeps_the_two_newest_verified_ones_whatever_is_newer(tmp_path, verified, kept):
    for step in range(1, 8):
        write(tmp_path, step, verified=step in verified)
    store.prune(tmp_path, keep_last=2, keep_every=0)
    assert steps(tmp_path) == kept


def test_pruning_can_spare_what_was_not_read_back_yet(tmp_path):
    for step in range(1, 8):
        write(tmp_path, step, verified=step in (1, 2, 3, 6))
    store.prune(tmp_path, keep_last=1, keep_every=0, keep_unread=True)
    assert steps(tmp_path) == [3, 4, 5, 6, 7]


def test_a_checkpoint_that_is_removed_is_gone_at_once_and_what_a_kill_leaves_is_swept_away(tmp_path, monkeypatch):
    folder = write(tmp_path, 4)
    with monkeypatch.context() as killed:
        met = []
        killed.setattr(shutil, "rmtree", lambda *_, **__: met.append(steps(tmp_path)))
        store.remove(folder)
        assert met[-1] == []
    store.sweep(tmp_path, generation=0)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_commit_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink().name))
    partial, folder = fence.partial_folder(tmp_path, 4, 0), write(tmp_path, 4)
    assert synced == [f"{MANIFEST}{PARTIAL}", partial.name, folder.parent.name]


def test_a_commit_takes_what_the_manifest_lists_and_nothing_else(tmp_path):
    partial = fence.partial_folder(tmp_path, 4, 0)
    partial.mkdir(parents=True)
    for name in ("rank-00000.json", "rank-00007.safetensors", "rank-00000.safetensors"):
        (partial / name).write_bytes(b"data")
    files = {"rank-00000.safetensors": file_sum(partial / "rank-00000.safetensors")}
    folder = store.commit(partial, manifest(4, files=files)).folder
    assert {path.name for path in folder.iterdir()} == {"rank-00000.safetensors", MANIFEST}


def test_a_step_that_is_committed_stays_as_it_is(tmp_path):
    folder = write(tmp_path, 4, plan="first")
    write(tmp_path, 4, plan="second")
    assert Checkpoint(folder).manifest.plan == "first"
    assert not list((tmp_path / "checkpoints").glob(f"*{PARTIAL}"))


@pytest.mark.parametrize(
    ("generation", "now", "refused"), [(0, 1, True), (1, 2, True), (2, 2, False), (3, 2, False), (2, None, True)]
)
def test_a_checkpoint_of_an_older_generation_is_not_committed(tmp_path, generation, now, refused):
    if now is None:
        (tmp_path / fence.CLAIMS).write_text("no folder")
    else:
        fence.begin_generation(tmp_path, now)
    if refused:
        with pytest.raises(Fenced, match="nothing"):
            write(tmp_path, 4, generation=generation)
    else:
        write(tmp_path, 4, generation=generation)
    assert steps(tmp_path) == ([] if refused else [4])


def test_what_dead_writers_left_is_swept_away_but_not_what_a_later_generation_writes(tmp_path):
    write(tmp_path, 3)
    for step, generation in ((4, 0), (4, 2), (5, 1), (6, 3)):
        fence.partial_folder(tmp_path, step, generation).mkdir()
    store.sweep(tmp_path, generation=2, before_step=5)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step-00000003", "step-00000005.generation-0001.partial", "step-00000006.generation-0003.partial"}
    store.sweep(tmp_path, generation=2)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step-00000003", "step-00000006.generation-0003.partial"}


def half_written(run_dir: Path, step: int, generation: int) -> tuple[Path, CheckpointManifest]:
    """A checkpoint that processes of `generation` have written, and not committed."""
    partial = fence.partial_folder(run_dir, step, generation)
    partial.mkdir(parents=True)
    (partial / "rank-00000.safetensors").write_bytes(bytes([generation]))
    files = {"rank-00000.safetensors": file_sum(partial / "rank-00000.safetensors")}
    return partial, manifest(step, generation=generation, files=files)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_process_that_slept_while_a_generation_began_commits_nothing(tmp_path, monkeypatch, is_there):
    old, new = half_written(tmp_path, 4, generation=1), half_written(tmp_path, 4, generation=2)

    def asleep(run_dir: Path, generation: int) -> None:
        monkeypatch.undo()
        fence.begin_generation(tmp_path, 2)
        if is_there:
            store.commit(*new)

    monkeypatch.setattr(store, "check_generation", asleep)
    if is_there:
        assert store.commit(*old).manifest.generation == 2
    else:
        with pytest.raises(FileNotFoundError):
            store.commit(*old)
        assert steps(tmp_path) == []
        store.commit(*new)
    store.committed(tmp_path)[0].verify()
    store.sweep(tmp_path, generation=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_one_that_is_committed_while_its_place_is_cleared_stays(tmp_path, monkeypatch):
    old, new = half_written(tmp_path, 4, generation=1), half_written(tmp_path, 4, generation=2)
    store.commit(*new)
    looks = iter([False])  # it was not there yet
    monkeypatch.setattr(Checkpoint, "is_there", property(lambda self: next(looks, True)))
    with pytest.raises(OSError, match="not empty"):
        store.commit(*old)
    monkeypatch.undo()
    assert store.committed(tmp_path)[0].manifest.generation == 2
    store.committed(tmp_path)[0].verify()
