"""A prepared folder of some blocks, and what reads it out of a store on this disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from argosy.config.data import CacheConfig, DataConfig
from argosy.config.schema import RunConfig
from argosy.data.manifest import CHECKSUM_BLOCK_BYTES
from argosy.data.stores.cache import Cache
from data.conftest import MakeFolder

BLOCK_TOKENS = CHECKSUM_BLOCK_BYTES // 2
Data = Callable[..., DataConfig]


@pytest.fixture
def prepared(make_folder: MakeFolder) -> Path:
    """Two train shards of 5 and 3 blocks and a bit, and a held-out one."""
    numbers = np.random.default_rng(0)
    shards = [[numbers.integers(0, 300, int(blocks * BLOCK_TOKENS))] for blocks in (5.1, 2.3)]
    return make_folder("prepared", train=shards, validation=[[numbers.integers(0, 300, 3000)]])


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache of four blocks."""
    return Cache(CacheConfig(folder=str(tmp_path / "cache"), size_gb=4.5 * CHECKSUM_BLOCK_BYTES / 1e9))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """The [data] section of a run."""

    def config(source: str, blocks: float = 100, **more: object) -> DataConfig:
        folder = {"folder": str(tmp_path / "cache"), "size_gb": blocks * CHECKSUM_BLOCK_BYTES / 1e9, "timeout_s": 2}
        section = {"sources": {source: 1.0}, "seq_len": 512, "cache": folder, **more}
        return RunConfig.model_validate({"data": section, "train": {"steps": 1}}).data

    return config
