"""Asynchronous training: with one worker it is plain training, bit for bit; with more each sample counts once."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.metrics import Metrics
from argosy.parallel.world import World
from parameter_servers import asynchronous, serving, together, work
from tiny import eager, losses, train_in, weights


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_is_plain_training_bit_for_bit(corpus, tmp_path, servers):
    run = asynchronous(corpus, servers)
    with serving(run, tmp_path / "async"):
        assert work(run, tmp_path / "async", "A")
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    records = train_in(World(), plain, eager("microbatch=4"), tmp_path / "plain")
    ours = Metrics(tmp_path / "async").read()
    assert losses(ours) == losses(records)
    assert [line["lr"] for line in ours if "lr" in line] == [line["lr"] for line in records if "lr" in line]
    expected, found = weights(tmp_path / "plain"), weights(tmp_path / "async")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {line["staleness"] for line in lines(tmp_path / "async")} == {0}
