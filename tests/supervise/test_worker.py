"""What a worker makes of an error: its peer is gone, or something is wrong here."""

from __future__ import annotations

import pytest

from argosy.supervise.worker import is_of_a_connection


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), True),
        (RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:186] rv != -1. Too many open files"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_peer_that_is_gone_is_told_from_what_goes_wrong_here(error, is_told):
    assert is_of_a_connection(error) is is_told
