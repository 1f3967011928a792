from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.stream import TokenSource, spread_windows
from argosy.errors import DataError, UserError
from data.conftest import MakeFolder, damage, write_folder


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
