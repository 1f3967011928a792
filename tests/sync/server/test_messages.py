"""What comes over the wire is checked before it is used."""

from __future__ import annotations

import json

import pytest

from argosy.processes.messages import BadMessage
from argosy.sync import messages as say
from argosy.sync.messages import HEAD_BYTES, PIECE_BYTES, packed, unpacked


def test_a_message_comes_back_with_its_bytes():
    said = say.PushPiece(lease="a-1", at=3)
    assert unpacked([bytes(frame) for frame in packed(said, b"numbers")]) == (said, b"numbers")
    assert unpacked(packed(say.AskForWork(ask=1))) == (say.AskForWork(ask=1), b"")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"{}", b"", b""],
        [b"no JSON"],
        [b"[1]"],
        [json.dumps({"kind": "exec", "code": "1"}).encode()],
        [json.dumps({"kind": "put", "lease": "a"}).encode()],
        [json.dumps({"kind": "put", "lease": "a", "at": -1}).encode()],
        [json.dumps({"kind": "put", "lease": "a", "at": "0"}).encode()],
        [json.dumps({"kind": "put", "lease": "a" * 65, "at": 0}).encode()],
        [json.dumps({"kind": "put", "lease": "a", "at": 0, "more": 1}).encode()],
        [b'{"kind": "commit", "ask": 1, "lease": "a", "losses": [NaN], "norms": [1.0]}'],
        [json.dumps({"kind": "commit", "ask": 1, "lease": "a", "losses": [1.0], "norms": [-1.0]}).encode()],
        [b" " * HEAD_BYTES + b"{}"],
        [packed(say.Ping())[0], b"x" * (PIECE_BYTES + 1)],
    ],
    ids=lambda frames: repr(frames)[:60],
)
def test_anything_else_is_malformed(frames):
    with pytest.raises(BadMessage):
        unpacked(frames)
