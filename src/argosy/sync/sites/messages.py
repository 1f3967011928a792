"""What the exchanges of sites say to each other: one line of JSON a frame, with bytes behind it."""

from __future__ import annotations

import json
from typing import Any

VERSION = 3
Message = dict[str, Any]


class Malformed(Exception):
    """What came is no message of this program."""


def packed(kind: str, data: bytes | memoryview = b"", /, **facts: Any) -> bytes:
    """Return the frame of a message."""
    return b"".join([json.dumps({"kind": kind, **facts}, separators=(",", ":")).encode(), b"\n", data])


def unpacked(frame: bytes) -> Message:
    """Return the message of a frame, its bytes under "data". Raises: Malformed."""
    head, _, data = frame.partition(b"\n")
    try:
        message = json.loads(head)
    except ValueError:
        raise Malformed("it is not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise Malformed("it has no kind")
    message["data"] = data
    return message
