"""An agent that has read the skill, and speaks to the MCP server alone, finds what is wrong with live runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from tests.watch.test_mcp_server import served

from argosy.watch.mcp_server import server_of_runs
from matrix import STEADY, Disturbed
from waiting import PATIENT_S

BUSY_S = 0.05
"""Each rank's own work in a microbatch, most of it sleep: other programs on the machine do not stretch it."""
FAULTS = (
    f"slow@forward:rank=0,seconds={BUSY_S}; slow@forward:rank=1,seconds={4 * BUSY_S}; "
    "kill@optimizer:step=8,rank=0; spike@loss:step=60,rank=0,factor=1000,times=2"
)
LOOK_EVERY_S = 1.0


class Agent:
    """A small state machine over the documented fields: it looks, and looks up in the skill what is to be done."""

    def __init__(self, client: Client):
        self._client = client
        self._since: dict[str, str] = {}
        self.remedies: dict[str, str] = {}
        """Rule -> what the skill says to do."""
        self.found: dict[tuple[str, str], dict[str, Any]] = {}
        """Run and rule -> the status that named it first; of `next.plan`, with the advice."""

    async def ask(self, tool: str, **words: Any) -> Any:
        answer = await self._client.call_tool(tool, words)
        text = answer.content[0].text  # type: ignore[union-attr]
        assert not answer.is_error, text
        return text if tool == "docs" else json.loads(text)

    async def learn(self) -> None:
        for row in (await self.ask("docs", topic="skill")).splitlines():
            if row.startswith("| `") and row.count("|") == 4:
                _, rules, _, do, _ = row.split("|")
                self.remedies |= dict.fromkeys(re.findall(r"`(\w+)`", rules), do.strip())

    async def look(self) -> None:
        """Ask about each run that trains what is new, and note each rule of the skill that its status names."""
        for run in await self.ask("runs", where='state == "training"'):
            status = await self.ask("status", run=run["id"], since=self._since.get(run["id"], ""))
            self._since[run["id"]] = status["event"] or ""
            rules = {status["next"]["rule"], *(alert["alert"] for alert in status["alerts"])}
            if "worker_died" in {change["event"] for change in status["changes"]}:
                rules.add("lost_ranks")
            for rule in rules & self.remedies.keys():
                self.found.setdefault((run["id"], rule), status)
            if status["next"]["plan"] and "`next.plan`" in self.remedies[status["next"]["rule"]]:
                self.found[run["id"], "next.plan"] = {**status, "advice": await self.ask("advice", run=run["id"])}


def watch(root: Path, wanted: Iterable[tuple[str, str]]) -> Agent:
    """Let an agent look at the runs under `root` until it has found what is wanted."""
    agents: list[Agent] = []

    async def main() -> None:
        async with Client(server_of_runs(root)) as client:
            agents.append(Agent(client))
            await agents[0].learn()
            with anyio.move_on_after(PATIENT_S):
                while not set(wanted) <= agents[0].found.keys():
                    await agents[0].look()
                    await anyio.sleep(LOOK_EVERY_S)

    anyio.run(main)
    return agents[0]


@pytest.mark.slow
def test_three_faults_of_a_live_run_are_found_and_the_right_thing_is_named(disturbed: Callable[..., Disturbed]) -> None:
    length = ("--train.steps", "100000", *STEADY, "--resilience.spike_warmup_steps", "20")
    run = disturbed("dp_replicate=2,microbatch=4", FAULTS, *length, "--resilience.straggler_s", "1")
    agent = watch(run.run_dir.parent, [("tiny", rule) for rule in ("node_in_doubt", "lost_ranks", "spike")])
    told = {rule: agent.remedies[rule] for run_id, rule in agent.found if run_id == "tiny"}
    assert "look at that machine" in told["node_in_doubt"]
    assert any("rank 1" in alert["subject"] + alert["why"] for alert in agent.found["tiny", "node_in_doubt"]["alerts"])
    assert told["lost_ranks"].startswith("nothing, if it stays at one")
    assert told["spike"].startswith("nothing, if it stays at one")
    (spike,) = [each for each in agent.found["tiny", "spike"]["alerts"] if each["alert"] == "spike"]
    assert spike["evidence"]["step"] == 60


@pytest.mark.slow
def test_a_wrong_plan_of_a_live_run_is_found_with_the_better_one(disturbed: Callable[..., Disturbed]) -> None:
    run = disturbed("pp=2,microbatch=4", "", "--train.steps", "100000", *STEADY)
    agent = watch(run.run_dir.parent, [("tiny", "next.plan")])
    found = agent.found["tiny", "next.plan"]
    assert found["next"]["rule"] in ("pipeline_bubble", "exposed_communication")  # the latter where cores are short
    assert "pp=" not in found["next"]["plan"] and found["next"]["plan"] in found["next"]["command"]
    assert "pipeline_bubble" in [each["rule"] for each in found["advice"]]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pipes", "http"])
def test_the_inspector_of_the_protocol_reads_a_run(trained: Path, way: str) -> None:
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("there is no npx")
    asked = ["--method", "tools/call", "--tool-name", "status", "--tool-arg", f"run={trained.name}"]
    with served(trained.parent, "a-token-of-the-user") as address:
        server = {
            "pipes": [sys.executable, "-m", "argosy", "watch", str(trained.parent), "--mcp"],
            "http": [f"{address}?token=a-token-of-the-user", "--transport", "http"],
        }[way]
        words = [npx, "--yes", "@modelcontextprotocol/inspector", "--cli", *server, *asked]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENT_S)
    if done.returncode and "npm" in done.stderr:
        pytest.skip(f"npm has no inspector: {done.stderr.splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr
    status = json.loads(json.loads(done.stdout)["content"][0]["text"])
    assert (status["folder"], status["state"], status["next"]["rule"]) == (str(trained), "finished", "finished")
