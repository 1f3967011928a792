"""What agents and coordinator say to each other survives the way, and nothing else is taken for it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.processes.connection import TEXT_CHARS, BadMessage, decoded, encoded
from argosy.resilience.detect.finding import WorkerSeen
from argosy.resilience.node_health import Health, WrongResult
from argosy.supervise import messages as say
from argosy.supervise.messages import FROM_AGENT, FROM_COORDINATOR
from argosy.supervise.node_report import NodeReport
from argosy.supervise.nodes import RankState

REPORT = NodeReport(
    generation=2, workers=[(0, 7), (1, 8)], step=5, still=[1], silent=[1], took=[(4, [0.5, 0.25])], suspicions={0: 1},
    seen={1: WorkerSeen(8, 5, "forward", {"world#0": 12}, "T", True)},
)  # fmt: skip
HEALTH = Health((WrongResult("core 1", "memory", "0x1, not 0x0"),), {"core memory": 5e9}, 0.5)
HELLO = say.AgentHello(
    folder="f", name="n", host="10.0.0.1", slots=2, health=HEALTH,
    workers=(say.KnownWorker(slot=1, state=RankState.RUNNING, rank=3, generation=2, pid=9),),
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [HELLO, say.NodeHeartbeat(report=REPORT), say.WorkerLost(slot=0, why="x", exit_code=-9)],
    ids=lambda message: message.kind,
)
def test_an_agents_message_survives_the_way(message):
    assert decoded(encoded(message), FROM_AGENT) == message


def test_the_coordinators_message_survives_the_way():
    join = say.JoinWorld(
        generation=2, size=2, plan="dp=2", host="h", port=1, places=(say.WorldPlace(slot=0, rank=1, local_rank=0),)
    )
    assert decoded(encoded(join), FROM_COORDINATOR) == join


@pytest.mark.parametrize(
    "wrong",
    [
        {}, [], None, {"kind": "hello"}, {"kind": "nothing"}, {"kind": "done", "slot": -1},
        {"kind": "done", "slot": 10**12}, {"kind": "done", "slot": 0, "more": 1},
        {"kind": "started", "slot": 0, "pid": {}}, {"kind": "heartbeat", "report": {"still": [-1]}},
        {"kind": "heartbeat", "report": {"workers": [[0]]}},
        {"kind": "store", "generation": 1, "port": 0}, {"kind": "finish", "exit_code": 0, "why": ""},
        json.loads(encoded(HELLO)) | {"name": "../../etc"}, json.loads(encoded(HELLO)) | {"slots": 10**9},
        json.loads(encoded(HELLO)) | {"slots": 1},
        json.loads(encoded(HELLO)) | {"workers": 2 * json.loads(encoded(HELLO))["workers"]},
        {"kind": "heartbeat", "report": {"step": 10**400}}, {"kind": "lost", "slot": 0, "why": "", "exit_code": 10**9},
        {"kind": "node_checked", "health": {"rates": {"core memory": float("nan")}}},
    ],
    ids=lambda wrong: str(wrong)[:60],
)  # fmt: skip
def test_what_no_agent_says_is_refused(wrong):
    with pytest.raises(BadMessage):
        decoded(json.dumps(wrong).encode(), FROM_AGENT)


@pytest.mark.parametrize("frame", [b"[" * 100_000, b"\xff", b"", b'{"kind":"done","slot":NaN}', b"1e999"], ids=len)
def test_what_is_no_json_is_refused(frame):
    with pytest.raises(BadMessage):
        decoded(frame, FROM_AGENT)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_raise_nothing_else(frame):
    with pytest.raises(BadMessage):
        decoded(frame, FROM_COORDINATOR)


def test_a_long_explanation_is_cut_rather_than_refused():
    assert len(say.LeaveWorld(generation=1, why="x" * 10**6).why) == TEXT_CHARS
