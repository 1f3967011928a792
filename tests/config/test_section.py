"""What keys mean is read from the source, in several threads too."""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from argosy.config.launch import LaunchConfig
from argosy.config.section import texts_under_names


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
