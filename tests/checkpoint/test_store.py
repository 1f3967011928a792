"""Checkpoints on disk: which exist, whether they are whole, which are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from argosy.checkpoint import store
from argosy.checkpoint.store import MANIFEST, CheckpointManifest, Damaged
from argosy.errors import RunFailed, UserError
from argosy.files import PARTIAL

FILES = {"__0_0.distcp": bytes(range(100)), ".metadata": b"names and shapes"}


def write(run_dir: Path, step: int) -> Path:
    """The files of a checkpoint and its manifest, as a save leaves them."""
    folder = store.step_folder(run_dir, step)
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    manifest = CheckpointManifest(
        step=step,
        tokens=step * 1024,
        saved_at_s=1_700_000_000.25,
        plan="dp_replicate=2",
        data_identity="0123456789abcdef",
        has_optimizer=True,
        files={name: store.file_sum(folder / name) for name in FILES},
    )
    store.commit(folder, manifest)
    return folder


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed(run_dir)]


def test_what_was_committed_is_there_and_whole(tmp_path):
    write(tmp_path, 300)
    write(tmp_path, 20)
    assert steps(tmp_path) == [20, 300]
    for checkpoint in store.committed(tmp_path):
        checkpoint.verify()
        assert checkpoint.manifest.tokens == checkpoint.step * 1024
        assert checkpoint.bytes == sum(map(len, FILES.values()))


@pytest.mark.parametrize("marker", [None, f"{MANIFEST}{PARTIAL}"])
def test_a_folder_without_its_marker_does_not_exist(tmp_path, marker):
    folder = write(tmp_path, 4)
    (folder / MANIFEST).rename(folder / marker) if marker else (folder / MANIFEST).unlink()
    assert store.committed(tmp_path) == []
    assert store.newest_whole(tmp_path) is None
    for named in (tmp_path, folder):
        with pytest.raises(UserError, match="no committed checkpoint there"):
            store.find(named)


@pytest.mark.parametrize("name", ["step-1", "step-00000003.old", "old-step-00000003", "step-abcdefgh"])
def test_other_folders_are_no_checkpoints(tmp_path, name):
    write(tmp_path, 3).rename(tmp_path / "checkpoints" / name)
    assert store.committed(tmp_path) == []


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_one_flipped_bit_is_found_wherever_it_is(tmp_path, name):
    path = write(tmp_path, 4) / name
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(_flipped(whole, bit))
        with pytest.raises(Damaged):
            store.Checkpoint(path.parent).verify()


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("left", [0, 1, -1], ids=["emptied", "cut to a byte", "cut by a byte"])
def test_a_file_that_lost_its_end_is_found(tmp_path, name, left):
    path = write(tmp_path, 4) / name
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(Damaged, match=name):
        store.Checkpoint(path.parent).verify()


def test_a_missing_file_is_named(tmp_path):
    folder = write(tmp_path, 4)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(Damaged, match=r"step-00000004: file __0_0\.distcp is missing"):
        store.Checkpoint(folder).verify()


def test_the_manifest_of_another_step_is_found(tmp_path):
    older, newer = write(tmp_path, 4), write(tmp_path, 6)
    shutil.copyfile(older / MANIFEST, newer / MANIFEST)
    with pytest.raises(Damaged, match="the manifest is that of step 4"):
        store.Checkpoint(newer).verify()


def test_the_newest_whole_one_is_taken_and_each_damaged_one_is_told(tmp_path):
    write(tmp_path, 2)
    (write(tmp_path, 4) / ".metadata").unlink()
    (write(tmp_path, 6) / MANIFEST).write_text("{")
    choice = store.newest_whole(tmp_path)
    assert choice.checkpoint.step == 2
    assert "step-00000006" in choice.damaged[0] and "step-00000004" in choice.damaged[1]
    assert str(choice).endswith("Using step-00000002, verified just now.")


def test_if_all_are_damaged_the_run_does_not_silently_start_again(tmp_path):
    for step in (2, 4):
        (write(tmp_path, step) / ".metadata").unlink()
    with pytest.raises(RunFailed, match=r"(?s)step-00000004.*step-00000002.*another --run-dir"):
        store.newest_whole(tmp_path)


def test_a_user_names_a_run_or_one_of_its_checkpoints(tmp_path):
    older, newer = write(tmp_path, 2), write(tmp_path, 4)
    assert store.find(tmp_path).folder == newer
    assert store.find(older).folder == older


def test_a_damaged_checkpoint_is_refused_even_by_name(tmp_path):
    folder = write(tmp_path, 4)
    (folder / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata is missing\. Name the run's folder instead"):
        store.find(folder)


def test_a_damaged_checkpoint_that_is_withdrawn_keeps_its_files(tmp_path):
    write(tmp_path, 2)
    folder = write(tmp_path, 4)
    store.withdraw(store.Checkpoint(folder))
    assert steps(tmp_path) == [2]
    assert {path.name for path in folder.iterdir()} == {*FILES, f"{MANIFEST}.damaged"}


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


def test_removing_a_checkpoint_begins_with_its_marker(tmp_path, monkeypatch):
    folder = write(tmp_path, 4)
    met = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: met.append(steps(tmp_path)))
    store.remove(folder)
    assert met == [[]]


def test_a_commit_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    folder = write(tmp_path, 4)
    assert synced == [folder / f"{MANIFEST}{PARTIAL}", folder, folder.parent]
