"""Copies in another place: they come back whole, or not at all."""

from __future__ import annotations

import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from argosy.checkpoint import fence, store
from argosy.checkpoint.checksums import DamagedCheckpoint, file_sum, signed
from argosy.checkpoint.fence import NAME_FILE, OWNER, Fenced
from argosy.checkpoint.remote import Remote
from argosy.checkpoint.store import Checkpoint
from argosy.errors import UserError
from checkpoint.saving import flip_a_bit, manifest

FILES = {"rank-00000.safetensors": bytes(range(200)), "rank-00001.safetensors": b"more"}


def write(run_dir: Path, step: int, plan: str = "") -> Checkpoint:
    partial = fence.partial_folder(run_dir, step, 0)
    partial.mkdir(parents=True)
    for name, data in FILES.items():
        (partial / name).write_bytes(data)
    files = {name: file_sum(partial / name) for name in FILES}
    return store.commit(partial, manifest(step, plan=plan, files=files))


def anywhere() -> None:
    """The fence that lets all pass."""


@pytest.fixture(params=["memory", "file", "path"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    there = tmp_path / "there"
    return {"memory": f"memory://{uuid.uuid4().hex}", "file": there.as_uri(), "path": str(there)}[request.param]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return folder


def moved(run_dir: Path) -> Path:
    """Return a folder on another disk that belongs to the run of `run_dir`, and holds nothing of it."""
    elsewhere = Path(run_dir.parent, "another disk", run_dir.name)
    elsewhere.mkdir(parents=True)
    shutil.copy(run_dir / NAME_FILE, elsewhere)
    return elsewhere


def test_sites_of_one_name_have_each_their_run_s_place(url: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name / "sites/oslo"
        folder.mkdir(parents=True)
        assert Remote(url, folder).put(write(folder, 4), anywhere)
        assert Remote(url, folder).steps() == [4]


def test_a_copy_comes_back_as_a_verified_checkpoint(url, run_dir):
    given = write(run_dir, 4)
    assert Remote(url, run_dir).put(given, anywhere)
    remote = Remote(url, moved(run_dir))
    assert remote.steps() == [4]
    found = remote.fetch(4, generation=0)
    found.verify()
    assert found.is_verified and found.manifest == given.manifest
    assert [path.name for path in found.folder.parent.iterdir()] == ["step-00000004"]


def test_what_is_there_is_not_copied_again_and_what_differs_is(url, run_dir):
    remote = Remote(url, run_dir)
    assert remote.put(write(run_dir, 4), anywhere)
    assert not remote.put(store.committed(run_dir)[0], anywhere)
    store.remove(store.step_folder(run_dir, 4))
    assert remote.put(write(run_dir, 4, plan="another"), anywhere)


def test_a_copy_whose_manifest_an_older_version_wrote_is_the_same_checkpoint(tmp_path, run_dir):
    given, remote = write(run_dir, 4), Remote(str(tmp_path / "there"), run_dir)
    remote.put(given, anywhere)
    record = given.manifest.to_record()
    record[fence.OLD_NAME] = record.pop("generation")
    (there,) = (tmp_path / "there").rglob(store.MANIFEST)
    there.write_bytes(signed(record))
    assert not remote.put(given, anywhere)
    there.write_bytes(b"{}")
    assert remote.put(given, anywhere), "what is no manifest is replaced"


@pytest.mark.parametrize("name", ["[m]ine", "m::ine", "m*e"])
def test_a_name_that_fsspec_takes_for_more_than_a_name_is_a_name(url, run_dir, name):
    Remote(url, run_dir).put(write(run_dir, 4), anywhere)
    odd = run_dir.with_name(name)
    remote = Remote(f"{url}/a::b" if url.startswith("/") else url, odd)
    for step in (4, 5, 6):
        remote.put(write(odd, step), anywhere)
    remote.prune(keep_last=2, keep_every=0)
    assert remote.steps() == [5, 6] and Remote(url, run_dir).steps() == [4]
    assert len(remote._fs.ls(remote._root)) == 3


def test_runs_do_not_meet(url, run_dir):
    Remote(url, run_dir).put(write(run_dir, 4), anywhere)
    another = run_dir.with_name("another")
    another.mkdir()
    assert Remote(url, another).steps() == []


def test_the_manifest_comes_last_and_only_if_all_was_copied_well(tmp_path, run_dir, monkeypatch):
    remote = Remote(str(tmp_path / "there"), run_dir)
    put_file: Any = LocalFileSystem.put_file

    def damaging(files: LocalFileSystem, source: str, target: str, **how: Any) -> None:
        put_file(files, source, target, **how)
        flip_a_bit(Path(target), 9)

    monkeypatch.setattr(LocalFileSystem, "put_file", damaging)
    with pytest.raises(DamagedCheckpoint, match=r"rank-00000\.safetensors: does not match"):
        remote.put(write(run_dir, 4), anywhere)
    assert remote.steps() == []


def test_a_process_of_an_older_generation_copies_nothing(url, run_dir):
    checkpoint, remote = write(run_dir, 4), Remote(url, run_dir)
    fence.begin_generation(run_dir, 1)
    with pytest.raises(Fenced):
        remote.put(checkpoint, lambda: fence.check_generation(run_dir, 0))
    assert remote.steps() == []


@pytest.mark.parametrize("name", [*FILES, store.MANIFEST])
def test_a_copy_that_is_damaged_is_refused_and_named_and_leaves_nothing(tmp_path, run_dir, name):
    remote = Remote(str(tmp_path / "there"), run_dir)
    remote.put(write(run_dir, 4), anywhere)
    store.remove(store.step_folder(run_dir, 4))
    flip_a_bit(next((tmp_path / "there").rglob(name)), 20)
    with pytest.raises(DamagedCheckpoint, match=name):
        remote.fetch(4, generation=0)
    assert list((run_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("name", [*FILES, store.MANIFEST])
def test_a_copy_that_lacks_a_file_is_damaged(tmp_path, run_dir, name):
    remote = Remote(str(tmp_path / "there"), run_dir)
    remote.put(write(run_dir, 4), anywhere)
    next((tmp_path / "there").rglob(name)).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"step-00000004: a file of it is missing .*{name}"):
        remote.fetch(4, generation=0)


def test_a_copy_takes_the_place_of_a_damaged_checkpoint(url, run_dir):
    remote = Remote(url, run_dir)
    remote.put(write(run_dir, 4), anywhere)
    flip_a_bit(store.step_folder(run_dir, 4) / "rank-00000.safetensors", 3)
    remote.fetch(4, generation=0).verify()
    assert store.newest_whole(run_dir).damaged == ()


def test_as_many_copies_are_kept_as_checkpoints(url, run_dir):
    remote = Remote(url, run_dir)
    for step in range(1, 8):
        remote.put(write(run_dir, step), anywhere)
    remote.prune(keep_last=3, keep_every=0)
    assert remote.steps() == [5, 6, 7]
    remote.prune(keep_last=1, keep_every=5)
    assert remote.steps() == [5, 6, 7]
    remote.prune(keep_last=1, keep_every=0)
    assert remote.steps() == [6, 7]


def test_what_a_kill_left_of_a_copy_goes_once_there_is_a_later_one(tmp_path, run_dir):
    remote, asked = Remote(str(tmp_path / "there"), run_dir), []

    def killed() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt

    for step in (2, 5):
        asked.clear()
        with pytest.raises(KeyboardInterrupt):
            remote.put(write(run_dir, step), killed)
    for step in (3, 4):
        remote.put(write(run_dir, step), anywhere)
    remote.prune(keep_last=2, keep_every=0)
    left = {path.name for path in (tmp_path / "there/mine").glob("step-*")}
    assert left == {"step-00000003", "step-00000004", "step-00000005"}
    assert remote.steps() == [3, 4]


def test_a_place_is_asked_about_each_copy_once_and_about_no_older_one_than_the_newest(tmp_path, run_dir, monkeypatch):
    for step in range(1, 6):
        Remote(str(tmp_path / "there"), run_dir).put(write(run_dir, step), anywhere)
    remote, asked = Remote(str(tmp_path / "there"), run_dir), []
    exists = remote._fs.exists
    monkeypatch.setattr(remote._fs, "exists", lambda path: asked.append(path) or exists(path))
    assert (remote.newest(), remote.newest(5), remote.newest(1)) == (5, 4, None) and len(asked) == 2
    assert remote.steps() == [1, 2, 3, 4, 5] and len(asked) == 5
    remote.prune(keep_last=2, keep_every=0)
    assert remote.steps() == [4, 5] and len(asked) == 5


def test_copies_of_steps_that_the_run_turned_away_from_go(url, run_dir):
    remote = Remote(url, run_dir)
    for step in (1, 2, 3):
        remote.put(write(run_dir, step), anywhere)
    remote.forget_after(1)
    assert remote.steps() == [1]


def test_a_place_that_cannot_be_used_is_said_before_anything_is_trained(run_dir):
    with pytest.raises(UserError, match=r"checkpoint\.remote = nowhere://bucket: .*nowhere.*package"):
        Remote("nowhere://bucket", run_dir)


@pytest.mark.parametrize(
    "name", ["../../../../outside", "/tmp/argosy-outside", "rank-00000.safetensors/../x", "manifest.json", "rank-1"]
)
def test_a_manifest_that_names_other_files_than_a_checkpoint_has_is_refused_and_nothing_is_written(
    tmp_path, run_dir, name
):
    remote = Remote(str(tmp_path / "there"), run_dir)
    given = write(run_dir, 4)
    remote.put(given, anywhere)
    store.remove(given.folder)
    (there,) = (tmp_path / "there").rglob(store.MANIFEST)
    record = given.manifest.to_record()
    (there.parent / "evil").write_bytes(b"evil")
    record["files"] = {**record["files"], name: record["files"]["rank-00000.safetensors"]}
    there.write_bytes(signed(record))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"manifest\.json: files names '.*', which a checkpoint of 3 files does not"):
        remote.fetch(4, generation=0)
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/argosy-outside").exists()


def test_a_copy_that_is_longer_than_its_manifest_says_is_not_fetched(tmp_path, run_dir):
    remote = Remote(str(tmp_path / "there"), run_dir)
    remote.put(write(run_dir, 4), anywhere)
    (file,) = (tmp_path / "there").rglob("rank-00001.safetensors")
    file.write_bytes(bytes(10**6))
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001\.safetensors: has 1000000 bytes, its manifest says 4"):
        remote.fetch(4, generation=0)


def test_no_more_of_a_copy_is_fetched_than_its_manifest_says_whatever_length_the_place_tells(run_dir, monkeypatch):
    remote = Remote(f"memory://{uuid.uuid4().hex}", run_dir)
    assert remote.put(write(run_dir, 4), anywhere)
    monkeypatch.setattr(MemoryFileSystem, "blocksize", 100)
    path = remote._path(4, "rank-00001.safetensors")
    remote._fs.pipe_file(path, bytes(10**6))
    monkeypatch.setattr(remote._fs, "size", lambda path: None)
    elsewhere = moved(run_dir)
    written = []
    monkeypatch.setattr("argosy.checkpoint.remote.check_files", lambda *_: written.append("all of it"))
    with pytest.raises(DamagedCheckpoint, match="has more than the 4 bytes that its manifest says"):
        remote.fetch(4, generation=0)
    assert not written and not list(elsewhere.glob("checkpoints/*"))


def test_a_place_that_gives_no_answer_is_given_up(tmp_path, run_dir, monkeypatch):
    has_ended = threading.Event()
    remote = Remote(str(tmp_path / "there"), run_dir)
    checkpoint = write(run_dir, 4)
    monkeypatch.setattr("argosy.checkpoint.remote.claim", lambda *_: has_ended.wait())
    monkeypatch.setattr("argosy.checkpoint.remote.FIRST_ANSWER_S", 0.01)
    for ask in (remote.steps, lambda: remote.put(checkpoint, anywhere)):
        with pytest.raises(OSError, match="no answer for 0 s"):
            ask()
    has_ended.set()


def test_folders_in_the_place_that_are_no_checkpoints_are_left_alone(tmp_path, run_dir):
    remote = Remote(str(tmp_path / "there"), run_dir)
    remote.put(write(run_dir, 4), anywhere)
    for name in ("step-4", "step-000000004", "step-" + "9" * 200, "step-0000000\N{ARABIC-INDIC DIGIT FOUR}", "x"):
        folder = tmp_path / "there/mine" / name
        folder.mkdir()
        (folder / store.MANIFEST).write_text("{}")
    assert remote.steps() == [4]


def test_another_run_of_the_same_name_is_refused_and_changes_nothing(url, run_dir, tmp_path):
    Remote(url, run_dir).put(write(run_dir, 4), anywhere)
    stranger = tmp_path / "other" / "mine"
    stranger.mkdir(parents=True)
    remote = Remote(url, stranger)
    theirs = write(stranger, 9)
    for refused in (remote.steps, lambda: remote.put(theirs, anywhere)):
        with pytest.raises(UserError, match=r"owner\.json: .* another run of this name .* another checkpoint\.remote"):
            refused()
    assert Remote(url, moved(run_dir)).steps() == [4], "a moved folder of the same run goes on"


def test_the_plan_of_the_newest_copy_is_told_to_its_run_alone_and_nothing_is_claimed(url, run_dir, tmp_path):
    stranger = tmp_path / "other" / "mine"
    stranger.mkdir(parents=True)
    assert Remote(url, run_dir).newest_plan() == ""
    for step in (4, 6):
        Remote(url, stranger).put(write(stranger, step, plan=f"microbatch={step}"), anywhere)
    assert Remote(url, run_dir).newest_plan() == ""
    assert Remote(url, moved(stranger)).newest_plan() == "microbatch=6"


def test_copies_of_an_older_version_which_have_no_owner_belong_to_the_first_run_that_asks(tmp_path, run_dir):
    url = str(tmp_path / "there")
    Remote(url, run_dir).put(write(run_dir, 4), anywhere)
    (tmp_path / "there/mine" / OWNER).unlink()
    assert Remote(url, run_dir).steps() == [4]
    assert (tmp_path / "there/mine" / OWNER).exists()
