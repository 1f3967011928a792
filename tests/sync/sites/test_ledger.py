"""Whatever becomes of sites, each sample is trained on by one of them, and the ledger says by which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.order import Samples
from argosy.sync.sites.deal import RESERVE, Shares, SiteOrder, merged
from argosy.sync.sites.ledger import Delivery, Ledger, Line, dealt_in, next_line

SHARES = Shares(("A", "B", "C"), (4, 3, 1), round_steps=5)


def line_after(last: Line | None, delivered: set[str], connected: set[str]) -> Line:
    present = set(dealt_in(SHARES, last)) & delivered
    deliveries = {name: Delivery(SHARES.batch(name) * 5, []) for name in present}
    return next_line(SHARES, last, "A", deliveries, connected, 1, [1], {})


@given(st.lists(st.tuples(st.sets(st.sampled_from("ABC")), st.sets(st.sampled_from("ABC"))), max_size=12))
def test_each_sample_is_dealt_to_one_site_and_trained_on_once(rounds: list[tuple[set[str], set[str]]]) -> None:
    last: Line | None = None
    trained: list[tuple[int, int]] = []
    for delivered, connected in rounds:
        dealt = dealt_in(SHARES, last)
        for name, ranges in dealt.items():
            assert sum(end - first for first, end in ranges) == 5 * SHARES.batch(name)
        last = line_after(last, delivered, connected)
        assert last.samples == {name: dealt[name] for name in dealt if name in delivered}
        trained += [some for ranges in last.samples.values() for some in ranges]
    if last is None:
        return
    coming = [some for ranges in dealt_in(SHARES, last).values() for some in ranges]
    returned = [] if last.dealt is None else last.returned
    whole = merged([*trained, *coming, *returned])  # nothing twice (`merged` would leave an overlap), nothing left out
    assert whole == [(0, (last.round + 2) * 5 * SHARES.global_batch)]


def test_while_all_take_part_each_has_its_share_of_every_global_batch() -> None:
    last = line_after(line_after(None, set("ABC"), set("ABC")), set("ABC"), set("ABC"))
    assert last.dealt is None and last.returned == []
    assert last.samples["B"] == [(8 * step + 4, 8 * step + 7) for step in range(5, 10)]


def test_samples_of_a_site_that_was_lost_come_first_in_the_next_round() -> None:
    last = line_after(None, {"A", "C"}, {"A", "C"})
    assert last.members == ["A", "C"] and last.dealt is not None
    assert min(first for ranges in last.dealt.values() for first, _ in ranges) == 4  # B's first
    again = line_after(last, {"A", "C"}, {"A", "B", "C"})
    assert again.members == ["A", "B", "C"]


def test_a_ledger_is_read_as_it_was_written_and_a_line_cut_off_does_not_count(tmp_path: Path) -> None:
    ledger, last = Ledger(tmp_path), None
    for delivered in ("ABC", "AB", "AB"):
        last = line_after(last, set(delivered), set("ABC"))
        ledger.append(last)
    assert Ledger(tmp_path).lines == ledger.lines
    with ledger.path.open("ab") as file:
        file.write(b'{"round":3,')
    again = Ledger(tmp_path)
    assert again.lines == ledger.lines
    again.append(line_after(last, set("ABC"), set("ABC")))
    ledger.refresh()
    assert len(ledger.lines) == len(Ledger(tmp_path).lines) == 4
    chains = [line.chain for line in ledger.lines]
    assert [line.chained(before) for line, before in zip(ledger.lines, ["", *chains], strict=False)] == chains


class Numbers:
    """An order that gives each sample its number for a window."""

    def samples(self, start: int, stop: int) -> Samples:
        n = np.arange(start, stop)
        return Samples(np.zeros_like(n), np.zeros_like(n), n)


def test_a_site_reads_what_it_was_dealt_and_others_stand_in_for_bad_samples() -> None:
    last = line_after(None, {"A", "C"}, {"A", "C"})
    order = SiteOrder(Numbers(), SHARES, "A", {1: last.dealt}.get)
    assert last.dealt is not None
    dealt = [n for first, end in last.dealt["A"] for n in range(first, end)]
    assert order.samples(0, 4).windows.tolist() == [0, 1, 2, 3]
    assert order.samples(20, 40).windows.tolist() == dealt
    assert order.samples(18, 22).windows.tolist() == [34, 35, *dealt[:2]]
    order.skipped = ((20, 24),)
    assert order.samples(20, 28).windows.tolist() == [*range(RESERVE, RESERVE + 4), *dealt[4:8]]
    assert order.replaced(20, 40) == merged([(n, n + 1) for n in dealt[:4]])
    order.skipped = ((20, 24), (20, 24))
    assert order.samples(20, 24).windows.tolist() == list(range(RESERVE + 4, RESERVE + 8))
