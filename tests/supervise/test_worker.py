"""What a worker makes of its agent's messages, and of an error: its peer is gone, or something is wrong here."""

from __future__ import annotations

import socket
import threading

import pytest

from argosy.processes.child import Channel
from argosy.supervise.worker import AgentClient, is_of_a_connection
from argosy.training.stop import StopSignal
from waiting import wait_until


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


def test_a_world_that_is_broken_off_before_it_is_joined_is_over(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: (ended.set(), threading.Event().wait()))  # it never returns
    here, there = socket.socketpair()
    agent, stop = Channel(there), StopSignal()
    client = AgentClient(Channel(here), stop)
    there.sendall(b'{"kind": "join", "generation": 3}\n{"kind": "break", "generation": 3, "why": "node b is lost"}\n')
    assert next(client.worlds())["generation"] == 3
    wait_until(lambda: client.is_broken() and stop.world_is_over)
    client.left("something else")
    assert agent.receive() == {"kind": "ready", "generation": 3, "why": "node b is lost"}
    there.shutdown(socket.SHUT_RDWR)
    assert ended.wait(60), "an orphan goes on"
