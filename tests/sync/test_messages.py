"""What comes over the wire is checked; one of two sites that have gone apart gives way, and never both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.processes.connection import BadMessage
from argosy.sync.messages import (
    FROM_PART,
    FROM_SITE,
    ProgressNotice,
    PushPiece,
    SiteProgress,
    framed,
    gives_way,
    unframed,
)

NAMES = ("A", "B")
TOKENS = st.integers(0, 5)


def test_what_is_said_is_understood() -> None:
    said = ProgressNotice(standing=SiteProgress(rounds=3, chain="c" * 16, tokens=12, reached=2, adopts=True))
    assert unframed(framed(said), FROM_SITE) == (said, b"")


@given(TOKENS, TOKENS)
def test_one_gives_way(a: int, b: int) -> None:
    assert gives_way("A", SiteProgress(tokens=a), "B", SiteProgress(tokens=b), NAMES) != gives_way(
        "B", SiteProgress(tokens=b), "A", SiteProgress(tokens=a), NAMES
    )


@given(TOKENS, TOKENS, TOKENS)
def test_who_stands_still_since_it_gave_way_is_not_given_way_to(a: int, later: int, b: int) -> None:
    if gives_way("B", SiteProgress(tokens=b), "A", SiteProgress(tokens=a), NAMES):
        assert not gives_way("A", SiteProgress(tokens=a + later), "B", SiteProgress(tokens=b), NAMES)


def test_a_piece_comes_back_with_its_bytes() -> None:
    said = PushPiece(lease="a-1", at=3)
    assert unframed(framed(said, b"num\nbers"), FROM_PART) == (said, b"num\nbers")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no JSON",
        b"[1]",
        json.dumps({"kind": "exec", "code": "1"}).encode(),
        json.dumps({"kind": "put", "lease": "a"}).encode(),
        json.dumps({"kind": "put", "lease": "a", "at": -1}).encode(),
        json.dumps({"kind": "put", "lease": "a", "at": "0"}).encode(),
        json.dumps({"kind": "put", "lease": "a" * 65, "at": 0}).encode(),
        json.dumps({"kind": "put", "lease": "a", "at": 0, "more": 1}).encode(),
        b'{"kind": "commit", "ask": 1, "lease": "a", "losses": [NaN], "norms": [1.0]}',
        json.dumps({"kind": "commit", "ask": 1, "lease": "a", "losses": [1.0], "norms": [-1.0]}).encode(),
    ],
    ids=lambda frame: repr(frame)[:60],
)
def test_anything_else_is_malformed(frame: bytes) -> None:
    with pytest.raises(BadMessage):
        unframed(frame, FROM_PART)
