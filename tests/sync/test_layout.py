"""Which server holds which parameters, and how runs are told apart."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from argosy.config.sync import SiteConfig, SyncConfig
from argosy.plan.plan import is_asynchronous
from argosy.sync.layout import ServerLayout, dealt_out, is_server
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


def test_a_site_may_not_be_called_as_a_server_is():
    with pytest.raises(ValueError, match="parameter server"):
        run_config(Path("corpus")).model_validate(
            {**run_config(Path("corpus")).model_dump(), "sites": [{"name": "A"}, {"name": "server-1"}]}
        )
