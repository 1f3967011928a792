"""Another number of steps is taken where it leaves the rounds that were made as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Delivery, Ledger, next_line
from argosy.sync.sites.length import check_length
from one_site import run_of

STREAMING = {"every_steps": 4, "fragments": 2}


def of_length(run: RunConfig, steps: int) -> RunConfig:
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})


def made(folder: Path, sync: dict[str, Any], steps: int, rounds: int) -> RunConfig:
    """The run of so many steps of a site whose folder this is, with so many rounds in its ledger."""
    run = of_length(run_of(Path("/corpus"), sync), steps)
    save_run(run, folder / "run.toml")
    sites, ledger = Sites.of(run, folder), Ledger(folder)
    sites.folder.mkdir()
    for _ in range(rounds):
        delivered = {name: Delivery(64, []) for name in sites.names}
        ledger.append(next_line(sites.shares, ledger.lines, "A", delivered, sites.names, 1, [1], {}))
    return run


@pytest.mark.parametrize(
    ("sync", "steps", "rounds", "asked"),
    [
        pytest.param({"every_steps": 4}, 8, 2, 20, id="the last round was like any other"),
        pytest.param({"every_steps": 4, "from_step": 2}, 10, 4, 20, id="so it was after steps of summed gradients"),
        pytest.param({"every_steps": 4}, 10, 2, 20, id="the last round was not made"),
        pytest.param(STREAMING, 8, 3, 20, id="nor was that of all fragments"),
        pytest.param({"every_steps": 4}, 20, 2, 8, id="shorter, and the new last round is like that which was made"),
    ],
)
def test_a_run_is_made_longer_or_shorter(
    tmp_path: Path, sync: dict[str, Any], steps: int, rounds: int, asked: int
) -> None:
    check_length(tmp_path, of_length(made(tmp_path, sync, steps, rounds), asked))


@pytest.mark.parametrize(
    ("sync", "steps", "rounds", "asked"),
    [
        pytest.param({"every_steps": 4}, 10, 3, 20, id="the last round was short"),
        pytest.param(STREAMING, 8, 4, 20, id="the last round was about all fragments"),
        pytest.param({"every_steps": 4, "overlap_steps": 2}, 8, 2, 20, id="nobody trained on while it travelled"),
        pytest.param({"every_steps": 4}, 20, 3, 10, id="a round was made that would be longer than the run"),
    ],
)
def test_a_round_that_was_made_keeps_its_meaning(
    tmp_path: Path, sync: dict[str, Any], steps: int, rounds: int, asked: int
) -> None:
    run = of_length(made(tmp_path, sync, steps, rounds), asked)
    with pytest.raises(UserError, match=f"train.steps = {asked}: .* has made round .*Keep train.steps = {steps}"):
        check_length(tmp_path, run)


def test_what_was_left_for_the_last_round_counts_as_made(tmp_path: Path) -> None:
    run = made(tmp_path, STREAMING, 8, 3)
    Sites.of(run, tmp_path).about(3).write_text("{}")
    check_length(tmp_path, run)
    with pytest.raises(UserError, match="has made round 3"):
        check_length(tmp_path, of_length(run, 20))


def test_a_new_site_has_nothing_to_keep(tmp_path: Path) -> None:
    check_length(tmp_path, run_of(Path("/corpus"), STREAMING))
