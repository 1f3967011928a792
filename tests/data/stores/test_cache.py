"""What is needed last goes first, what is pinned stays, and nothing half-written has a name."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from argosy.config.data import CacheConfig
from argosy.data.manifest import CHECKSUM_BLOCK_BYTES
from argosy.data.stores.cache import Cache, Reader, block_key
from argosy.errors import UserError

SHARD = "ab" * 32


def put(cache: Cache, block: int, due: int = 0) -> bool:
    if not cache.take_room(1, due):
        return False
    with cache.claimed(SHARD, block) as file:
        assert file is not None
        cache.keep(file, SHARD, block, bytes(CHECKSUM_BLOCK_BYTES))
    return True


def plan(cache: Cache, dues: dict[int, int], pinned: int = 0) -> Reader:
    reader = Reader(cache)
    keys = np.array([block_key(SHARD, block) for block in dues], np.uint64)
    reader.write(keys, np.array(list(dues.values()), np.uint32), pinned)
    return reader


def here(cache: Cache) -> list[int]:
    return sorted(cache.present(SHARD).tolist())


def test_the_block_that_is_needed_last_is_evicted(cache: Cache) -> None:
    reader = plan(cache, {0: 5, 1: 90, 2: 7, 3: 50})
    assert all(put(cache, block) for block in range(4))
    assert put(cache, 4, due=20)
    assert here(cache) == [0, 2, 3, 4]
    reader.close()


def test_nothing_is_evicted_for_what_is_needed_later_still(cache: Cache) -> None:
    reader = plan(cache, {0: 5, 1: 9, 2: 7, 3: 8})
    assert all(put(cache, block) for block in range(4))
    assert not put(cache, 4, due=10)
    assert here(cache) == [0, 1, 2, 3]
    reader.close()


def test_no_reader_takes_away_what_another_has_pinned(cache: Cache) -> None:
    one, other = plan(cache, {0: 3, 1: 4}, pinned=4), plan(cache, {2: 1, 3: 2}, pinned=2)
    assert all(put(cache, block) for block in range(4))
    assert not put(cache, 5, due=0)
    one.close()
    assert put(cache, 5, due=0)
    assert {2, 3, 5} <= set(here(cache))
    other.close()


def test_a_dead_process_pins_nothing(cache: Cache) -> None:
    program = (
        "import os, sys, numpy as np\n"
        "from argosy.config.data import CacheConfig\n"
        "from argosy.data.stores.cache import Cache, Reader, block_key\n"
        "reader = Reader(Cache(CacheConfig(folder=sys.argv[1])))\n"
        f"reader.write(np.array([block_key('{SHARD}', b) for b in range(4)], np.uint64), np.zeros(4, np.uint32), 9)\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(cache.folder)], check=False).returncode == 9
    assert len(list((cache.folder / "readers").glob("*.plan"))) == 1
    assert all(put(cache, block) for block in range(5))
    assert not list((cache.folder / "readers").iterdir())


def test_any_number_of_ranks_may_begin_a_new_cache_at_once(tmp_path: Path) -> None:
    def begins(folder: Path) -> None:
        Reader(Cache(CacheConfig(folder=str(folder)))).close()

    with ThreadPoolExecutor(8) as ranks:
        for run in range(20):
            list(ranks.map(begins, [tmp_path / str(run)] * 16))


def test_one_fetches_a_block_while_others_leave_it(cache: Cache) -> None:
    with cache.claimed(SHARD, 0) as mine:
        assert mine is not None
        mine.write(b"half")
        with cache.claimed(SHARD, 0) as theirs:
            assert theirs is None
    assert here(cache) == []
    assert list(cache.path(SHARD, 0).parent.iterdir()) == []


def test_what_a_kill_left_of_a_block_is_written_over(cache: Cache) -> None:
    partial = cache.shard_folder(SHARD) / "0000000.partial"
    partial.write_bytes(b"half of it")
    assert put(cache, 0)
    assert cache.path(SHARD, 0).read_bytes() == bytes(CHECKSUM_BLOCK_BYTES)


def test_a_cache_outlives_its_processes_and_counts_again_what_is_there(cache: Cache, tmp_path: Path) -> None:
    assert all(put(cache, block) for block in range(3))
    (cache.folder / "used").write_text("0")  # as if all died before they had counted
    again = Cache(CacheConfig(folder=str(tmp_path / "cache"), size_gb=4.5 * CHECKSUM_BLOCK_BYTES / 1e9))
    assert here(again) == [0, 1, 2]
    assert put(again, 3)
    assert put(again, 4)
    assert len(here(again)) == 4


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        Cache(CacheConfig(folder=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("mark", [b"", b'{"argosy_cache": 1', b"\xff", b'{"argosy_cache": 2}'])
def test_a_folder_with_another_mark_is_refused(tmp_path: Path, mark: bytes) -> None:
    Cache(CacheConfig(folder=str(tmp_path)))
    (tmp_path / "argosy-cache.json").write_bytes(mark)
    with pytest.raises(UserError, match=r"argosy-cache\.json is damaged, or of another version"):
        Cache(CacheConfig(folder=str(tmp_path)))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache\.folder = .*cannot be written"):
        Cache(CacheConfig(folder=str(tmp_path / "file" / "cache")))
