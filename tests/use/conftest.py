"""A small trained run."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.data.manifest import TOKENIZER
from argosy.launch import run_folder
from argosy.parallel.world import World
from tiny import EAGER, run_config, train_in


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, as the launcher leaves it."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    run_dir.mkdir()
    run = run_config(corpus, model={"max_seq_len": 128}, train={"steps": 40})
    run_folder.write(run_dir, run, EAGER, corpus / TOKENIZER)
    train_in(World(), run, EAGER, run_dir)
    return run_dir
