"""A real run with planted faults: advice names them with figures, and alerts reach a webhook and a command."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from argosy.watch.conclusions import conclusions_of
from argosy.watch.reader import RunReader
from matrix import STEADY

BUSY_S = 0.05
"""Each rank's own work in a microbatch, most of it sleep: other programs on the machine do not stretch it."""
STEPS = 70
PLAN = "dp_replicate=2,microbatch=4"
FAULTS = (
    f"slow@forward:rank=0,seconds={BUSY_S}; slow@forward:rank=1,seconds={4 * BUSY_S}; "
    "kill@optimizer:step=8,rank=0; spike@gradient:step=50,rank=0,factor=1000"
)
KEEP = "import sys; alert = sys.stdin.read(); open(sys.argv[1], 'a').write(alert + '\\n')"


@contextmanager
def webhook(hangs: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL, and what it is sent; one that hangs never answers."""
    got: list[dict[str, Any]] = []
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if hangs:
                is_over.wait(60)
                return
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", got
    is_over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_planted_straggler_spike_and_death_are_named_and_told(disturbed, tmp_path: Path):
    length = ("--train.steps", str(STEPS), *STEADY, "--resilience.spike_warmup_steps", "20")
    heard, script = tmp_path / "heard", tmp_path / "keep.py"
    script.write_text(KEEP)
    command = ("--observe.alerts.command", sys.executable, str(script), str(heard))
    with webhook() as (url, got):
        options = (*length, "--resilience.straggler_s", "1", "--observe.alerts.webhook", url, *command)
        run = disturbed(PLAN, FAULTS, *options).end(timeout_s=300)
    run.check_state_is_sound()
    run.check_samples()
    run.check_nothing_is_left()
    reader = RunReader.read(run.run_dir)
    said = {advice.rule: advice for advice in conclusions_of(reader).advice}

    slow = said["straggler"]
    assert slow.facts["rank"] == 1 and 2 < float(slow.facts["factor"]) < 6, slow
    assert "Rank 1" in slow.title
    dead = said["lost_ranks"]
    assert dead.facts["ranks"] == [0] and "SIGKILL" in dead.evidence, dead

    bad = said["bad_steps"]
    assert 50 in bad.facts["steps"] and "step 50 was bad" in bad.evidence, bad

    in_doubt = [alert for alert in got if alert["alert"] == "node_in_doubt"]
    assert [alert["state"] for alert in in_doubt] == ["begins", "ends"], got
    assert "rank 1 takes" in in_doubt[0]["why"]
    assert [json.loads(line) for line in heard.read_text().splitlines()] == got
    told = [alert.record() for alert in conclusions_of(reader).alerts]
    assert sorted((alert["alert"], alert["state"]) for alert in told) == sorted((a["alert"], a["state"]) for a in got)


@pytest.mark.slow
def test_a_webhook_that_hangs_does_not_matter_to_the_run(disturbed):
    length = ("--train.steps", "24")
    with webhook(hangs=True) as (url, got):
        options = (*length, "--observe.alerts.webhook", url, "--observe.alerts.timeout_s", "1")
        run = disturbed(PLAN, "nan@loss:step=4,times=2", *options).end(timeout_s=120)
    assert run.losses() and len(run.losses()) == 24
    assert got and got[0]["alert"] == "nan"
