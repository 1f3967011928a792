"""What tests of training share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from argosy.observe.heartbeat import UNREAD
from argosy.parallel.world import World
from argosy.training.parts import Parts
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal
from argosy.training.trainer import Trainer
from tiny import eager, prepare_corpus, run_config


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus in several shards, one of which has a flipped bit."""
    folder = prepare_corpus(tmp_path_factory.mktemp("sharded") / "prepared", shard_tokens=90_000)
    shard = sorted(folder.glob("train-*.bin"))[1]
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    return folder


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Make a trainer of a single process, restored or initialized."""
    opened = ExitStack()

    def make(plan: str = "", survivor: Survivor | None = None, **sections: dict[str, Any]) -> Trainer:
        run = run_config(corpus, **{"evaluate": {"every_steps": 0}, **sections})
        made = Trainer(Parts(run, eager(plan), World(), tmp_path, StopSignal(), survivor or Survivor(), UNREAD))
        opened.enter_context(made)
        made.restore_or_initialize()
        return made

    with opened:
        yield make
