"""The page of `argosy watch` for a run of several sites, in a real browser."""

from __future__ import annotations

import json

import pytest

from browser import chromium, look, serve
from commands import Folder
from several_sites import SitesOfARun

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.mark.parametrize("sync", [{"wire": "int8"}, {"every_steps": 4, "fragments": 2, "overlap_steps": 1}], ids=str)
def test_what_sites_sent_and_each_site_s_part_are_shown(folder: Folder, sync: dict[str, object]) -> None:
    with chromium() as browser:  # first of all: nothing is trained where there is none
        run = SitesOfARun(folder, steps=STEPS, sync=sync)
        for name in run.names:
            run.start(name)
        run.end()
        with serve(folder.path / "runs") as base, look(browser, base) as watched:
            page = watched.open()
            for name in run.names:
                assert page.locator("table.runs tr", has_text=f"tiny/sites/{name}").count() == 1
            for name in run.names:
                page = watched.open(f"?run=tiny/sites/{name}", view="time")
                card = page.locator("section.card", has_text="Sites agree in fewer bytes")
                card.wait_for()
                rounds = rounds_told(run, name)
                told = " ".join(card.inner_text().split())
                for figure in ("Sent each time", "Waited each time", "Of the bytes of exact fp32 sums",
                               "Steps since they had agreed", "Distance between them"):  # fmt: skip
                    assert figure in told
                for other in run.names:
                    row = card.locator("tr", has=page.locator(f"td:text-is('{other}'), th:text-is('{other}')"))
                    assert f"{rounds} of {rounds} rounds" in " ".join(row.inner_text().split())
                page = watched.open(f"?run=tiny/sites/{name}", view="events")
                assert page.locator('[data-event="site_connected"]').count()
            assert not watched.complaints


def rounds_told(run: SitesOfARun, name: str) -> int:
    """Rounds that the site's metrics have a line of: of several that are made at once they tell the last."""
    lines = (run.path(name) / "metrics.jsonl").read_text().splitlines()
    return sum("sites" in json.loads(line) for line in lines)
