"""Detectors watch real processes in real collectives, and name the one that was made to misbehave."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from argosy.faults import arm, fault
from argosy.observe.clock import StepClock
from argosy.observe.collectives import sequence_numbers
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.parallel.world import World
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.hang import HangDetector
from argosy.resilience.detect.slow import StragglerDetector
from argosy.supervise.node_report import NodeReporter
from argosy.supervise.watch import WorldView
from workers import WorkerPool

SIZE = 3


def _steps(world: World, folder: Path, faults: str, steps: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Make steps that consist of some work and an all-reduce; the first rank also watches, and says what it found."""
    heartbeat = Heartbeat(folder)
    clock = StepClock(world.device, heartbeat)
    heartbeat.join(1, world.rank, sequence_numbers)
    dist.barrier()
    found: list[Finding] = []
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, found, ended))
    if world.rank == 0:
        watcher.start()
    arm(faults)
    try:
        for step in range(steps):
            heartbeat.begin(step)
            with clock.time("forward"):
                time.sleep(0.02)
                fault("forward", step=step, rank=world.rank)
            with clock.time("communication"):
                dist.all_reduce(torch.ones(4))
            clock.lap()
    finally:
        arm("")
        ended.set()
        if world.rank == 0:
            watcher.join()
        heartbeat.close()
    return [(finding.kind, finding.ranks, finding.why) for finding in found]


def _watch(folder: Path, found: list[Finding], ended: threading.Event) -> None:
    detectors = [HangDetector(hang_s=2.5, heartbeat_timeout_s=1.5), StragglerDetector(seconds=0.5)]
    reporter, view = NodeReporter(), WorldView(1, SIZE)
    while not ended.wait(0.15):  # a heart beats every 0.1 s
        readings = [read_heartbeat(path) for path in folder.glob("*.heartbeat")]
        view.take("a", reporter.report([r for r in readings if r is not None], wants_all=detectors[0].wants_all))
        sample = view.sample(time.monotonic(), every_s=0.15)
        if sample is not None:
            found += [finding for detector in detectors for finding in detector.observe(sample)]


@pytest.mark.parametrize(
    ("faults", "kind", "rank"),
    [
        pytest.param("sleep@forward:step=10,rank=1,seconds=5", "hang", 1, marks=pytest.mark.slow),
        ("gil@forward:step=10,rank=2,seconds=3", "frozen", 2),
        pytest.param("slow@forward:rank=1,seconds=0.1", "straggler", 1, marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_misbehaves_is_named(workers: WorkerPool, tmp_path: Path, faults, kind, rank):
    found = workers.run(SIZE, _steps, tmp_path, faults, 70)[0]
    assert [(k, ranks) for k, ranks, _ in found][:1] == [(kind, (rank,))], found
    if kind == "hang":
        assert "forward of step 10" in found[0][2] and "default_pg#" in found[0][2]


def test_healthy_ranks_are_left_alone(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(SIZE, _steps, tmp_path, "", 60)[0] == []
