"""The text that Prometheus reads."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter

import pytest

from argosy.watch.prometheus import METRIC_HELP, LatestFacts, exposition

SAMPLE = re.compile(r'^[a-z_]+\{([a-z_]+="(\\.|[^"\\\n])*",?)+\} \S+$')
FULL = LatestFacts(
    run='a "b"\n\\c', plan="dp_shard=2", model="llama-5m", steps=100,
    step={"step": 9, "tokens": 10, "loss": 2.5, "grad_norm": math.inf, "lr": 1e-4, "step_time_s": 0.5, "mfu": 0.5,
          "tokens_per_s": 3.0, "memory_bytes": 5, "time_s": 1.8e9, "seconds": {"forward": 0.1},
          "memory": {"weights": 4}, "communication": {"tp": {"node": [0.5, 7]}}, "user": {"x": 1.0},
          "sync": {"ratio": 0.25, "staleness": 50, "distance": 0.1}},
    evaluation={"step": 9, "validation_loss": 2.0, "bits_per_byte": 1.0, "validation_accuracy": 0.5},
    nodes={"n": {"ranks": [0], "step_s": [0.5], "memory_bytes": [5],
                 "devices": [{"name": "GPU", "utilisation": 0.5, "memory_bytes": 3, "temperature_c": 60,
                              "power_w": 300.0, "clock_mhz": 1500}],
                 "host": {"cpu": 0.1, "memory_used_bytes": 5, "disk_free_bytes": 7}, "energy": {"total_joules": 80.0}}},
    events=Counter(save=2), state="finished",
)  # fmt: skip


def test_every_name_is_said_and_every_line_is_well_formed():
    text = exposition([FULL, LatestFacts(run="other")])
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in lines), text
    assert {line.partition("{")[0] for line in lines} == set(METRIC_HELP)
    assert 'argosy_loss{run="a \\"b\\"\\n\\\\c"} 2.5' in lines
    assert 'argosy_gradient_norm{run="a \\"b\\"\\n\\\\c"} +Inf' in lines
    assert text.count("# TYPE argosy_steps_done gauge\n") == 1


def test_what_is_not_known_is_left_out():
    text = exposition([LatestFacts(run="new", step={"step": 0, "loss": None})])
    assert "argosy_loss" not in text
    assert 'argosy_steps_done{run="new"} 1' in text


def large(ranks: int) -> LatestFacts:
    """A run of one rank and one device a node."""
    line = {
        "step_s": [0.5],
        "devices": [{"name": "GPU", "power_w": 300.0}],
        "host": {"cpu": 0.5},
        "energy": {"total_joules": 2.0},
    }
    return LatestFacts(run="large", nodes={f"n{n}": {**line, "ranks": [n], "step_s": [float(n)]} for n in range(ranks)})


def test_the_number_of_samples_does_not_grow_with_the_run():
    assert exposition([large(64)]).count("argosy_rank_step_seconds{") == 64
    text = exposition([large(5000)])
    assert len(text) < 10_000
    assert 'argosy_rank_step_seconds{run="large",statistic="max"} 4999.0' in text
    assert 'argosy_rank_step_seconds{run="large",statistic="mean"} 2499.5' in text
    assert 'argosy_device_power_watts{run="large",statistic="min"} 300.0' in text
    assert 'argosy_node_energy_joules_total{run="large",statistic="sum"} 10000.0' in text


def test_a_foreign_line_costs_no_other_run_its_figures():
    step = {"step": "x", "loss": "low", "seconds": 3, "communication": {"tp": 5, "dp": {"node": 7, "far": [1]}}}
    node = {"devices": [3, {"power_w": "much"}], "ranks": 3, "step_s": {}, "host": []}
    text = exposition(
        [LatestFacts(run="foreign", step=step, nodes={"n": node, "m": {"devices": {}}}), LatestFacts(run="b")]
    )
    assert 'argosy_run_info{run="b"' in text
    assert "argosy_loss" not in text


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's package prometheus (promtool)")
def test_prometheus_own_linter_finds_nothing():
    command, text = ["promtool", "check", "metrics"], exposition([FULL, large(100)])
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_ranks_of_a_world_that_is_over_are_not_told_of_and_its_energy_is():
    nodes = {
        name: {"generation": generation, "ranks": [0], "step_s": [0.5], "energy": {"total_joules": 2.0}}
        for name, generation in (("old-pod", 1), ("new-pod", 2))
    }
    lines = exposition([LatestFacts(run="a", nodes=nodes)]).splitlines()
    assert [line for line in lines if "argosy_rank_step" in line and "old-pod" in line] == []
    assert {"old-pod", "new-pod"} == {
        line.split('node="')[1].partition('"')[0] for line in lines if line.startswith("argosy_node_energy")
    }
