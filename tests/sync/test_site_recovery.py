"""A damaged line of a site's ledger is another site's to give; what this site made stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.sync.ledger import RoundLedger
from dealt_samples import assert_each_sample_once
from simulated_sites import Country, Site


def flip(path: Path, line: int, at: int = 40) -> None:
    """Flip a bit of a line, the byte `at` of it; a line from the end if it is negative."""
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = bytearray(lines[line])
    damaged[at] ^= 1
    lines[line] = bytes(damaged)
    path.write_bytes(b"".join(lines))


def begun(country: Callable[..., Country], rounds: int = 8, **keys: object) -> Country:
    """A run in which the sites have made some rounds."""
    run = country(**{"names": "AB", "rounds": 20, **keys})
    run.start()
    run.until(lambda: all(site.rounds >= rounds for site in run.sites.values()))
    return run


def lines_of(site: Site) -> list[str]:
    return [line.chain for line in RoundLedger(site.run_dir).lines]


@pytest.mark.parametrize("lines", [(0,), (3,), (-1,), (2, 5), (4, -1)], ids=str)
@pytest.mark.parametrize("name", ["A", "B"])
def test_a_damaged_line_is_taken_from_another_site(
    country: Callable[..., Country], name: str, lines: tuple[int, ...]
) -> None:
    run = begun(country)
    site = run.sites[name]
    site.kill()
    before = lines_of(site)
    for line in lines:
        flip(site.ledger.path, line)
    site.start()
    run.until(lambda: not site.ledger.damage, 10)
    assert lines_of(site)[: len(before)] == before
    run.finish()
    assert site.events("ledger_damaged") and site.events("ledger_mended") and not site.events("state_taken")
    assert_each_sample_once(site.sites.shares, site.ledger.lines)


def test_what_the_exchange_has_read_before_needs_no_other_site(country: Callable[..., Country]) -> None:
    run = begun(country)
    run.isolate("A")
    site = run.sites["A"]
    before = lines_of(site)
    flip(site.ledger.path, 3)
    site.run_dir_ledger = RoundLedger(site.run_dir)  # the ranks begin anew, and the exchange does not
    run.until(lambda: not site.ledger.damage, 5)
    assert lines_of(site) == before
    run.cut.clear()
    run.finish()


def test_a_line_that_no_site_has_is_named_and_waited_for(
    country: Callable[..., Country], capfd: pytest.CaptureFixture[str]
) -> None:
    run = begun(country)
    for site in run.sites.values():
        site.kill()
    site = run.sites["A"]
    flip(site.ledger.path, 3)
    site.start()
    run.pass_time(30)
    assert f"line 4 of {site.ledger.path} is not what was written" in capfd.readouterr().out
    assert site.ledger.damage and run.sites["A"].exchange.rounds == 3
    run.pass_time(30)
    run.sites["B"].start()
    run.until(lambda: not site.ledger.damage, 10)
    run.finish()


def test_a_site_whose_damaged_line_the_others_made_otherwise_takes_their_state(country: Callable[..., Country]) -> None:
    run = country(names="AB", rounds=30, quorum=1)
    run.start("A")
    run.until(lambda: run.sites["A"].rounds == 4)
    run.sites["A"].kill()
    run.start("B")
    run.until(lambda: run.sites["B"].rounds == 6)
    flip(run.sites["A"].ledger.path, 0)
    run.sites["A"].start()
    run.finish()
    assert run.sites["A"].events("state_taken") and not run.sites["B"].events("state_taken")


def test_every_bit_of_a_ledger_counts(country: Callable[..., Country]) -> None:
    run = begun(country, rounds=2)
    path = run.sites["A"].ledger.path
    whole, there = path.read_bytes(), run.sites["A"].ledger.lines
    measured = (whole.index(b'"extra"'), whole.index(b"\n"))  # figures that nothing depends on
    for at in range(len(whole.splitlines()[0]) + 1):
        if not measured[0] + 8 < at < measured[1]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
            damaged = RoundLedger(path.parent)
            assert damaged.damage and damaged.lines == [] and "line 1 of" in damaged.damage, whole[at:][:20]
    assert there
