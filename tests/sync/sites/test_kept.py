"""What is kept of past rounds."""

from __future__ import annotations

import json
from collections.abc import Callable

from argosy.sync.sites.kept import Kept
from simulated_sites import Country


def test_averages_are_kept_for_checkpoints_and_for_who_reads_them(country: Callable[..., Country]) -> None:
    run = country(names="AB", patience_s=5.0)
    run.start("A")
    sites = run.sites["A"].sites
    for number in range(10):
        sites.average(number).touch()
        sites.sent(number).touch()
    sites.state(7).touch()

    def averages() -> list[int]:
        return [number for number in range(10) if sites.average(number).exists()]

    kept = Kept(sites)
    kept.sweep(8)  # it did not take part: nothing is known
    assert averages() == list(range(10))
    assert [n for n in range(10) if sites.sent(n).exists()] == [9] and not sites.state(7).exists()
    sites.about(8).write_text(json.dumps({"needs_round": 6}))
    kept.read("B", 4)
    sites.state(5).touch()
    kept.sweep(8)
    assert averages() == [4, 5, 6, 7, 8, 9] and sites.state(5).exists()
    run.now_s += 6.0  # nothing was read for sync.patience_s
    sites.about(8).write_text(json.dumps({"needs_round": 6}))
    kept.sweep(8)
    assert averages() == [6, 7, 8, 9] and not sites.state(5).exists()
