"""A server's port that is taken: waited for, and named if it stays so."""

from __future__ import annotations

import socket
import threading

import pytest

from argosy.errors import UserError
from argosy.training.server import port


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_port_that_somebody_leaves_is_waited_for(taken):
    said: list[str] = []
    address = ("127.0.0.1", taken.getsockname()[1])
    threading.Timer(0.3, taken.close).start()
    port.wait_for_port(address, lambda: False, said.append)
    assert len(said) == 1 and f"port {address[1]} is in use" in said[0]
    socket.create_server(address).close()


def test_a_port_that_stays_taken_is_named(taken, monkeypatch):
    monkeypatch.setattr(port, "PORT_S", 0.3)
    number = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"sync.servers: cannot listen at port {number} .*in use"):
        port.wait_for_port(("127.0.0.1", number), lambda: False, lambda _: None)


def test_a_server_that_is_to_end_does_not_wait(taken):
    port.wait_for_port(("127.0.0.1", taken.getsockname()[1]), lambda: True, lambda _: None)
