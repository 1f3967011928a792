"""A file is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.errors import StorageError, UserError
from argosy.files import (
    PARTIAL,
    PartialFile,
    atomic_write,
    file_sha256,
    json_of,
    made_folder,
    make_folder,
    read_at_most,
    sized_file,
    whole_folder,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(params=[None, b"older"], ids=["new", "replaced"])
def before(request, tmp_path) -> bytes | None:
    """What the file held before it is written; None if it was not there."""
    if request.param is not None:
        (tmp_path / "file").write_bytes(request.param)
    return request.param


def now(tmp_path: Path) -> bytes | None:
    path = tmp_path / "file"
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_wrong_input_leaves_no_folder_behind(tmp_path, there):
    folder = tmp_path / "runs" / "mine"
    if there:
        folder.mkdir(parents=True)
    with pytest.raises(UserError, match="wrong"), made_folder(folder):
        (folder / "logs").mkdir()
        (folder / "logs" / "worker.log").write_text("refused")
        raise UserError("wrong")
    assert {path.name for path in tmp_path.rglob("*")} == ({"runs", "mine"} if there else set())


def test_the_folder_above_stays_if_something_else_is_in_it(tmp_path):
    with pytest.raises(UserError, match="wrong"), made_folder(tmp_path / "runs" / "mine"):
        (tmp_path / "runs" / "another").mkdir()
        raise UserError("wrong")
    assert names(tmp_path / "runs") == {"another"}


@pytest.mark.parametrize("error", [UserError, OSError])
def test_what_was_there_and_what_another_error_left_stay(tmp_path, error):
    (tmp_path / "old").mkdir()
    if error is UserError:
        (tmp_path / "old" / "mine").touch()
    with pytest.raises(error), made_folder(tmp_path / "old"):
        (tmp_path / "old" / "new").touch()
        raise error("wrong")
    assert "new" in names(tmp_path / "old")


def test_a_file_appears_when_it_is_whole(tmp_path, before):
    with atomic_write(tmp_path / "file") as file:
        file.write(b"first half, ")
        file.flush()
        assert now(tmp_path) == before
        file.write(b"second half")
    assert now(tmp_path) == b"first half, second half"
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("problem", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_while_writing_leaves_what_was_there(tmp_path, before, problem):
    with pytest.raises(type(problem)), atomic_write(tmp_path / "file") as file:
        file.write(b"half")
        raise problem
    assert now(tmp_path) == before
    assert PARTIAL not in "".join(names(tmp_path))


def test_a_disk_that_refuses_the_last_bytes_leaves_what_was_there(tmp_path, before, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="full"), atomic_write(tmp_path / "file") as file:
        file.write(b"whole")
    assert now(tmp_path) == before
    assert PARTIAL not in "".join(names(tmp_path))


def test_an_error_while_writing_is_not_covered_by_one_of_the_full_disk(tmp_path):
    with pytest.raises(ValueError, match="the first"), atomic_write(tmp_path / "file") as file:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file.fileno())
        os.close(full)
        file.write(b"buffered, and refused when the file is closed")
        raise ValueError("the first")
    assert names(tmp_path) == set()


def refuse(file: int) -> None:
    raise OSError(errno.ENOSPC, "the disk is full")


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    done = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(("sync", Path(f"/proc/self/fd/{file}").readlink())))
    monkeypatch.setattr(Path, "replace", lambda self, to: done.append(("rename", to)) or replace(self, to))
    with atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    partial = tmp_path / f"file{PARTIAL}"
    assert done == [("sync", partial), ("rename", tmp_path / "file"), ("sync", tmp_path)]


def test_the_names_of_new_folders_are_on_the_disk_before_the_return(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda file: done.append(Path(f"/proc/self/fd/{file}").readlink()))
    make_folder(tmp_path / "run" / "checkpoints")
    assert set(done) == {tmp_path, tmp_path / "run"}
    done.clear()
    make_folder(tmp_path / "run" / "checkpoints")
    assert done == []


def test_a_process_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "file"
    context = multiprocessing.get_context("fork")
    for attempt in range(10):
        with atomic_write(path) as file:
            file.write(letters(0))
        writing = context.Process(target=write_forever, args=(path,))
        writing.start()
        time.sleep(0.01 + 0.0007 * attempt)
        writing.kill()
        writing.join()
        data = path.read_bytes()
        assert data == letters(data[0] - ord("a"))
        assert names(tmp_path) <= {"file", f"file{PARTIAL}"}


def letters(i: int) -> bytes:
    """Many of one letter: no two of them can be taken for a third."""
    return bytes([ord("a") + i % 26]) * 100_000


def write_forever(path: Path) -> None:
    for i in range(1_000_000):
        with atomic_write(path) as file:
            for start in range(0, 100_000, 1000):
                file.write(letters(i)[start : start + 1000])


def test_what_a_kill_left_is_written_over(tmp_path):
    (tmp_path / f"file{PARTIAL}").write_bytes(b"a long beginning of something")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"short")
    assert now(tmp_path) == b"short" and names(tmp_path) == {"file"}


def test_an_abandoned_file_leaves_what_was_there(tmp_path, before):
    partial = PartialFile(tmp_path / "file")
    partial.file.write(b"half")
    partial.abandon()
    assert now(tmp_path) == before
    assert PARTIAL not in "".join(names(tmp_path))


@pytest.mark.parametrize("name", ["train-0.5", "a.tar.gz", ".hidden"])
def test_a_dot_in_a_name_is_part_of_it(tmp_path, name):
    with atomic_write(tmp_path / name) as file:
        assert names(tmp_path) == {name + PARTIAL}
        file.write(b"x")
    assert names(tmp_path) == {name}


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_sha256_is_of_all_bytes(tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_what_is_no_regular_file_is_refused_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless", "."):
        with pytest.raises(OSError, match="not a regular file"):
            file_sha256(tmp_path / name)
        with pytest.raises(OSError, match="not a regular file"):
            read_at_most(tmp_path / name, 10)


def test_it_stands_below_every_room_but_errors():
    below = "('argosy.credentials', 'argosy.errors', 'argosy.files')"
    loaded = f"[m for m in sys.modules if m.startswith(('argosy.', 'torch', 'numpy')) and m not in {below}]"
    code = f"import sys, argosy.files; sys.exit(str({loaded}) if {loaded} else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_larger_than_its_kind_can_be_is_named_and_not_read_whole(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"tokenizer\.json has more than 1 MiB"):
        read_at_most(path, 2**20)
    path.write_bytes(b"x" * 2**20)
    assert len(read_at_most(path, 2**20)) == 2**20


def test_a_file_to_map_has_its_room_on_the_disk_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "change.f32"
    path.write_bytes(b"kept")
    for size in (1 << 20, 0):
        sized_file(path, size)
        assert path.stat().st_size == size <= path.stat().st_blocks * 512
        assert path.read_bytes()[:4] == b"kept"[:size]

    def full(*where: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"change\.f32 could not be written .*No space left.*run the same command"):
        sized_file(path, 8)


def test_a_folder_gets_its_name_once_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        said.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        said.append("renamed")
        return rename(path, target)

    with whole_folder(tmp_path / "folder") as partial:
        (partial / "inner").mkdir()
        for name in ("a", "inner/b"):
            (partial / name).write_text(name)
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Path, "rename", renamed)
    assert {*said[:4]} == {partial.name, *(f"{partial.name}/{name}" for name in ("a", "inner", "inner/b"))}
    assert said[4:] == ["renamed", "."]
    assert (tmp_path / "folder/inner/b").read_text() == "inner/b"


def test_after_an_error_nothing_of_a_folder_is_left(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="full"), whole_folder(tmp_path / "folder") as partial:
        (partial / "a").write_text("a")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[" * 100_000, b"\xff", "9" * 5000])
def test_what_is_no_json_is_one_kind_of_error(text):
    with pytest.raises(ValueError):
        json_of(text)
    assert json_of(b"[1]") == [1]
