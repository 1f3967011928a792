"""What tests of training share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argosy.observe.heartbeat import UNREAD
from argosy.parallel.world import World
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal
from argosy.training.trainer import Trainer
from tiny import eager, run_config


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path) -> Callable[..., Trainer]:
    """Make a trainer of a single process, restored or initialized."""

    def make(plan: str = "", survivor: Survivor | None = None, **sections: dict[str, Any]) -> Trainer:
        run = run_config(corpus, **{"evaluate": {"every_steps": 0}, **sections})
        made = Trainer(run, eager(plan), World(), tmp_path, StopSignal(), survivor or Survivor(), UNREAD)
        made.restore_or_initialize()
        return made

    return make
