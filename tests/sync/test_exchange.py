"""Whatever becomes of sites and links: who can go on does, and all come to the same weights in the end."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import pytest

from argosy.sync import assembly
from argosy.sync.messages import FromSite, LineNotice, framed
from dealt_samples import assert_each_sample_once
from simulated_sites import AtOnce, Country
from wrong_messages import altered


def test_sites_that_are_left_alone_all_take_part_in_every_round(country: Callable[..., Country]) -> None:
    run = country(rounds=10)
    run.start()
    run.finish()
    lines = run.sites["A"].ledger.lines
    assert all(list(line.tokens) == ["A", "B", "C"] and line.by == "A" for line in lines)


def check_samples(run: Country) -> None:
    """Each sample is in one round, or still to come."""
    site = run.sites[run.names[0]]
    assert_each_sample_once(site.sites.shares, site.ledger.lines)


@pytest.mark.parametrize(
    ("lost", "overlap"),
    [("C", 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("A", 0), ("A", 1), ("C", 0)))],
)
def test_a_site_that_is_away_is_waited_for_once_and_catches_up(
    country: Callable[..., Country], lost: str, overlap: int
) -> None:
    run = country(rounds=60, overlap_steps=overlap)
    run.start()
    run.until(lambda: run.sites["B"].rounds == 5)
    run.sites[lost].kill()
    run.until(lambda: run.sites["B"].rounds == 12, 20 + 1 + 7 * 3)  # once sync.patience_s
    run.sites[lost].start()
    away_s = run.until(lambda: lost in run.sites["B"].ledger.lines[-1].tokens)
    assert away_s < 10 + 3 * overlap
    run.finish()
    absent = [line.round for line in run.sites["B"].ledger.lines if lost not in line.tokens]
    assert absent == list(range(absent[0], absent[-1] + 1))  # once it is back it stays
    check_samples(run)


def test_quick_rounds_do_not_outrun_a_site_that_comes_back(country: Callable[..., Country]) -> None:
    run = country(rounds=300, round_s=0.3)
    run.start()
    run.sites["C"].kill()
    run.until(lambda: run.sites["B"].rounds == 50)
    run.sites["C"].start()
    run.until(lambda: "C" in run.sites["B"].ledger.lines[-1].tokens, 30)
    assert len(run.sites["B"].ledger.lines) < 150


@pytest.mark.parametrize("lost", [pytest.param("A", marks=pytest.mark.slow), "C"])
def test_a_site_whose_folder_is_lost_takes_the_state_and_takes_part(country: Callable[..., Country], lost: str) -> None:
    run = country(rounds=60)
    run.start()
    run.until(lambda: run.sites["B"].rounds == 20)
    run.sites[lost].lose_folder()
    run.until(lambda: lost in run.sites["B"].ledger.lines[-1].tokens and run.sites["B"].rounds > 21, 60)
    assert run.sites[lost].events("state_taken")
    began = run.sites["B"].rounds
    run.pass_time(20)
    assert run.sites["B"].rounds >= began + 5  # nobody is waited for
    run.finish()
    check_samples(run)


def test_a_site_that_loses_its_folder_after_it_was_ready_makes_its_change_again(
    country: Callable[..., Country],
) -> None:
    run = country(names="AB", rounds=12)
    run.start()
    run.is_lost = lambda sender, message, data: sender == "B" and message.kind == "data" and message.round == 5
    run.until(lambda: run.sites["A"].sites.sent(5).exists() and run.sites["B"].sites.sent(5).exists())
    run.pass_time(2)
    run.sites["B"].lose_folder()
    run.is_lost = lambda sender, message, data: False
    run.finish()
    lines = run.sites["A"].ledger.lines
    assert all(list(line.tokens) == ["A", "B"] for line in lines)
    assert [line.attempt for line in lines] == [1] * 5 + [3] + [1] * 6  # of the first attempt nothing is used


def test_what_was_left_of_a_change_is_not_sent_before_it_is_encoded_anew(
    country: Callable[..., Country], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that lost its power may have files that are not what was written."""
    run = country(names="AB", rounds=6)
    run.start()
    run.is_lost = lambda sender, message, data: sender == "B" and message.kind == "data" and message.round == 3
    left = run.sites["B"].sites.sent(3)
    run.until(lambda: run.sites["A"].sites.sent(3).exists() and left.exists())
    run.pass_time(1)
    run.sites["B"].kill()
    torn = bytes(left.stat().st_size)
    left.write_bytes(torn)
    run.is_lost = lambda sender, message, data: False
    with monkeypatch.context() as patched:
        patched.setattr(AtOnce, "submit", lambda *_: Future())  # it does not come to it
        run.sites["B"].start()
        run.pass_time(5)
        assert left.read_bytes() == torn and run.sites["A"].rounds == 3
    run.sites["B"].kill()
    run.sites["B"].start()
    run.finish()
    norms = run.sites["A"].ledger.lines[3].extra["norms"]
    assert norms["B"] == pytest.approx(norms["A"], rel=0.5)


def test_what_a_ledger_s_line_is_about_is_on_the_disk_before_it(
    country: Callable[..., Country], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    run = country(names="AB", rounds=2)
    run.start()
    run.finish()
    for site in "AB":
        of_site = [path for path in synced if f"/{site}/" in path]
        for number in range(2):
            average = next(at for at, path in enumerate(of_site) if f"average-{number:08d}" in path)
            line = [at for at, path in enumerate(of_site) if path.endswith("ledger.jsonl")][number]
            assert average < line


@pytest.mark.parametrize("ahead", [pytest.param("A", marks=pytest.mark.slow), "B"])
def test_two_sites_that_went_on_alone_come_together(country: Callable[..., Country], ahead: str) -> None:
    run = country(names="AB", rounds=60, quorum=1)
    run.start(ahead)
    run.until(lambda: run.sites[ahead].rounds == 8)
    run.sites[ahead].kill()
    behind = "B" if ahead == "A" else "A"
    run.start(behind)
    run.until(lambda: run.sites[behind].rounds == 3)
    run.sites[ahead].start()
    run.finish()
    assert run.sites[behind].events("site_gives_way") and not run.sites[ahead].events("site_gives_way")
    lines = run.sites["A"].ledger.lines
    assert list(lines[0].tokens) == [ahead] and list(lines[-1].tokens) == ["A", "B"]
    assert len([line for line in lines if len(line.tokens) == 1]) < 15


def test_a_link_that_was_cut_between_two_halves(country: Callable[..., Country]) -> None:
    run = country(names="ABC", rounds=60, quorum=1)
    run.start()
    run.until(lambda: run.sites["A"].rounds == 4)
    run.isolate("A")
    run.pass_time(90)
    assert run.sites["A"].rounds > 10 and run.sites["B"].rounds > 10
    run.cut.clear()
    run.finish()
    assert run.sites["A"].events("site_gives_way")  # the others were two
    check_samples(run)


@pytest.mark.parametrize(("cut", "left"), [("BC", "AB"), ("AC", "AB"), ("AB", "AC")])
def test_two_sites_that_do_not_hear_each_other_hold_nobody_up(
    country: Callable[..., Country], cut: str, left: str
) -> None:
    """A third hears both: one of them is left out, and follows what the others decide. None decides otherwise."""
    run = country(names="ABC", rounds=30)
    run.start()
    run.until(lambda: run.sites["A"].rounds == 4)
    run.cut.add(frozenset(cut))
    run.pass_time(45)
    assert min(site.rounds for site in run.sites.values()) > 8
    assert all(list(line.tokens) == list(left) for line in run.sites["A"].ledger.lines[5:])
    run.cut.clear()
    run.finish()
    assert list(run.sites["A"].ledger.lines[-1].tokens) == list("ABC")
    assert not any(site.events("site_gives_way") or site.events("state_taken") for site in run.sites.values())
    check_samples(run)


def test_what_a_site_left_before_it_gave_way_is_in_no_round(country: Callable[..., Country]) -> None:
    run = country(names="ABC", rounds=60, quorum=1)
    run.start()
    run.until(lambda: run.sites["A"].rounds == 4)
    run.isolate("A")
    run.pass_time(60)
    site = run.sites["A"]
    assert site.rounds > run.sites["B"].rounds  # so what it has left is for a round that is still to come
    run.cut.clear()
    run.finish()
    assert site.events("site_gives_way")
    took_part = [(before, line) for before, line in pairwise(site.ledger.lines) if "A" in line.tokens]
    assert len(took_part) > 30
    assert all(site.left_from[line.round] == before.chain for before, line in took_part)


def test_without_a_quorum_nobody_goes_on(country: Callable[..., Country]) -> None:
    run = country(names="AB")
    run.start()
    run.until(lambda: run.sites["A"].rounds == 3)
    run.isolate("A")
    run.pass_time(100)
    assert [site.rounds for site in run.sites.values()] == [3, 3]
    run.cut.clear()
    run.finish()
    assert all(list(line.tokens) == ["A", "B"] for line in run.sites["A"].ledger.lines)


def test_a_line_that_only_its_leader_has_the_average_of_holds_nobody_up(country: Callable[..., Country]) -> None:
    run = country(rounds=40)
    run.start()
    run.is_lost = lambda sender, message, data: (
        sender == "A" and message.kind == "data" and message.what in ("slice", "average") and message.round == 5
    )
    run.until(lambda: len(run.sites["A"].ledger.lines) == 6)
    run.sites["A"].kill()
    run.is_lost = lambda sender, message, data: False
    assert len(run.sites["B"].ledger.lines) == len(run.sites["C"].ledger.lines) == 5
    run.until(lambda: run.sites["B"].rounds == 12, 80)
    run.sites["A"].start()
    run.until(lambda: run.sites["A"].rounds >= 13, 60)
    run.finish()
    check_samples(run)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20) if seed != 2)])
@pytest.mark.parametrize("quorum", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_at_random(country: Callable[..., Country], seed: int, quorum: int) -> None:
    luck = random.Random(seed)
    names = luck.choice(["AB", "ABC", "ABCD"])
    keys = {"quorum": quorum, "patience_s": 5.0, "overlap_steps": seed % 2}
    run = country(names=names, rounds=200, round_s=luck.choice([0.3, 2.0]), **keys)
    run.start()
    for _ in range(12):
        run.pass_time(luck.uniform(0.1, 12))
        name = luck.choice(names)
        site = run.sites[name]
        match luck.choice(["kill", "start", "cut", "join", "lose"]):
            case "kill" if site.is_up:
                site.kill()
            case "start" if not site.is_up:
                site.start()
            case "cut":
                run.cut.add(frozenset(luck.sample(names, 2)))
            case "join":
                run.cut.clear()
            case "lose" if site.is_up and sum(s.is_up for s in run.sites.values()) == len(names):
                site.lose_folder()
    run.cut.clear()
    for site in run.sites.values():
        if not site.is_up:
            site.start()
    assert all(site.rounds < 150 for site in run.sites.values()), "they ended too soon: who comes later stays behind"
    run.finish()
    check_samples(run)


def test_a_transfer_goes_on_from_where_the_link_was_cut(
    country: Callable[..., Country], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MESSAGE_PIECE_BYTES", 64)
    monkeypatch.setattr(assembly, "AHEAD_BYTES", 128)
    run = country(names="AB", rounds=4, patience_s=1000.0)
    run.start()
    came = [0]

    def count(sender: str, message: FromSite, data: bytes) -> bool:
        if sender == "A" and message.kind == "data" and message.what == "sent" and message.round == 1:
            came[0] += len(data)
        return False

    run.is_lost = count
    run.until(lambda: came[0] > 500)
    run.isolate("B")
    run.pass_time(30)
    assert "A" not in run.sites["B"].wires.sites
    assert came[0] < 1500  # not all of it
    run.cut.clear()
    run.finish()
    rounds = run.sites["A"].events("round")
    assert rounds[1]["sent_bytes"] <= rounds[0]["sent_bytes"] + 2 * 128  # what was under way, and no more


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_wrong_messages_of_a_site_of_the_run_end_no_exchange(country: Callable[..., Country], seed: int) -> None:
    luck = random.Random(seed)
    run = country(names="ABC", rounds=60, patience_s=5.0, overlap_steps=seed % 2)
    run.start()
    said: dict[str, list[bytes]] = {}

    def note(_: str, message: FromSite, data: bytes) -> bool:
        said.setdefault(message.kind, []).append(framed(message, data))
        return False

    run.is_lost = note
    run.until(lambda: run.sites["B"].rounds == 8)
    run.sites["C"].lose_folder()
    run.until(lambda: bool(run.sites["C"].events("state_taken")))
    assert len(said) >= 11  # of 12 kinds, all but "missing" at least
    for _ in range(300):
        for to, sender in ("AB", "BC", "CA"):
            head, _, data = luck.choice(said[luck.choice(list(said))][-20:]).partition(b"\n")
            wrong = json.dumps(altered(json.loads(head), luck)).encode()
            run.sites[to].wires.inbox.append((sender, wrong + b"\n" + data[: luck.choice([0, 1, len(data)])]))
        run.turn()
    assert any(site.wires.refusals for site in run.sites.values())
    for site in run.sites.values():  # what they lied to each other is not in their folders
        site.kill()
        site.start()
    run.finish()
    check_samples(run)


def test_a_line_that_goes_with_the_checksum_and_with_nothing_else_is_refused(country: Callable[..., Country]) -> None:
    run = country(names="AB", rounds=12)
    run.start()
    run.until(lambda: run.sites["A"].rounds == 3 and run.sites["B"].rounds == 3)
    site = run.sites["A"]
    last = site.ledger.lines[-1]
    for wrong in (
        {"tokens": {}}, {"tokens": {"A": 16, "X": 16}}, {"by": "X"}, {"samples": {}}, {"members": ["X"]},
        {"dealt": {"A": [(0, 1)]}}, {"returned": [(0, 1)]}, {"sums": []}, {"sums": [1] * 1000},
    ):  # fmt: skip
        line = last.model_copy(update={"round": 3, **wrong})
        line = line.model_copy(update={"chain": line.chained(last.chain)})
        site.wires.refusals.clear()
        site.wires.inbox.append(("B", framed(LineNotice(line=line))))
        run.turn()
        assert "the line of round 3 does not follow" in site.wires.refusals[0], wrong
        run.until(lambda: "B" in site.wires.sites)
    run.finish()
    check_samples(run)
