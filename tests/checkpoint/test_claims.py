"""A number is taken by one process at most, whenever others run, stand still or die."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.claims import Claims, Taken

fork = multiprocessing.get_context("fork")


def takes(claims: Claims, number: int, owner: str) -> bool:
    try:
        claims.take(number, owner)
    except Taken:
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
    from argosy.checkpoint import claims as module

    def stops_before(function):
        def stopped(*arguments):
            setattr(place, name, original)
            os.kill(os.getpid(), signal.SIGSTOP)
            return function(*arguments)

        return stopped

    place, name = {
        "create": (os, "open"), "write": (module, "_write"), "sync": (module, "sync_folder"), "look": (claims, "newest")
    }[point]  # fmt: skip
    original = getattr(place, name)
    setattr(place, name, stops_before(original))
    try:
        claims.take(2, "stopped")
    except Taken as problem:
        return "before" in str(problem)
    os._exit(9)


def test_one_that_is_killed_amid_taking_leaves_a_number_that_nobody_has(tmp_path, monkeypatch):
    from argosy.checkpoint import claims as module

    claims = Claims(tmp_path / "claims")
    claims.take(1, "before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", killed)
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
