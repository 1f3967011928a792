"""The ledger of samples tells which were trained on and skipped, and which are missing or there twice."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from argosy.data.order import kept, skipped_by
from argosy.observe.ledger import read_ledger

Ranges = list[tuple[int, int]]


def lines(steps: int, batch: int, skipped: Ranges) -> list[dict[str, Any]]:
    """As the loop writes them."""
    records = []
    for step in range(steps):
        first, stop = step * batch, (step + 1) * batch
        record: dict[str, Any] = {"step": step, "samples": batch, "first_sample": kept(first, stop, skipped)[0][0]}
        if holes := skipped_by(first, stop, skipped):
            record["samples_skipped"] = [list(hole) for hole in holes]
        records += [record, {"step": step, "validation_loss": 1.0}]
    return records


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Ranges that do not overlap."""
    ends = sorted(draw(st.lists(st.integers(0, 60), unique=True, max_size=8)))
    return [(first, stop) for first, stop in zip(ends[::2], ends[1::2], strict=False)]


@given(ranges(), st.integers(1, 7), st.integers(1, 9))
def test_what_the_loop_writes_is_each_sample_once(skipped: Ranges, batch: int, steps: int):
    ledger = read_ledger(lines(steps, batch, skipped))
    assert ledger.problems == ()
    assert ledger.committed == steps * batch
    end = kept(0, steps * batch, skipped)[-1][1]
    assert list(ledger.skipped) == [hole for hole in skipped if hole[0] < end]


def test_a_step_that_is_missing_or_there_twice_is_found():
    records = lines(5, 4, [(8, 12)])
    assert read_ledger([r for r in records if r["step"] != 1]).problems == ("samples 4 to 7 are missing",)
    assert read_ledger([*records, records[2]]).problems == ("samples 4 to 7 are there twice",)


def test_samples_that_were_left_out_without_a_word_are_found():
    records = lines(3, 4, [(4, 8)])
    for record in records:
        record.pop("samples_skipped", None)
    assert read_ledger(records).problems == ("samples 4 to 7 are missing",)
