"""The first server's decisions: who gets which samples, which gradients become updates, when weights are scored."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig
from argosy.observe.events import Events, read_lines
from argosy.observe.screen import Progress
from argosy.processes.connection import WireRecord
from argosy.sync import messages as say
from argosy.sync.layout import ServerLayout
from argosy.sync.messages import MESSAGE_PIECE_BYTES
from argosy.training.server.leader import LOST_S, Leader
from argosy.training.server.shard import RequestRefused, ServerShard
from tiny import run_config


class Servers:
    """The first of two servers, with its shard; what it tells the other is kept, and workers speak by hand."""

    def __init__(self, folder: Path, servers: int = 1, **sections: dict[str, Any]):
        sync = {"servers": [f"127.0.0.1:{port}" for port in range(1, servers + 1)], **sections.pop("sync", {})}
        sections = {"evaluate": {"every_steps": 0}, **sections}
        run: RunConfig = run_config(Path("no data"), sync=sync, **sections)
        sites = tuple(SiteConfig(name=name) for name in "AB")
        self.layout = ServerLayout(run.model_copy(update={"plan": "sync=async", "sites": sites}))
        self.folder = folder
        self.told: list[tuple[str, WireRecord]] = []
        self.heard_s: dict[str, float] = {}
        self.shard = ServerShard(self.layout, 0, folder, "identity", lambda news, **facts: None)
        self.events = Events(folder, "server-1")
        self.leader = Leader(
            self.layout, folder, self.shard, self.events, Progress(enabled=False),
            lambda name, message: self.told.append((name, message)), self.heard_s,
        )  # fmt: skip
        self.answers: dict[str, list[Any]] = {}
        for site in "AB":
            self.leader.arrived(site, f"session of {site}")
            self.heard_s[site] = math.inf  # however slow the machine is, none of them is lost

    def ask(self, site: str, number: int = 1) -> Any:
        """What the worker is answered at once when it asks for work; None if it has to wait."""
        self.answers[site] = []
        self.leader.asked(site, say.AskForWork(ask=number), self.answers[site].append)
        return self.heard(site)

    def heard(self, site: str) -> Any:
        return self.answers[site][-1] if self.answers[site] else None

    def push(self, site: str, lease: str, value: float = 0.0) -> None:
        """Put a whole gradient of this value where the first server looks for it."""
        wire, flat = self.layout.wire, self.layout.flats[0]
        data = wire.encode(np.full(flat.elements, value, np.float32)).tobytes()
        for at in range(0, len(data), MESSAGE_PIECE_BYTES):
            self.shard.stage(site, lease, at, data[at : at + MESSAGE_PIECE_BYTES])

    def commit(self, site: str, lease: str, losses: int = 1) -> say.Committed:
        message = say.Commit(ask=9, lease=lease, losses=[2.0] * losses, norms=[1.0] * losses)
        return self.leader.commit(site, message)

    def update(self, site: str) -> say.Committed:
        """Take work, and deliver it at once."""
        lease = self.ask(site).lease
        self.push(site, lease)
        return self.commit(site, lease)

    def bad(self, site: str) -> say.Committed:
        return self.leader.bad(site, say.BadGradient(ask=9, lease=self.ask(site).lease, why="its loss is nan"))

    def lines(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def happened(self, kind: str) -> list[Any]:
        return [event for event in read_lines(self.folder / "events/server-1.jsonl") if event["event"] == kind]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def make(**sections: Any) -> Servers:
        made.append(Servers(tmp_path, **sections))
        return made[-1]

    yield make
    for one in made:
        one.shard.close()


def test_workers_get_the_samples_in_order_and_their_updates_are_written_down(servers):
    here = servers(sync={"max_staleness": 4}, train={"steps": 4})
    first, second = here.ask("A"), here.ask("B")
    assert [(work.item, work.version) for work in (first, second)] == [(0, 0), (1, 0)]
    for site, work in (("B", second), ("A", first)):
        here.push(site, work.lease)
    late = here.commit("B", second.lease), here.commit("A", first.lease)
    assert [(each.update, each.staleness) for each in late] == [(0, 0), (1, 1)]
    assert here.commit("A", first.lease) == late[1]  # it asks again, and nothing is made twice
    assert [(line["update"], line["item"], line["site"]) for line in here.lines("ledger.jsonl")] == [
        (0, 1, "B"), (1, 0, "A"),
    ]  # fmt: skip
    records = here.lines("metrics.jsonl")
    assert [(r["step"], r["sample_ranges"], r["sync"]["staleness"]) for r in records] == [
        (0, [[8, 16]], 0), (1, [[0, 8]], 1),
    ]  # fmt: skip
    assert [r["tokens"] for r in records] == [8 * 32, 2 * 8 * 32] and records[0]["loss"] == 2.0
    assert (here.leader.version, here.leader.step, here.shard.version) == (2, 2, 2)


@pytest.mark.parametrize(("how", "share"), [("inverse", 1 / 3), ("constant", 1.0)])
def test_the_rate_of_a_stale_gradient_is_that_of_the_run_file(servers, how, share):
    here = servers(
        sync={"max_staleness": 4, "staleness_rate": how}, schedule={"kind": "constant", "warmup_steps": 0},
        optimizer={"lr": 0.3},
    )  # fmt: skip
    stale = here.ask("A").lease
    for _ in range(3):
        assert here.update("B").rate == pytest.approx(0.3)
    here.push("A", stale)
    assert here.commit("A", stale).rate == pytest.approx(0.3 * share)


def test_local_steps_are_an_update_with_a_line_for_each(servers):
    here = servers(sync={"local_steps": 2, "outer_lr": 0.5}, train={"steps": 4}, optimizer={"lr": 0.3})
    lease = here.ask("A").lease
    here.push("A", lease)
    with pytest.raises(RequestRefused, match="losses of 1 steps, and an update here is of 2"):
        here.commit("A", lease)
    assert here.commit("A", lease, losses=2).rate == 0.5
    records = here.lines("metrics.jsonl")
    assert [(r["step"], r["sample_ranges"]) for r in records] == [(0, [[0, 8]]), (1, [[8, 16]])]
    assert "sites" not in records[0] and records[1]["sites"] == {
        "site": "A", "staleness_steps": 0, "participants": ["A", "B"], "steps": 2, "rate": 0.5,
    }  # fmt: skip
    assert here.leader.step == 2


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_gradient_that_is_not_here_or_not_finite_makes_no_update(servers, value):
    here = servers()
    lease = here.ask("A").lease
    if value is not None:
        here.push("A", lease, value)
    assert here.commit("A", lease).update is None and here.leader.version == 0
    here.push("A", lease)
    assert here.commit("A", lease).update == 0


def test_what_was_dealt_to_another_makes_no_update(servers):
    here = servers(sync={"max_staleness": 4})
    lease = here.ask("A").lease
    here.push("A", lease)
    here.leader.arrived("A", "another session")
    assert here.happened("samples_returned")[-1]["why"] == "it was started again"
    assert here.ask("B").item == 0
    assert here.commit("A", lease).update is None


def test_ten_bad_gradients_in_a_row_end_the_run(servers):
    here = servers(train={"steps": 100})
    for kind in [*["bad"] * 9, "good", *["bad"] * 9]:
        assert here.bad("A").update is None if kind == "bad" else here.update("A").update == 0
        assert here.leader.failure == ""
    here.bad("A")
    assert here.leader.failure == "the last 10 gradients were not finite, and changed nothing"
    skipped = [line["skipped"] for line in here.lines("ledger.jsonl") if "skipped" in line]
    assert skipped == [*range(9), *range(10, 20)]
    assert here.happened("samples_skipped")[0]["samples"] == [[0, 8]]


def test_the_first_one_does_if_the_run_file_says_so(servers):
    here = servers(resilience={"on_bad_step": "stop"})
    here.bad("A")
    assert here.leader.failure == "its loss is nan, and resilience.on_bad_step = stop"


def test_weights_are_scored_by_one_worker_when_they_are_due_and_at_the_end(servers):
    here = servers(evaluate={"every_steps": 2, "tokens": 100}, train={"steps": 3}, sync={"max_staleness": 4})
    here.update("A"), here.update("A")
    asked = here.ask("A")
    assert isinstance(asked, say.ScoreRequest) and asked.version == 2
    assert isinstance(here.ask("B"), say.DealtWork)  # one is enough
    here.leader.scored("B", say.Scored(version=2, loss=9.0, bits_per_byte=9.0))  # nobody asked it
    here.leader.scored("A", say.Scored(version=2, loss=1.5, bits_per_byte=0.75))
    (line,) = (line for line in here.lines("metrics.jsonl") if "validation_loss" in line)
    assert (line["step"], line["validation_loss"], line["bits_per_byte"]) == (1, 1.5, 0.75)
    here.push("B", here.heard("B").lease)
    here.commit("B", here.heard("B").lease)
    assert here.leader.is_over and not here.leader.is_done
    assert here.ask("A").version == 3 and isinstance(here.ask("B"), say.RunIsOver)
    here.leader.left("A", "session of A")  # it cannot score any more: another one does
    assert isinstance(here.ask("B"), say.ScoreRequest)
    here.leader.scored("B", say.Scored(version=3, loss=None, bits_per_byte=None))
    assert isinstance(here.ask("B"), say.RunIsOver)
    here.leader.left("B", "session of B")
    assert here.leader.is_done


def test_what_a_worker_that_is_not_heard_was_dealt_goes_to_another(servers):
    here = servers(sync={"max_staleness": 0})
    here.ask("A")
    assert here.ask("B") is None
    here.heard_s["A"] = time.monotonic() - LOST_S - 1
    here.leader.tick()
    assert here.heard("B").item == 0
    assert here.happened("worker_left")[-1]["why"] == "it sent nothing for 10 s"
    (returned,) = here.happened("samples_returned")
    assert (returned["site"], returned["samples"]) == ("A", [[0, 8]])
    assert returned["why"] == "it sent nothing for 10 s"


def test_who_holds_others_up_for_too_long_loses_its_samples(servers):
    here = servers(sync={"max_staleness": 0, "patience_s": 1e-9})
    here.ask("A")
    assert here.ask("B") is None
    here.leader.tick()
    here.leader.tick()
    assert here.heard("B").item == 0
    assert here.happened("samples_returned")[-1]["why"] == "others waited for it for 1e-09 s"


def test_a_worker_that_waits_is_told_for_whom(servers):
    here = servers(sync={"max_staleness": 0})
    here.ask("A")
    here.ask("B", number=7)
    here.leader.tick()
    assert here.heard("B") == say.WaitForWork(ask=7, by=["A"])


def test_the_session_before_cannot_leave_for_the_one_that_is_here(servers):
    here = servers()
    here.leader.arrived("A", "another session")
    here.leader.left("A", "session of A")
    assert here.happened("worker_left") == [] and not here.leader.is_expecting
    here.leader.left("A", "another session")
    assert len(here.happened("worker_left")) == 1


def test_nothing_is_dealt_before_all_servers_are_ready(servers):
    here = servers(servers=2)
    ((name, order),) = here.told
    assert name == "server-2" and isinstance(order, say.GoToVersion) and order.version == 0
    assert here.ask("A") is None
    here.leader.tick()
    assert here.heard("A").by == ["server-2"]
    assert isinstance(here.told[-1][1], say.CheckServer)
    here.leader.hear_server("server-2", say.ServerStatus(generation="another", version=0))  # it has not heard yet
    assert here.told[-1] == ("server-2", order)
    here.leader.hear_server("server-2", say.ServerStatus(generation=order.generation, version=0))
    assert here.ask("A").item == 0


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"generation": "another"}, "server-2 was started again"),
        ({"problem": "its disk is full"}, "server-2: its disk"),
    ],
)
def test_all_go_back_when_one_server_is_new_or_cannot_go_on(servers, status, why):
    here = servers(servers=2)
    order = here.told[0][1]
    here.leader.hear_server("server-2", say.ServerStatus(generation=order.generation, version=0))
    lease = here.ask("A").lease
    here.leader.hear_server("server-2", say.ServerStatus(**{"generation": order.generation, "version": 0, **status}))
    again = here.told[-1][1]
    assert isinstance(again, say.GoToVersion) and again.generation != order.generation
    assert here.happened("servers_begin")[-1]["why"].startswith(why)
    here.push("A", lease)
    assert here.commit("A", lease).update is None  # of another generation
