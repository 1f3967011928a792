"""Streams race if nothing orders their uses of one memory; an event, or a wait of the host, does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.simulate.device_watch import DEFAULT, PACKAGE, DeviceWatch, place_in_code

SIDE = "side stream"


@pytest.fixture
def watch():
    watch = DeviceWatch()
    with watch.counting("step"):
        yield watch


@pytest.fixture
def memory() -> Tensor:
    return torch.empty(4)


@pytest.mark.parametrize(("first", "second", "races"), [
    ("write", "read", 1), ("read", "write", 1), ("write", "write", 1), ("read", "read", 0),
])  # fmt: skip
def test_two_uses_of_which_one_writes_race(watch, memory, first, second, races):
    for stream, use in ((DEFAULT, first), (SIDE, second)):
        watch.streams.ran(stream, [memory] if use == "read" else [], [memory] if use == "write" else [])
    assert watch.races.total() == races


def test_uses_in_one_stream_are_in_order(watch, memory):
    for _ in range(2):
        watch.streams.ran(DEFAULT, [], [memory])
        watch.streams.ran(DEFAULT, [memory], [])
    assert not watch.races


def test_an_event_orders_them_for_the_stream_that_waits_alone(watch, memory):
    watch.streams.ran(DEFAULT, [], [memory])
    watch.streams.wait(SIDE, watch.streams.record(DEFAULT))
    watch.streams.ran(SIDE, [memory], [])
    assert not watch.races
    watch.streams.ran("third stream", [memory], [])
    assert watch.races.total() == 1


def test_an_event_carries_nothing_of_what_comes_after_it(watch, memory):
    event = watch.streams.record(DEFAULT)
    watch.streams.ran(DEFAULT, [], [memory])
    watch.streams.wait(SIDE, event)
    watch.streams.ran(SIDE, [memory], [])
    assert watch.races.total() == 1


def test_a_wait_of_the_host_orders_all_that_it_starts_later(watch, memory):
    watch.streams.ran(DEFAULT, [], [memory])
    watch.host_waits("copies to the host")
    watch.streams.ran(SIDE, [memory], [])
    assert not watch.races and [found.what for found in watch.host_syncs] == ["copies to the host"]


def test_nothing_is_counted_outside_of_a_part():
    watch = DeviceWatch()
    watch.host_waits("copies")
    assert not watch.host_syncs


def test_the_place_is_the_innermost_line_of_the_package_that_is_none_of_the_tools_own():
    outer = "def outer(inner):\n    return inner()\n"
    inner = "def inner():\n\n    return place()\n"
    found: dict[str, Any] = {"place": place_in_code}
    exec(compile(outer, f"{PACKAGE}training/step.py", "exec"), found)
    exec(compile(inner, f"{PACKAGE}simulate/fake.py", "exec"), found)
    assert found["outer"](found["inner"]) == "training/step.py:2"
