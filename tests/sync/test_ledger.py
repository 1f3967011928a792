"""Whatever becomes of sites, each sample is trained on by one of them, and the ledger says by which."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.order import Samples
from argosy.errors import StorageError
from argosy.sync.deal import RESERVE, AppliedUpdate, Shares, SiteOrder, merged
from argosy.sync.ledger import Contribution, Line, RoundLedger, UpdateLedger, dealt_in, next_line, weights_of
from dealt_samples import assert_each_sample_once

SHARES = Shares(("A", "B", "C"), (4, 3, 1), round_steps=5)
AHEAD = replace(SHARES, ahead=2, from_step=3)


def line_after(lines: list[Line], delivered: set[str], connected: set[str], shares: Shares = SHARES) -> Line:
    present = set(dealt_in(shares, lines, len(lines))) & delivered
    deliveries = {name: Contribution(shares.batch(name) * shares.steps_of(len(lines)), []) for name in present}
    return next_line(shares, lines, "A", deliveries, connected, 1, [1], {})


@pytest.mark.parametrize("shares", [SHARES, AHEAD], ids=["next", "the one after it"])
@given(st.lists(st.tuples(st.sets(st.sampled_from("ABC")), st.sets(st.sampled_from("ABC"))), min_size=1, max_size=12))
def test_each_sample_is_dealt_to_one_site_and_trained_on_once(
    shares: Shares, rounds: list[tuple[set[str], set[str]]]
) -> None:
    lines: list[Line] = []
    for number, (delivered, connected) in enumerate(rounds):
        dealt = dealt_in(shares, lines, number)
        for name, ranges in dealt.items():
            assert sum(end - first for first, end in ranges) == shares.steps_of(number) * shares.batch(name)
        lines.append(line_after(lines, delivered, connected, shares))
        assert lines[-1].samples == {name: dealt[name] for name in dealt if name in delivered}
    assert_each_sample_once(shares, lines)


def test_rounds_are_of_one_step_until_sites_train_alone() -> None:
    assert [AHEAD.start(number) for number in range(7)] == [0, 1, 2, 3, 8, 13, 18]
    assert [AHEAD.round_of(step) for step in (0, 2, 3, 7, 8)] == [0, 2, 3, 3, 4]


def test_a_change_weighs_what_it_was_trained_on() -> None:
    lines: list[Line] = []
    for delivered in ("ABC", "AB", "ABC"):
        lines.append(line_after(lines, set(delivered), set("ABC")))
    tokens = {name: SHARES.batch(name) * 5 for name in "ABC"}
    assert weights_of(lines, tokens, 1) == tokens
    assert weights_of(lines, tokens, 2) == {"A": 40, "B": 30, "C": 10}
    assert weights_of(lines, tokens, 4) == {"A": 80, "B": 60, "C": 10}  # C began anew after it was left out


def test_while_all_take_part_each_has_its_share_of_every_global_batch() -> None:
    lines = [line_after([], set("ABC"), set("ABC"))]
    last = line_after(lines, set("ABC"), set("ABC"))
    assert last.dealt is None and last.returned == []
    assert last.samples["B"] == [(8 * step + 4, 8 * step + 7) for step in range(5, 10)]


def test_samples_of_a_site_that_was_lost_come_first_in_the_next_round() -> None:
    last = line_after([], {"A", "C"}, {"A", "C"})
    assert last.members == ["A", "C"] and last.dealt is not None
    assert min(first for ranges in last.dealt.values() for first, _ in ranges) == 4  # B's first
    again = line_after([last], {"A", "C"}, {"A", "B", "C"})
    assert again.members == ["A", "B", "C"]


def test_a_ledger_is_read_as_it_was_written_and_a_line_cut_off_does_not_count(tmp_path: Path) -> None:
    ledger = RoundLedger(tmp_path)
    for delivered in ("ABC", "AB", "AB"):
        ledger.append(line_after(ledger.lines, set(delivered), set("ABC")))
    assert RoundLedger(tmp_path).lines == ledger.lines
    with ledger.path.open("ab") as file:
        file.write(b'{"round":3,')
    again = RoundLedger(tmp_path)
    assert again.lines == ledger.lines
    again.append(line_after(ledger.lines, set("ABC"), set("ABC")))
    ledger.refresh()
    assert len(ledger.lines) == len(RoundLedger(tmp_path).lines) == 4
    chains = [line.chain for line in ledger.lines]
    assert [line.chained(before) for line, before in zip(ledger.lines, ["", *chains], strict=False)] == chains


class Numbers:
    """An order that gives each sample its number for a window; its mixture is that of sample `like`, by its source."""

    def __init__(self, like: int = 0):
        self.like = like

    def samples(self, start: int, stop: int) -> Samples:
        n = np.arange(start, stop)
        return Samples(np.full_like(n, self.like), np.zeros_like(n), n)

    def as_of(self, number: int) -> Numbers:
        return Numbers(like=number)


def test_a_site_reads_what_it_was_dealt_and_others_stand_in_for_bad_samples() -> None:
    last = line_after([], {"A", "C"}, {"A", "C"})
    order = SiteOrder(Numbers(), SHARES, "A", {1: last.dealt}.get)
    assert last.dealt is not None
    dealt = [n for first, end in last.dealt["A"] for n in range(first, end)]
    assert order.samples(0, 4).windows.tolist() == [0, 1, 2, 3]
    assert order.samples(20, 40).windows.tolist() == dealt
    assert order.samples(18, 22).windows.tolist() == [34, 35, *dealt[:2]]
    order.skipped = ((20, 24),)
    assert order.samples(20, 28).windows.tolist() == [*range(RESERVE, RESERVE + 4), *dealt[4:8]]
    assert order.samples(20, 28).sources.tolist() == [*[dealt[0]] * 4, *[0] * 4], "of the mixture of those"
    assert order.replaced(20, 40) == merged([(n, n + 1) for n in dealt[:4]])
    order.skipped = ((20, 24), (20, 24))
    assert order.samples(20, 24).windows.tolist() == list(range(RESERVE + 4, RESERVE + 8))


def test_updates_are_read_as_they_were_written_and_turned_back(tmp_path: Path) -> None:
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    updates = [AppliedUpdate(0, 0, "A", 0), AppliedUpdate(1, 2, "B", 0), AppliedUpdate(2, 3, "A", 1)]
    ledger.add(updates[0], [(0, 8)], loss=3.0)
    ledger.skip(1, "B", "loss nan")
    for update in updates[1:]:
        ledger.add(update, [(8 * update.item, 8 * update.item + 8)], loss=2.5)
    ledger.sync()

    again = UpdateLedger(tmp_path)
    assert again.turn_back(2) == 1
    assert again.updates == updates[:2]
    assert again.skipped == [(1, 1)]
    lines = [json.loads(line) for line in again.path.read_text().splitlines()]
    assert lines[0] == {"update": 0, "item": 0, "samples": [[0, 8]], "site": "A", "version": 0, "staleness": 0,
                        "loss": 3.0}  # fmt: skip
    assert [line.get("update") for line in lines] == [0, None, 1]


def test_an_update_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    ledger.add(AppliedUpdate(0, 0, "A", 0), [(0, 8)], loss=2.5)
    with ledger.path.open("ab") as file:
        file.write(b'{"update": 1, "item')
    ledger.turn_back(1)
    assert len(ledger.updates) == 1


def test_a_disk_that_takes_half_a_line_takes_none_and_ends_the_server_with_74(tmp_path: Path) -> None:
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    ledger.add(AppliedUpdate(0, 0, "A", 0), [(0, 8)], loss=2.5)
    written = ledger.path.read_bytes()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(written) + 20, most[1]))
    try:
        with pytest.raises(StorageError, match="could not be written") as full:
            ledger.add(AppliedUpdate(1, 1, "A", 1), [(8, 16)], loss=2.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, handler)
    assert full.value.exit_code == 74 and ledger.path.read_bytes() == written


def test_a_ledger_that_lacks_updates_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    ledger.add(AppliedUpdate(0, 0, "A", 0), [(0, 8)], loss=2.5)
    with pytest.raises(ValueError, match="first 2 updates"):
        ledger.turn_back(2)


def test_a_ledger_with_a_line_that_is_none_is_refused(tmp_path: Path) -> None:
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    ledger.add(AppliedUpdate(0, 0, "A", 0), [(0, 8)], loss=2.5)
    ledger.path.write_text('{"update": 0, "item": "first"}\n' + ledger.path.read_text())
    with pytest.raises(ValueError, match="line 1 is not what was written"):
        ledger.turn_back(1)


def test_a_ledger_of_updates_that_an_older_version_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text(
        '{"update": 0, "item": 0, "samples": [[0, 8]], "site": "A", "version": 0, "staleness": 0, "loss": 5.9}\n'
        '{"skipped": 1, "version": 1, "site": "B", "why": "loss nan, gradient norm nan"}\n'
        '{"update": 1, "item": 2, "samples": [[16, 24]], "site": "B", "version": 0, "staleness": 1, "loss": 5.8}\n'
    )
    ledger = UpdateLedger(tmp_path)
    assert ledger.turn_back(2) == 0
    assert ledger.updates == [AppliedUpdate(0, 0, "A", 0), AppliedUpdate(1, 2, "B", 0)]
    assert ledger.skipped == [(1, 1)]
