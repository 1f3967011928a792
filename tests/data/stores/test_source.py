"""Batches out of a store are those of the local folder, bit for bit, whatever the cache holds, loses or is harmed."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

from argosy.config.data import CacheConfig
from argosy.config.train import BatchSizes
from argosy.data.loader import OpenData, open_data
from argosy.data.manifest import CHECKSUM_BLOCK_BYTES
from argosy.data.shards import BadShard, TokenSource
from argosy.data.stores.cache import Cache
from argosy.data.stores.folder import StoreFolder
from argosy.data.stores.source import StoreSource, stores_of
from argosy.data.stores.store import Store
from argosy.errors import ArgosyWarning, DataError, Retryable, UserError
from data.stores.conftest import Data

ROWS = 8
STEPS = 40


def check_same(data: Data, prepared: Path, blocks: float, rows: slice = slice(0, ROWS)) -> OpenData:
    """Compare batches of the store with those of the disk, also after a jump and with samples left out."""
    local, stored = (open_data(data(place, blocks), 0, ROWS) for place in (str(prepared), f"file://{prepared}"))
    loaders = local.loader(rows), stored.loader(rows)
    for step in [*range(STEPS), *range(5000, 5010)]:
        here, there = (loader.batch(step) for loader in loaders)
        assert np.array_equal(here, there), step
    for loader in loaders:
        loader.skip([(3, 40)])
    for step in range(10):
        here, there = (loader.batch(step) for loader in loaders)
        assert np.array_equal(here, there), step
    for loader in loaders:
        loader.close()
    return stored


@pytest.mark.parametrize(
    "blocks", [100, pytest.param(4.5, marks=pytest.mark.slow), 1.5], ids=["all of it", "half", "one block"]
)
def test_batches_are_those_of_the_local_folder(data: Data, prepared: Path, blocks: float, tmp_path: Path) -> None:
    check_same(data, prepared, blocks)
    assert len(list((tmp_path / "cache/shards").glob("*/0*[0-9]"))) <= blocks


def test_each_rank_reads_its_rows(data: Data, prepared: Path) -> None:
    check_same(data, prepared, 100, slice(2, 5))


def test_batches_that_grow_are_fetched_ahead_as_well(data: Data, prepared: Path) -> None:
    sizes = BatchSizes(8, ((3, 2), (9, 4)))
    local, stored = (open_data(data(place), 0, sizes) for place in (str(prepared), f"file://{prepared}"))
    loaders = local.loader(slice(4, 8)), stored.loader(slice(4, 8))
    places, steps = loaders[1].samples_of_steps(1, 12)
    for step in range(40):
        here, there = (loader.batch(step) for loader in loaders)
        assert np.array_equal(here, there), step
        if 1 <= step < 12:
            assert np.array_equal(places.windows[steps == step], loaders[1].samples(step).windows)
    for loader in loaders:
        loader.close()


def test_two_runs_share_one_cache(data: Data, prepared: Path) -> None:
    first = check_same(data, prepared, 100)
    second = check_same(data, prepared, 100)
    assert stores_of(first.sources)[0].fetched_bytes
    assert not stores_of(second.sources)[0].fetched_bytes
    before, after = first.cache_counts(), second.cache_counts()
    assert before["fetched_bytes"] and after["hits"] and not after["misses"]  # a loader reads some steps ahead


def test_runs_at_the_same_time_share_a_cache_that_is_too_small_for_them(data: Data, prepared: Path) -> None:
    loaders = []
    for seed in (0, 1):
        for place in (str(prepared), f"file://{prepared}"):
            loaders.append(open_data(data(place, 4.5), seed, ROWS).loader(slice(0, ROWS)))
    for step in range(60):
        one, stored_one, other, stored_other = (loader.batch(step) for loader in loaders)
        assert np.array_equal(one, stored_one), step
        assert np.array_equal(other, stored_other), step
    for loader in loaders:
        loader.close()


def test_held_out_text_is_the_same(cache: Cache, prepared: Path) -> None:
    stored = StoreSource(StoreFolder(f"file://{prepared}", cache)).held_out()
    assert np.array_equal(stored.tokens(0, 3000), TokenSource(prepared, "validation").tokens(0, 3000))


def test_a_block_damaged_in_the_cache_is_fetched_again(cache: Cache, prepared: Path) -> None:
    local = TokenSource(prepared)
    for harm in (lambda path: path.write_bytes(bytes(CHECKSUM_BLOCK_BYTES)), lambda path: path.write_bytes(b"")):
        StoreSource(StoreFolder(f"file://{prepared}", cache)).tokens(0, 1000)
        [path] = (cache.folder / "shards").glob("*/0000000")
        harm(path)
        source = StoreSource(StoreFolder(f"file://{prepared}", cache))
        assert np.array_equal(source.tokens(0, 1000), local.tokens(0, 1000))
        assert source.store_folder.news[0][0] == "block_damaged"


def test_checksums_damaged_in_the_cache_are_fetched_again(cache: Cache, prepared: Path) -> None:
    StoreSource(StoreFolder(f"file://{prepared}", cache)).tokens(0, 1000)
    for path in (cache.folder / "shards").glob("*/crc32"):
        path.write_bytes(bytes(path.stat().st_size))
    source = StoreSource(StoreFolder(f"file://{prepared}", cache))
    assert np.array_equal(source.tokens(0, 1000), TokenSource(prepared).tokens(0, 1000))


def test_a_block_that_is_damaged_in_the_store_names_its_shard(cache: Cache, prepared: Path) -> None:
    path = prepared / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    source = StoreSource(StoreFolder(f"file://{prepared}", cache))
    source.tokens(0, 1000)
    with pytest.raises(BadShard, match=r"train-00000\.bin: the block at byte 1310720 .* fetched 3 times") as bad:
        source.tokens(len(source) // 7 * 4, len(source))
    assert bad.value.place == (f"file://{prepared}", 0)


def test_a_block_of_which_less_came_than_there_is_is_fetched_again(
    cache: Cache, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_range, asked = Store.get_range, list[int]()

    def short(store: Store, name: str, start: int, stop: int) -> bytes:
        asked.append(start)
        if len(asked) == 1:
            raise FileNotFoundError(f"{name}: has no bytes {start} to {stop}")
        return get_range(store, name, start, stop)

    monkeypatch.setattr(Store, "get_range", short)
    read = StoreSource(StoreFolder(prepared.as_uri(), cache), "train").tokens(0, 10)
    assert read.tolist() == TokenSource(prepared, "train").tokens(0, 10).tolist() and asked == [0, 0]


def test_a_shard_without_checksums_of_its_blocks_is_read_once_as_a_whole(cache: Cache, prepared: Path) -> None:
    for path in prepared.glob("*.crc32"):
        path.unlink()
    source, local = StoreSource(StoreFolder(f"file://{prepared}", cache)), TokenSource(prepared)
    assert np.array_equal(source.tokens(0, len(source)), local.tokens(0, len(local)))
    (prepared / "train-00000.bin").write_bytes(bytes(local.manifest.splits["train"][0].tokens * 2))
    shutil.rmtree(cache.folder / "shards")
    with pytest.raises(DataError, match="does not match its checksum"):
        StoreSource(StoreFolder(f"file://{prepared}", cache)).tokens(0, 10)


def test_a_shard_that_is_too_short_is_found_when_the_folder_is_opened(cache: Cache, prepared: Path) -> None:
    path = prepared / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"train-00001\.bin has \d+ bytes instead of"):
        StoreFolder(f"file://{prepared}", cache, check_shards=True)


def test_a_folder_that_was_prepared_anew_is_noticed(cache: Cache, prepared: Path) -> None:
    before = StoreFolder(f"file://{prepared}", cache).manifest
    text = (prepared / "manifest.json").read_text()
    (prepared / "manifest.json").write_text(text.replace('"documents": 1', '"documents": 7', 1))
    assert StoreFolder(f"file://{prepared}", cache).manifest != before


def test_a_manifest_damaged_on_its_way_is_asked_for_again(
    cache: Cache, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = Store.get_newer, []

    def damaged(store: Store, name: str, etag: str, most_bytes: int) -> tuple[bytes, str] | None:
        asked.append(etag)
        found = real(store, name, etag, most_bytes)
        return (found[0][:-3], found[1]) if found and len(asked) < 3 else found

    monkeypatch.setattr(Store, "get_newer", damaged)
    assert StoreFolder(f"file://{prepared}", cache).manifest.vocab_size == 300
    assert asked == ["", "", ""]


def test_a_folder_that_is_not_prepared_says_how_to(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no prepared data here"):
        StoreFolder(f"file://{tmp_path}/empty", cache)


def test_a_store_that_is_away_is_waited_for_no_longer_than_the_limit(
    cache: Cache, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.data.stores.folder.OPEN_S", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "whoever")
    with pytest.raises(Retryable, match=r"s3://bucket/x cannot be reached") as away:
        StoreFolder("s3://bucket/x", cache)
    assert "whoever" not in str(away.value)
    here = StoreFolder(f"file://{prepared}", cache)
    there = cache.folder / "folders" / StoreFolder.folder_name("s3://bucket/x")
    shutil.copytree(here.local, there, dirs_exist_ok=True)
    with pytest.warns(ArgosyWarning, match="going on with what"):
        folder = StoreFolder("s3://bucket/x", cache)
    cache.timeout_s = 0.3
    with pytest.raises(Retryable, match=r"has not answered for 0 s, more than data\.cache\.timeout_s"):
        StoreSource(folder).tokens(0, 10)
    assert [name for name, _ in folder.news] == ["store_unreachable"]


def test_a_full_disk_leaves_the_batches_as_they_are(
    data: Data, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Cache, "keep", refuse)
    opened = check_same(data, prepared, 100)
    assert "cache_full" in [name for name, _ in opened.news()]


def test_without_a_descriptor_left_the_cache_stays_as_large_as_it_is(
    data: Data, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Cache, "keep", refuse)
    opened = check_same(data, prepared, 100)
    assert "cache_full" not in [name for name, _ in opened.news()]


def test_the_default_folder_is_that_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert CacheConfig().path == Path("/fast/argosy/data")
