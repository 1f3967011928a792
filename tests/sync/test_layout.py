"""Which server holds which parameters, and how runs are told apart."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from argosy.config.sync import SiteConfig, SyncConfig
from argosy.plan.plan import is_asynchronous
from argosy.processes.connection import BadMessage
from argosy.sync.layout import (
    AdoptedState,
    LeftChange,
    ServerLayout,
    Sites,
    dealt_out,
    is_server,
    read_record,
    write_record,
)
from one_site import run_of
from tiny import run_config


def test_every_parameter_is_on_one_server_and_servers_hold_about_as_much():
    shapes = {f"p{i}": (i + 1, 3) for i in range(20)}
    flats = dealt_out(shapes, 3)
    assert sorted(name for flat in flats for name in flat.shapes) == sorted(shapes)
    sizes = [flat.elements for flat in flats]
    assert sum(sizes) == sum(prod(shape) for shape in shapes.values())
    assert max(sizes) <= 4 / 3 * sum(sizes) / 3


def asynchronous(**sync):
    sites = (SiteConfig(name="A"), SiteConfig(name="B"))
    run = run_config(Path("corpus"))
    return run.model_copy(update={"plan": "auto,sync=async", "sites": sites, "sync": SyncConfig(**sync)})


def test_runs_that_train_otherwise_have_another_identity():
    run = asynchronous(servers=("a:1",))
    same = run.model_copy(update={"site": "A", "sync": SyncConfig(servers=("b:2",), patience_s=3)})
    assert ServerLayout(run).identity == ServerLayout(same).identity
    for other in (
        run.model_copy(update={"seed": 1}),
        run.model_copy(update={"sync": SyncConfig(servers=("a:1",), wire="int8")}),
        run.model_copy(update={"sync": SyncConfig(servers=("a:1",), local_steps=2)}),
        run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"lr": 0.5})}),
    ):
        assert ServerLayout(other).identity != ServerLayout(run).identity
    assert ServerLayout(asynchronous(shards=2)).model != ServerLayout(asynchronous(shards=1)).model


def test_the_parts_of_a_run_are_told_apart():
    run = asynchronous(servers=("localhost:7100", "oslo.example:7101"))
    assert ServerLayout(run).servers == 2
    assert ServerLayout(run).addresses == {"server-1": ("localhost", 7100), "server-2": ("oslo.example", 7101)}
    assert is_asynchronous(run.plan)
    assert not is_server(run)
    assert is_server(run.model_copy(update={"site": "server-2"}))
    assert not is_asynchronous("auto")


@pytest.mark.parametrize(
    ("pause", "sync", "due"),
    [
        (0, {}, 4),
        (20, {}, 4),
        (12, {}, 3),
        (11, {}, 2),
        (3, {}, 0),
        (3, {"from_step": 5}, 3),
        (9, {"overlap_steps": 2}, 1),
    ],
)
def test_a_site_that_pauses_needs_the_rounds_before(pause: int, sync: dict[str, int], due: int) -> None:
    run = run_of(Path("corpus"), {"every_steps": 4, **sync}).with_keys(train={"steps": 16, "pause_at": pause})
    assert Sites(run, Path()).rounds_due == due


def test_a_site_may_not_be_called_as_a_server_is():
    with pytest.raises(ValueError, match="parameter server"):
        run_config(Path("corpus")).model_validate(
            {**run_config(Path("corpus")).model_dump(), "sites": [{"name": "A"}, {"name": "server-1"}]}
        )


def test_what_ranks_and_exchange_tell_each_other_is_read_as_it_was_written(tmp_path: Path) -> None:
    told = LeftChange(tokens=8, skipped=[(0, 4)], needs_round=2)
    write_record(tmp_path / "about.json", told)
    assert read_record(tmp_path / "about.json", LeftChange) == told


@pytest.mark.parametrize("text", ["", '{"rounds": 1}', '{"rounds": 0, "chain": ""}', '{"rounds": 1, "chain": "x"}'])
def test_a_file_that_says_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "adopted.json").write_text(text)
    with pytest.raises(BadMessage):
        read_record(tmp_path / "adopted.json", AdoptedState)


def test_what_an_older_version_left_is_read(tmp_path: Path) -> None:
    (tmp_path / "about.json").write_text('{"tokens": 8, "skipped": [[0, 4]], "needs_round": 2}')
    assert read_record(tmp_path / "about.json", LeftChange).skipped == [(0, 4)]


def test_the_local_steps_of_an_item_have_its_samples_in_order() -> None:
    layout = ServerLayout(asynchronous(servers=("a:1",), local_steps=3))
    steps = [layout.samples_of_step(2, number) for number in range(3)]
    ((first, end),) = layout.samples(2)
    assert [begin for begin, _ in steps] == [first, steps[0][1], steps[1][1]]
    assert steps[-1][1] == end
