"""The needs of a trial, and the limits of all trials together."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from argosy.config.schema import RunConfig
from argosy.launch.resolve import with_known_sizes
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.local_machine import DetectedHardware, host_memory_bytes, machine_at_hand
from argosy.plan.search.auto import Devices, choose_plan, processes_of
from argosy.sweep.config import Parallel

BESIDE_BYTES, WORKER_BYTES = 300e6, 250e6
"""Memory of a run beside its model: of its agent, coordinator, fork server and writer together, and of each worker
(proportional set sizes on the 2-core CPU machine of the benchmarks, and benchmarks/results/planner_memory_cpu.md)."""
SHARE_OF_MEMORY = 0.9
ANY_RATE = {"fp32": 1e11, "bf16": 1e11}
"""Memory does not depend on it."""


@dataclass(frozen=True)
class Needs:
    """The part of a machine that one trial takes."""

    cores: int
    gpus: int = 0
    memory_bytes: float = 0.0
    """Host memory of all its processes, as predicted; 0 if its model is on GPUs."""


@dataclass(frozen=True)
class Limits:
    """The most that trials that run at the same time may take together."""

    trials: int
    """0: no limit of its own."""
    cores: int
    memory_bytes: float
    gpus: tuple[str, ...] = ()
    """Their names for CUDA_VISIBLE_DEVICES."""


def limits_of(parallel: Parallel) -> Limits:
    """Return the limits that the sweep file sets; what it leaves out is this machine's."""
    there = gpus_here()
    return Limits(
        trials=parallel.trials,
        cores=parallel.cores or len(os.sched_getaffinity(0)),
        memory_bytes=parallel.memory_gb * 1e9 or SHARE_OF_MEMORY * host_memory_bytes(),
        gpus=there if parallel.gpus is None else there[: parallel.gpus],
    )


def gpus_here() -> tuple[str, ...]:
    """Return the GPUs that this process may use; none if nvidia-smi is not there, or lists none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.stdout.split())


def processes(run: RunConfig) -> int:
    """Return the worker processes of a trial: as the plan or launch.processes says, else one. Raises: UserError."""
    return processes_of(run.plan) or run.launch.processes or 1


def threads(run: RunConfig, limits: Limits) -> int:
    """Return the CPU threads of each worker, so that all trials together have the cores."""
    return run.launch.threads or max(1, limits.cores // max(1, limits.trials) // processes(run) if limits.trials else 1)


def needs_of(run: RunConfig, limits: Limits) -> Needs:
    """Return what a trial takes. Its memory is the planner's prediction, at the upper end of the interval.

    Raises: UserError if no plan can train it.
    """
    count = processes(run)
    cores = count * threads(run, limits)
    if limits.gpus and run.launch.device != "cpu":
        return Needs(cores, gpus=count)
    return Needs(cores, memory_bytes=memory_bytes(run, count))


def memory_bytes(run: RunConfig, count: int) -> float:
    """Return the memory that `count` worker processes on CPUs are predicted to take, with all beside them."""
    devices = Devices(count, "cpu", fast_bf16=False, memory_bytes=host_memory_bytes() / count, per_node=count)
    run = with_known_sizes(run)
    cluster = machine_at_hand(run, DetectedHardware("cpu", count, count, ANY_RATE))
    assert cluster is not None  # the catalogue has CPUs
    predicted = predict(choose_plan(run, devices), run, cluster)
    return BESIDE_BYTES + count * (WORKER_BYTES + float(predicted.memory_bytes.high))


class Room:
    """The rest of the limits while trials run."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._taken: dict[int, tuple[Needs, tuple[str, ...]]] = {}

    @property
    def is_full(self) -> bool:
        """True if nothing fits, however small."""
        limits, cores = self._limits, sum(taken.cores for taken, _ in self._taken.values())
        return bool(self._taken) and (0 < limits.trials <= len(self._taken) or cores >= limits.cores)

    def fits(self, needs: Needs) -> bool:
        """Return True if a trial fits beside those that run; one that is alone always fits, if it has its GPUs."""
        limits = self._limits
        if needs.gpus > len(self._free_gpus):
            return False
        if not self._taken:
            return True
        others = [taken for taken, _ in self._taken.values()]
        return (
            (not limits.trials or len(others) < limits.trials)
            and needs.cores + sum(other.cores for other in others) <= limits.cores
            and needs.memory_bytes + sum(other.memory_bytes for other in others) <= limits.memory_bytes
        )

    def take(self, number: int, needs: Needs, gpus: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Count a trial as running. Return its GPUs: those that it has already, or some that are free."""
        given = self._free_gpus[: needs.gpus] if gpus is None else gpus
        self._taken[number] = (needs, given)
        return given

    def give_back(self, number: int) -> None:
        self._taken.pop(number, None)

    @property
    def _free_gpus(self) -> tuple[str, ...]:
        taken = {gpu for _, gpus in self._taken.values() for gpu in gpus}
        return tuple(gpu for gpu in self._limits.gpus if gpu not in taken)
