"""Another run file is taken where it leaves the rounds that were made as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.sync.layout import Sites
from argosy.sync.ledger import Contribution, RoundLedger, next_line
from argosy.sync.length import check_length
from one_site import run_of

STREAMING = {"every_steps": 4, "fragments": 2}


def of_length(run: RunConfig, steps: int) -> RunConfig:
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})


def made(folder: Path, sync: dict[str, Any], steps: int, rounds: int) -> RunConfig:
    """The run of so many steps of a site whose folder this is, with so many rounds in its ledger."""
    run = of_length(run_of(Path("/corpus"), sync), steps)
    save_run(run, folder / "run.toml")
    sites, ledger = Sites.of(run, folder), RoundLedger(folder)
    sites.folder.mkdir()
    for _ in range(rounds):
        delivered = {name: Contribution(64, []) for name in sites.names}
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
    check_length(tmp_path, of_length(made(tmp_path, sync, steps, rounds), asked), 0)


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
        check_length(tmp_path, run, 0)


def test_what_was_left_for_the_last_round_counts_as_made(tmp_path: Path) -> None:
    run = made(tmp_path, STREAMING, 8, 3)
    Sites.of(run, tmp_path).about(3).write_text("{}")
    check_length(tmp_path, run, 0)
    with pytest.raises(UserError, match="has made round 3"):
        check_length(tmp_path, of_length(run, 20), 0)


def test_a_new_site_has_nothing_to_keep(tmp_path: Path) -> None:
    check_length(tmp_path, run_of(Path("/corpus"), STREAMING), 0)


def with_keys(run: RunConfig, table: str, **keys: Any) -> RunConfig:
    values = run.model_dump(mode="json")
    values[table] |= keys
    return RunConfig.model_validate(values)


def with_batches(run: RunConfig, **batches: int) -> RunConfig:
    sites = tuple(site.model_copy(update={"batch": batches[site.name]}) for site in run.sites)
    train = run.train.model_copy(update={"global_batch": batches["A"]})
    return run.model_copy(update={"sites": sites, "train": train})


OTHERS = {
    "sync.every_steps": lambda run: with_keys(run, "sync", every_steps=6),
    "sync.fragments": lambda run: with_keys(run, "sync", every_steps=8, fragments=2),
    "sync.from_step": lambda run: with_keys(run, "sync", from_step=2),
    "sync.overlap_steps": lambda run: with_keys(run, "sync", overlap_steps=2),
    "sync.mixing": lambda run: with_keys(run, "sync", mixing=0.5),
    "sync.wire": lambda run: with_keys(run, "sync", wire="int8"),
    "sync.outer_lr": lambda run: with_keys(run, "sync", outer_lr=0.1),
    "sync.outer_momentum": lambda run: with_keys(run, "sync", outer_momentum=0.1),
    "sites.B.batch": lambda run: with_batches(run, A=run.sites[0].batch, B=run.sites[1].batch + 2),
}


@pytest.mark.parametrize("key", OTHERS)
def test_whatever_key_changes_a_round_that_was_made_is_refused(tmp_path: Path, key: str) -> None:
    run = made(tmp_path, {"every_steps": 4}, 16, 2)
    with pytest.raises(UserError, match=rf"{key} = .* has made round 0 .*--accept-changes does not .*Keep .*{key} = "):
        check_length(tmp_path, OTHERS[key](run), 8)


@pytest.mark.parametrize("key", OTHERS)
def test_before_the_first_round_they_may_change(tmp_path: Path, key: str) -> None:
    check_length(tmp_path, OTHERS[key](made(tmp_path, {"every_steps": 4}, 16, 0)), 0)


def test_what_is_of_later_rounds_only_may_change(tmp_path: Path) -> None:
    run = made(tmp_path, {"every_steps": 4, "from_step": 3}, 16, 2)
    check_length(tmp_path, with_keys(run, "sync", every_steps=2), 2)
    check_length(tmp_path, with_keys(run, "sync", from_step=5), 2)
    check_length(tmp_path, with_keys(run, "sync", patience_s=7.0, quorum=1), 2)


def test_a_round_that_is_begun_is_not_cut_short(tmp_path: Path) -> None:
    run = made(tmp_path, {"every_steps": 8}, 16, 0)
    check_length(tmp_path, with_keys(run, "sync", every_steps=4), 4)
    with pytest.raises(UserError, match=r"sync.every_steps = 4: .* is at step 6, within round 0, .*Keep"):
        check_length(tmp_path, with_keys(run, "sync", every_steps=4), 6)


def test_a_fragment_that_was_on_its_way_may_be_sent_again(tmp_path: Path) -> None:
    run = made(tmp_path, STREAMING | {"overlap_steps": 1}, 16, 0)
    check_length(tmp_path, of_length(run, 20), 3)  # the first round ends after step 2 and is merged after step 3
    with pytest.raises(UserError, match=r"overlap_steps = 0: .* is at step 3, within round 0"):
        check_length(tmp_path, with_keys(run, "sync", overlap_steps=0), 3)


def test_a_damaged_line_is_of_a_round_that_was_made(tmp_path: Path) -> None:
    run = made(tmp_path, {"every_steps": 4}, 16, 1)
    path = RoundLedger(tmp_path).path
    path.write_bytes(path.read_bytes().replace(b'"round"', b'"sound"'))
    with pytest.raises(UserError, match="has made round 0"):
        check_length(tmp_path, with_keys(run, "sync", every_steps=2), 4)
