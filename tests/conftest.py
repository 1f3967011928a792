"""What several rooms' tests share."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from workers import WorkerPool

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))  # for `workers` and `tiny`, here and in spawned processes
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
# Of BLAS too, and of all that tests start: on matrices this small a second thread waits in a loop for the first.
os.environ["OMP_NUM_THREADS"] = "1"

_STATE = tempfile.TemporaryDirectory(prefix="argosy-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name  # what tests approve is not approved for their user

# How long an example takes says how busy the machine is.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

LONGEST = ("system", "training", "parallel", "models", "simulate", "inference", "sync")
"""Rooms with files of more than 20 s of CPU time, the slowest first: the short files of the others come last, so that
no process works on a long one when the others are done."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Make the process light, and import its share of all test files before it collects them.

    To import a file for the first time is to compile it, which takes as long as all else: each process compiles its
    share and reads the bytecode of the rest, which the others have written.
    """
    share: dict[str, object] = getattr(session.config, "workerinput", {})
    if not share and session.config.getoption("numprocesses", None):
        return  # this process starts the others and tests nothing
    from warm import fork_writers
    from workers import make_the_tests_process_light  # here: it imports torch

    make_the_tests_process_light()
    fork_writers(from_here=False)
    gc.disable()  # a sixth of what collecting the tests takes would be looking for garbage, which it hardly leaves
    if share and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        place, places = int(str(share["workerid"]).removeprefix("gw")), int(str(share["workercount"]))
        for path in sorted(TESTS.rglob("test_*.py"))[place::places]:
            with suppress(Exception, pytest.skip.Exception):  # said when the file is collected
                import_module(".".join(path.relative_to(TESTS).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by room, the longest first; within a room they keep their order."""
    rank = {room: place for place, room in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of garbage collections: a million objects that stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def approvals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take from the environment what one test has approved, before the next."""
    monkeypatch.delenv("ARGOSY_APPROVED_CODE", raising=False)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Gloo processes that any distributed test may use."""
    from workers import WorkerPool

    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real corpus, prepared: the sources of a package, 400-token vocabulary."""
    from shared import made_once
    from tiny import prepare_corpus

    made = made_once(tmp_path_factory, "corpus", lambda folder: prepare_corpus(folder / "prepared"))
    return made / "prepared"


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a tiny model, as the launcher leaves it."""
    from argosy.launch import run_folder
    from argosy.parallel.world import World
    from tiny import EAGER, run_config, train_in

    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    run_dir.mkdir()
    run = run_config(corpus, model={"max_seq_len": 128}, train={"steps": 40})
    run_folder.write(run_dir, run, EAGER, [corpus])
    train_in(World(), run, EAGER, run_dir)
    return run_dir
