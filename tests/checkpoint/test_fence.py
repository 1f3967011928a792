"""Only processes of the newest generation of a run commit checkpoints."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import fence
from argosy.checkpoint.checksums import DamagedCheckpoint, signed
from argosy.checkpoint.fence import NAME_FILE, OWNER, Claims, Fenced, NumberTaken, claim, name_of
from argosy.errors import UserError


def test_a_generation_is_in_force_until_a_later_one_begins(tmp_path):
    assert fence.is_in_force(tmp_path, 0), "where generations are not counted"
    fence.begin_generation(tmp_path, 2)
    assert fence.is_in_force(tmp_path, 2) and not fence.is_in_force(tmp_path, 1) and not fence.is_in_force(tmp_path, 0)
    fence.begin_generation(tmp_path, 3)
    assert fence.newest_generation(tmp_path) == 3 and not fence.is_in_force(tmp_path, 2)


def test_nothing_is_written_if_the_newest_generation_cannot_be_told(tmp_path):
    (tmp_path / fence.CLAIMS).write_text("no folder")
    assert not fence.is_in_force(tmp_path, 2)


def test_a_process_finds_itself_fenced_although_its_listing_of_names_is_old(tmp_path, monkeypatch):
    """As on NFS, where a client may not see new names for a minute."""
    fence.begin_generation(tmp_path, 1)
    fence.begin_generation(tmp_path, 2)
    monkeypatch.setattr(fence.Claims, "newest", lambda self: 1)
    with pytest.raises(Fenced, match=r"this process is of generation 1"):
        fence.check_generation(tmp_path, 1)


@pytest.mark.parametrize("number", [4, 5])
def test_no_generation_begins_twice_or_after_a_later_one(tmp_path, number):
    fence.begin_generation(tmp_path, 5, "a")
    with pytest.raises(Fenced, match=f"generation 5 of .* has begun, so {number} cannot"):
        fence.begin_generation(tmp_path, number, "b")
    assert fence.is_in_force(tmp_path, 5) and fence.newest_generation(tmp_path) == 5


def test_who_began_a_generation_may_do_so_again(tmp_path):
    """For example if it did not hear of it: the answer was lost."""
    for _ in range(2):
        fence.begin_generation(tmp_path, 5, "a")
    assert fence.is_in_force(tmp_path, 5)


def test_folders_of_older_generations_lose_their_names_when_a_new_one_begins(tmp_path):
    for generation in (1, 2, 3):
        fence.partial_folder(tmp_path, 4, generation).mkdir(parents=True)
    fence.begin_generation(tmp_path, 3)
    assert fence.partial_folders(tmp_path) == [(fence.partial_folder(tmp_path, 4, 3), 4, 3)]
    with pytest.raises(Fenced, match=r"generation 3 of .* has begun"):
        fence.check_generation(tmp_path, 2)


def test_a_process_belongs_to_the_generation_that_its_environment_names(monkeypatch):
    monkeypatch.delenv(fence.GENERATION_VARIABLE, raising=False)
    assert fence.own_generation() == 0
    monkeypatch.setenv(fence.GENERATION_VARIABLE, "7")
    assert fence.own_generation() == 7


@pytest.mark.parametrize("name", fence.OLD_FILES)
def test_a_folder_of_an_older_version_goes_on(tmp_path, name):
    (tmp_path / name).write_text("4\n")
    assert fence.newest_generation(tmp_path) == 4 and not fence.is_in_force(tmp_path, 3)
    with pytest.raises(Fenced, match=r"generation 4 has begun, so 3 cannot"):
        fence.begin_generation(tmp_path, 3)
    fence.begin_generation(tmp_path, 5)
    assert fence.newest_generation(tmp_path) == 5
    assert (tmp_path / name).read_text() == "5\n", "a process of the older version is fenced as well"


fork = multiprocessing.get_context("fork")


def takes(claims: Claims, number: int, owner: str) -> bool:
    try:
        claims.take(number, owner)
    except NumberTaken:
        return False
    return True


RACERS = 8


def run_all(of: Callable[[str], None]) -> None:
    """Call `of` in processes of their own, at once."""
    racers = [fork.Process(target=of, args=(f"racer-{n}",)) for n in range(RACERS)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0


def won_in(folder: Path) -> list[int]:
    return sorted(int(number) for path in folder.glob("won-*") for number in path.read_text().split())


def test_of_many_processes_that_want_the_same_number_exactly_one_gets_it(tmp_path):
    start, claims, rounds = fork.Barrier(RACERS), Claims(tmp_path / "claims"), range(1, 61)

    def race(owner: str) -> None:
        won = []
        for number in rounds:
            start.wait()
            if takes(claims, number, owner):
                won.append(number)
                assert claims.owner(number) == owner
        (tmp_path / f"won-{owner}").write_text(" ".join(map(str, won)))

    run_all(race)
    assert won_in(tmp_path) == list(rounds)
    assert [n for n in rounds if claims.owner(n)] == [60]


def test_in_any_order_nobody_shares_a_number_and_only_the_newest_is_open(tmp_path):
    """One that others overtake between its create and its look around has burnt its number, and begins nothing."""
    start, claims = fork.Barrier(RACERS), Claims(tmp_path / "claims")

    def race(owner: str) -> None:
        won, dice = [], random.Random(owner)
        start.wait()
        while (number := claims.newest() + 1) <= 100:
            if takes(claims, number, owner):
                won.append(number)
            time.sleep(dice.random() / 1000)
        (tmp_path / f"won-{owner}").write_text(" ".join(map(str, won)))

    run_all(race)
    won = won_in(tmp_path)
    assert won and len(won) == len(set(won))
    claims.take(200, "last")
    assert [n for n in range(1, 201) if claims.owner(n)] == [200]


@pytest.mark.parametrize("point", ["create", "write", "sync", "look"])
def test_one_that_is_stopped_amid_taking_loses_to_one_that_goes_on(tmp_path, point):
    """Stopped with SIGSTOP at that point of the way, and continued when another has gone on."""
    claims = Claims(tmp_path / "claims")
    claims.take(1, "before")
    pid = os.fork()
    if not pid:
        os._exit(int(_taken_with_a_stop(claims, point)))
    os.waitpid(pid, os.WUNTRACED)
    number = claims.newest() + 1  # as a coordinator that takes over reads it
    assert takes(claims, number, "other")
    assert claims.owner(number) == "other" and claims.owner(1) == ""
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if point == "create" else 1), "it wins nothing"
    assert claims.owner(number) == "other" and [n for n in range(1, 5) if claims.owner(n)] == [number]


def _taken_with_a_stop(claims: Claims, point: str) -> bool:
    """Return False if it lost before its create, and True if it was refused after it. Exit code 9: it has won."""
    from argosy.checkpoint import fence as module

    def stops_before(function):
        def stopped(*arguments):
            setattr(place, name, original)
            os.kill(os.getpid(), signal.SIGSTOP)
            return function(*arguments)

        return stopped

    place, name = {
        "create": (os, "open"), "write": (os, "ftruncate"), "sync": (module, "sync_folder"), "look": (claims, "newest")
    }[point]  # fmt: skip
    original = getattr(place, name)
    setattr(place, name, stops_before(original))
    try:
        claims.take(2, "stopped")
    except NumberTaken as problem:
        return "before" in str(problem)
    os._exit(9)


def test_one_that_is_killed_amid_taking_leaves_a_number_that_nobody_has(tmp_path, monkeypatch):
    claims = Claims(tmp_path / "claims")
    claims.take(1, "before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", killed)  # it is there, and nothing is in it
        with pytest.raises(KeyboardInterrupt):
            claims.take(2, "killed")
    assert claims.newest() == 2 and claims.owner(2) == "" and claims.owner(1) == "before"
    assert not takes(claims, 2, "other") and takes(claims, 3, "other")
    assert [claims.owner(n) for n in (1, 2, 3)] == ["", "", "other"], "it did not hide the older one that was open"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from("abc")), max_size=20))
def test_the_highest_that_was_taken_is_the_only_open_one(tmp_path_factory, wanted):
    claims, newest, owner = Claims(tmp_path_factory.mktemp("claims") / "c"), 0, ""
    for number, who in wanted:
        wins = number > newest or (number, who) == (newest, owner)
        assert takes(claims, number, who) == wins
        newest, owner = (number, who) if wins else (newest, owner)
        assert claims.newest() == newest
        assert [n for n in range(1, 13) if claims.owner(n)] == ([newest] if newest else [])


LOCAL = fsspec.filesystem("file")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"run{number}" for number in range(8)]
    for folder in folders:
        folder.mkdir()
    return folders


def claims(fs: Any, place: str, runs: list[Path]) -> list[Path]:
    """All claim at once; return those that were not refused."""
    ready, owners = threading.Barrier(len(runs)), []

    def ask(run_dir: Path) -> None:
        ready.wait()
        try:
            claim(fs, place, run_dir)
        except UserError:
            return
        owners.append(run_dir)

    threads = [threading.Thread(target=ask, args=(run_dir,)) for run_dir in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return owners


def test_a_folder_keeps_its_name_and_each_has_another(runs):
    assert name_of(runs[0]) == name_of(runs[0]) != name_of(runs[1])


def test_a_name_that_a_user_wrote_counts_and_one_that_is_none_is_refused(runs):
    (runs[0] / NAME_FILE).write_text("the-big-run\n")
    assert name_of(runs[0]) == "the-big-run"
    (runs[0] / NAME_FILE).write_text("a" * 100)
    with pytest.raises(UserError, match=r"\.name: must hold at most 64 letters"):
        name_of(runs[0])


def test_of_many_that_claim_one_place_at_once_one_has_it(tmp_path, runs):
    for round_ in range(20):
        assert len(claims(LOCAL, str(tmp_path / f"there{round_}"), runs)) == 1


def test_where_nothing_is_created_exclusively_the_last_to_write_has_it_and_the_others_hear_of_it_later(runs):
    class Plain(MemoryFileSystem):
        def _open(self, path: str, mode: str = "rb", *more: Any, **settings: Any) -> Any:
            if "x" in mode:
                raise NotImplementedError("File mode not supported")
            return super()._open(path, mode, *more, **settings)

    fs = Plain(skip_instance_cache=True)
    assert claims(fs, "/plain", runs)
    again = []
    for run_dir in runs:
        try:
            claim(fs, "/plain", run_dir)
        except UserError:
            continue
        again.append(run_dir)
    assert len(again) == 1


def test_an_owner_that_a_dead_process_left_empty_is_replaced(tmp_path, runs, monkeypatch):
    monkeypatch.setattr("argosy.checkpoint.fence.WRITE_S", 0.1)
    place = tmp_path / "there"
    place.mkdir()
    (place / OWNER).touch()
    claim(LOCAL, str(place), runs[0])
    with pytest.raises(UserError, match="another run"):
        claim(LOCAL, str(place), runs[1])


class Bucket(MemoryFileSystem):
    """An object store, which makes a folder's bucket, and answers an exclusive write with `answer`."""

    protocol = "s3", "s3a"
    cachable = False
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = []

    def __init__(self, answer: OSError | None = None, is_written: bool = True):
        super().__init__()
        self.store, self.pseudo_dirs, self.answer, self.is_written = {}, [], answer, is_written

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError(f"a bucket is made for {path}")

    def _open(self, path: str, mode: str = "rb", *rest: Any, **more: Any) -> Any:
        if mode == "xb" and self.answer is not None:
            if self.is_written:
                self.pipe_file(path, signed({"run": "nobody"}))
            raise self.answer
        return super()._open(path, mode, *rest, **more)


def test_no_bucket_is_made(runs):
    claim(fs := Bucket(), "/bucket/mine", runs[0])
    assert fs.exists(f"/bucket/mine/{OWNER}")


def test_a_store_that_knows_no_exclusive_write_is_claimed_and_one_that_fails_is_not(runs):
    for number in fence.NOT_SUPPORTED:
        claim(fs := Bucket(OSError(number, "not implemented"), is_written=False), "/bucket/mine", runs[0])
        assert fs.exists(f"/bucket/mine/{OWNER}")
    with pytest.raises(OSError, match="reset"):
        claim(fs := Bucket(OSError(errno.ECONNRESET, "reset"), is_written=False), "/bucket/mine", runs[0])
    assert not fs.exists(f"/bucket/mine/{OWNER}")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO], ids=["412", "409"])
def test_who_has_a_place_is_asked_if_the_store_says_only_that_it_cannot_be_written(runs, number):
    with pytest.raises(UserError, match="another run"):
        claim(Bucket(OSError(number, "At least one of the preconditions did not hold")), "/bucket/mine", runs[0])
    (runs[0] / NAME_FILE).write_text("nobody")  # a write whose answer was lost, and which was tried again
    claim(Bucket(OSError(number, "At least one of the preconditions did not hold")), "/bucket/mine", runs[0])


@pytest.mark.parametrize("data", [b"[" * 100_000, b"{}", signed({"run": 3}), signed({"run": "a" * 100}), b"\xff"])
def test_an_owner_that_is_something_else_is_named(tmp_path, runs, data):
    place = tmp_path / "there"
    place.mkdir()
    (place / OWNER).write_bytes(data)
    with pytest.raises((DamagedCheckpoint, UserError), match=r"there/owner\.json"):
        claim(LOCAL, str(place), runs[0])
    assert (place / OWNER).read_bytes() == data
