"""Pieces hold all of the input once, in order, and are small at its beginning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.data import pieces as module
from argosy.data.pieces import LEAST_PIECE_BYTES, MOST_OF_BEFORE, PIECE_BYTES, InputPiece, cut_input
from argosy.data.sources import InputFile

MB = 10**6


def file(name: str, size: int | None) -> InputFile:
    return InputFile(name, None, name, size, "")


@given(st.lists(st.tuples(st.sampled_from(("a.txt", "a.jsonl", "a.jsonl.gz")), st.integers(0, 400) | st.none())))
def test_every_byte_of_every_file_is_in_one_piece(found: list[tuple[str, int | None]]) -> None:
    files = [file(name, size) for name, size in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_PIECE_BYTES", 10)
        pieces = cut_input(files, most_bytes=50)
    at: tuple[int, int | None] = (0, 0)
    for piece in pieces:
        assert (piece.first, piece.from_byte) == at
        at = (piece.end, 0) if piece.to_byte is None else (piece.first, piece.to_byte)
        assert piece.to_byte is None or piece.end == piece.first + 1
    assert at == (len(files), 0)
    whole = [files[piece.first : piece.end] for piece in pieces if piece.end > piece.first + 1]
    assert all(sum(file.size or 0 for file in held) <= 50 for held in whole)


@pytest.mark.parametrize(
    "files", [[file("a.jsonl", 3000 * MB)], [file("a.txt", 20_000)] * 150_000], ids=["one", "many"]
)
def test_pieces_grow_with_what_is_before_them(files: list[InputFile]) -> None:
    pieces, before, least = cut_input(files), 0, 0
    for piece in pieces[:-1]:
        end = 20_000 * piece.end if piece.to_byte is None else piece.to_byte
        size = end - before
        assert least <= size <= min(PIECE_BYTES, max(LEAST_PIECE_BYTES, before * MOST_OF_BEFORE))
        before, least = end, size - 20_000
    assert len(pieces) < 3000 * MB / PIECE_BYTES + 80


def test_a_small_input_is_shared_evenly() -> None:
    assert cut_input([file("a.jsonl", 3 * LEAST_PIECE_BYTES)]) == [
        InputPiece(0, 1, 0, LEAST_PIECE_BYTES),
        InputPiece(0, 1, LEAST_PIECE_BYTES, 2 * LEAST_PIECE_BYTES),
        InputPiece(0, 1, 2 * LEAST_PIECE_BYTES),
    ]
