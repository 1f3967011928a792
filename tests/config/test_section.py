"""What keys mean is read from the source, in several threads too."""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.config.section import count_of, texts_under_names


@pytest.fixture
def _threads_take_turns() -> Any:
    """Another thread goes on at every garbage collection, of which there are many: as a busy machine may have it."""

    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(200)
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(give_way)
    yield
    gc.callbacks.remove(give_way)
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("_threads_take_turns")
def test_many_threads_may_ask_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: texts_under_names(LaunchConfig), range(40)))
    assert all(texts == found[0] for texts in found) and "coordinator" in found[0]


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("30k", 30_000),
        ("161B", 161_000_000_000),
        ("161b", 161_000_000_000),
        ("1T", 10**12),
        ("4.1M", 4_100_000),
        ("14.8T", 14_800_000_000_000),
        ("1e6", 1_000_000),
        ("1_000", 1000),
        ("-3k", -3000),
        (".5", 0.5),
        ("0.0015k", 1.5),
    ],
)
def test_a_count_is_the_number_that_it_says(word, count):
    found = count_of(word)
    assert found == count and type(found) is type(count)


@pytest.mark.parametrize("word", ["", "k", "1X", "1kk", "T1", "1 2", "1e999"])
def test_what_is_no_number_is_refused(word):
    with pytest.raises(ValueError, match=r"is no number|is too large"):
        count_of(word)


def test_a_copy_has_other_values_of_keys_at_any_depth_and_all_else() -> None:
    run = RunConfig()
    sources = {"mine": 2.0}
    found = run.with_keys(plan="tp=2", train={"steps": 7}, data={"sources": sources, "prepare": {"seq_len": 9}})
    dumped = run.model_dump()
    dumped["plan"], dumped["train"]["steps"] = "tp=2", 7
    dumped["data"] |= {"sources": sources}
    dumped["data"]["prepare"]["seq_len"] = 9
    assert found.model_dump() == dumped and run == RunConfig()
    assert run.with_keys(train=found.train).train.steps == 7
