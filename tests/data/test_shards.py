from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.manifest import CHECKSUM_BLOCK_BYTES, BlockChecksums, write_checksums
from argosy.data.shards import ShardIndex, ShardReader, ShardWriter, TokenSource, spread_windows, token_dtype
from argosy.errors import DataError, UserError
from data.conftest import MakeFolder, damage, write_folder

U16 = np.dtype("<u2")


def test_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train-00000", U16)
    writer.write(np.array([7, 8, 0, 9, 0]), np.array([3, 2]))
    writer.write(np.array([5, 0]), np.array([2]))
    shard = writer.close(text_bytes=4)
    assert (tmp_path / "train-00000.bin").read_bytes() == struct.pack("<7H", 7, 8, 0, 9, 0, 5, 0)
    assert (tmp_path / "train-00000.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QB", 1, 8)  # version, code of uint16
        + struct.pack("<QQ", 3, 4)  # sequences, document indices
        + struct.pack("<3i", 3, 2, 2)  # lengths
        + struct.pack("<3q", 0, 6, 10)  # byte offsets
        + struct.pack("<4q", 0, 1, 2, 3)  # documents
    )
    assert (shard.tokens, shard.documents, shard.text_bytes) == (7, 3, 4)


def test_megatron_shard_with_documents_of_several_sequences_is_read(tmp_path: Path) -> None:
    tokens = np.arange(10, dtype="<i4")
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    body = struct.pack("<3i3q3q", 4, 4, 2, 0, 16, 32, 0, 2, 3)
    (tmp_path / "a.idx").write_bytes(header + body)
    index = ShardIndex.read(tmp_path / "a.idx")
    assert index.tokens == 10 and index.documents.tolist() == [0, 2, 3]
    reader = ShardReader(tmp_path / "a.bin", index.dtype, vocab_size=10)
    assert reader.tokens(3, 7).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(("vocab_size", "name"), [(65_499, "uint16"), (65_500, "int32"), (200_000, "int32")])
def test_dtype_follows_megatrons_threshold(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_no_file_has_its_final_name_before_close(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train-00000", U16)
    writer.write(np.array([1, 2]), np.array([2]))
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.bin.partial"]
    writer.close(0)
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".crc32"}


def test_closed_shard_has_its_names_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "train-00000", U16)
    writer.write(np.array([1, 2]), np.array([2]))
    synced: list[set[str]] = []

    def note_names_of_folder(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink() == tmp_path:
            synced.append({path.name for path in tmp_path.iterdir()})

    monkeypatch.setattr(os, "fsync", note_names_of_folder)
    writer.close(0)
    assert synced[-1] == {"train-00000.bin", "train-00000.idx", "train-00000.crc32"}


def test_abandoned_shard_leaves_nothing(tmp_path: Path) -> None:
    ShardWriter(tmp_path / "train-00000", U16).abandon()
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(0, 3 * CHECKSUM_BLOCK_BYTES), max_size=6))
def test_block_checksums_do_not_depend_on_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    data = bytes(i % 251 for i in range(1000)) * (sum(sizes) // 1000 + 1)
    checksums, start = BlockChecksums(), 0
    for size in sizes:
        checksums.update(data[start : start + size])
        start += size
    path = tmp_path_factory.mktemp("crc") / "a.crc32"
    checksums.write(path)
    expected = [
        zlib.crc32(data[:start][at : at + CHECKSUM_BLOCK_BYTES]) for at in range(0, start, CHECKSUM_BLOCK_BYTES)
    ]
    assert np.fromfile(path, "<u4").tolist() == expected


def three_blocks(tmp_path: Path) -> Path:
    writer = ShardWriter(tmp_path / "train-00000", U16)
    tokens = np.arange(3 * CHECKSUM_BLOCK_BYTES // 2) % 500
    writer.write(tokens, np.array([len(tokens)]))
    writer.close(0)
    return tmp_path / "train-00000.bin"


def test_flipped_bit_is_found_before_its_tokens_are_used(tmp_path: Path) -> None:
    path = three_blocks(tmp_path)
    damage(path, CHECKSUM_BLOCK_BYTES + 5)
    reader = ShardReader(path, U16, vocab_size=500)
    block = CHECKSUM_BLOCK_BYTES // 2
    assert len(reader.tokens(0, block)) == block
    with pytest.raises(
        DataError, match=rf"train-00000\.bin: the block at byte {CHECKSUM_BLOCK_BYTES} .*[Rr]estore the file"
    ):
        reader.tokens(block - 1, block + 1)


def test_block_is_checked_once(tmp_path: Path) -> None:
    path = three_blocks(tmp_path)
    reader = ShardReader(path, U16, vocab_size=500)
    reader.tokens(0, 10)
    with path.open("r+b") as file:
        file.write(b"\xff")
    assert len(reader.tokens(0, 10)) == 10


def test_without_checksums_a_shard_is_read_unchecked(tmp_path: Path) -> None:
    path = three_blocks(tmp_path)
    path.with_suffix(".crc32").unlink()
    damage(path, 2)
    assert len(ShardReader(path, U16, vocab_size=500).tokens(0, 10)) == 10


def test_token_outside_the_vocabulary_names_the_shard(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-00000\.bin.*token 499.*499 tokens"):
        ShardReader(three_blocks(tmp_path), U16, vocab_size=499).tokens(0, 10)


def test_checksums_of_another_length_are_refused(tmp_path: Path) -> None:
    path = three_blocks(tmp_path)
    path.with_suffix(".crc32").write_bytes(b"\0" * 8)
    with pytest.raises(DataError, match="2 checksums for 3 blocks"):
        ShardReader(path, U16, vocab_size=500)


def test_checksums_can_be_written_later(tmp_path: Path) -> None:
    path = three_blocks(tmp_path)
    at_once = path.with_suffix(".crc32").read_bytes()
    write_checksums(path)
    assert path.with_suffix(".crc32").read_bytes() == at_once


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"hello", "must begin with MMIDIDX"), (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 9, 9), "34 bytes; expected")],
)
def test_broken_index_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(UserError, match=message):
        ShardIndex.read(tmp_path / "a.idx")


def test_index_of_a_shorter_bin_is_refused(tmp_path: Path) -> None:
    path = three_blocks(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train-00000\.bin: \d+ bytes, but its \.idx says"):
        ShardIndex.read(path.with_suffix(".idx"))


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_shards_are_one_stream(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_json: Path, lengths: list[list[int]], data: st.DataObject
) -> None:
    stream = list(range(sum(map(sum, lengths))))
    tokens = iter(np.array(stream) % 300)
    shards = [[[next(tokens) for _ in range(n)] for n in shard] for shard in lengths]
    source = TokenSource(write_folder(tmp_path_factory.mktemp("s") / "a", tokenizer_json, train=shards))
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream) + 5))
    assert source.tokens(start, stop).tolist() == stream[start:stop]


def test_windows_share_their_last_token_and_drop_the_tail(make_folder: MakeFolder) -> None:
    source = TokenSource(make_folder("a", train=[[[0, 1, 2, 3]], [[4, 5, 6, 7, 8]], [[9, 10, 11]]]))
    assert source.windows(4) == 2 and source.windows(11) == 1
    rows = np.empty((2, 5), np.int32)
    source.read_windows(np.array([1, 0]), rows)
    assert rows.tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]


def test_bytes_per_token_come_from_the_manifest(make_folder: MakeFolder) -> None:
    assert TokenSource(make_folder("a", train=[[[1, 2, 0]]])).text_bytes_per_token == 3


def test_too_short_a_split_says_what_would_do(make_folder: MakeFolder) -> None:
    source = TokenSource(make_folder("a", train=[[[1, 2, 3, 0]]]))
    assert source.windows(3) == 1
    with pytest.raises(UserError, match=r"data\.seq_len = 4: .*has only 4 tokens.*seq_len = 3 or less"):
        source.windows(4)
    with pytest.raises(
        UserError, match=r"validation split .* has only 0 tokens.*Try a larger validation_fraction, or more text"
    ):
        source.held_out().windows(4)


def test_damage_surfaces_when_its_window_is_read(make_folder: MakeFolder) -> None:
    folder = make_folder("a", train=[[[1, 2, 3, 0]], [[4, 5, 6, 0]]])
    damage(folder / "train-00001.bin", 0)
    source = TokenSource(folder)
    assert source.tokens(0, 4).tolist() == [1, 2, 3, 0]
    with pytest.raises(DataError, match=r"train-00001\.bin"):
        source.tokens(3, 5)


def test_spread_windows_cover_the_split_evenly(make_folder: MakeFolder) -> None:
    held_out = TokenSource(make_folder("a", train=[[[1, 0]]], validation=[[list(range(101))]])).held_out()
    assert spread_windows(held_out, 10, 50)[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert len(spread_windows(held_out, 10, 10**9)) == 10
    assert len(spread_windows(held_out, 10, 1)) == 1
