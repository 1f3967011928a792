"""Transfers between sites: in pieces, from where they broke off, and never more under way than a link holds."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from argosy.sync.assembly import PulledFile, WantedBytes, read_piece
from argosy.sync.messages import AHEAD_BYTES, MESSAGE_PIECE_BYTES, PieceRequest

SIZE = 2 * MESSAGE_PIECE_BYTES + 100
DATA = bytes(range(256)) * (SIZE // 256 + 1)


def pulled(folder: Path, size: int = SIZE) -> PulledFile:
    return PulledFile(WantedBytes("slice", 3, 1, 4096, size), "B", folder / "slice")


def answer(pull: PulledFile, asked: list[PieceRequest]) -> None:
    for one in asked:
        pull.take(one.at, DATA[one.at : one.at + one.bytes])


def test_all_of_it_comes_in_pieces_that_are_asked_for(tmp_path):
    pull, asked = pulled(tmp_path), list[PieceRequest]()
    pull.ask(asked.append)
    assert [one.at for one in asked] == [0, MESSAGE_PIECE_BYTES, SIZE - 100]
    assert [one.bytes for one in asked] == [MESSAGE_PIECE_BYTES, MESSAGE_PIECE_BYTES, 100]
    assert {(one.what, one.round, one.attempt, one.start) for one in asked} == {("slice", 3, 1, 4096)}
    assert pull.under_way == SIZE and not pull.is_done
    answer(pull, asked)
    assert pull.is_done and pull.under_way == 0 and pull.content() == DATA[:SIZE]
    assert pull.checksum() == zlib.crc32(DATA[:SIZE])


def test_no_more_is_asked_for_than_may_be_under_way(tmp_path):
    pull, asked = pulled(tmp_path, 2 * AHEAD_BYTES), list[PieceRequest]()
    pull.ask(asked.append, others=AHEAD_BYTES - MESSAGE_PIECE_BYTES)
    assert len(asked) == 1
    pull.ask(asked.append, others=AHEAD_BYTES)
    assert len(asked) == 1


def test_a_transfer_goes_on_where_it_broke_off(tmp_path):
    pull, asked = pulled(tmp_path), list[PieceRequest]()
    pull.ask(asked.append)
    answer(pull, asked[:1])
    pull.again()
    assert pull.under_way == 0
    pull.close()
    later, more = pulled(tmp_path), list[PieceRequest]()
    assert later.received == MESSAGE_PIECE_BYTES
    later.ask(more.append)
    assert more[0].at == MESSAGE_PIECE_BYTES
    answer(later, more)
    assert later.content() == DATA[:SIZE]


@pytest.mark.parametrize(("at", "size"), [(1, 10), (0, SIZE + 1)])
def test_a_piece_that_is_not_the_next_or_too_long_is_left_out(tmp_path, at, size):
    pull = pulled(tmp_path)
    pull.take(at, DATA[:1] * size)
    assert pull.received == 0


def test_what_was_not_what_was_sent_is_fetched_anew(tmp_path):
    pull = pulled(tmp_path, 10)
    pull.take(0, b"0123456789")
    pull.forget()
    assert not pull.is_done and pull.content() == b""
    pull.take(0, b"9876543210")
    pull.move(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"9876543210"


@pytest.mark.parametrize(("at", "size", "found"), [(2, 3, b"cde"), (4, 3, None), (0, 6, b"abcdef"), (9, 1, None)])
def test_a_piece_is_read_whole_or_not_at_all(tmp_path, at, size, found):
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_piece(tmp_path / "file", at, size) == found
    assert read_piece(tmp_path / "none", at, size) is None
