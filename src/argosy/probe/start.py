"""Starts the processes of a probe on this machine, or joins those that are there."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as elastic

from argosy.config.schema import LaunchConfig
from argosy.errors import Interrupted, RunFailed
from argosy.launch.devices import find_devices
from argosy.parallel.world import World, join_world, leave_world
from argosy.plan.auto import Devices
from argosy.plan.clusters import Cluster
from argosy.probe.probe import Asked, measure

MOST_CPU_PROCESSES = 8
"""Where the user does not say how many: ranks beyond the first few share what is there in the same way."""


def find_probed(launch: LaunchConfig) -> Devices:
    """The devices to measure: those of the world that the environment names; else as many as `launch` says, each GPU,
    or a process for each core. Raises: UserError, as `find_devices`.
    """
    if "WORLD_SIZE" in os.environ:
        return find_devices(launch, processes=int(os.environ["WORLD_SIZE"]))
    found = find_devices(launch)
    if found.kind == "cuda" or launch.processes:
        return found
    return replace(found, count=min(len(os.sched_getaffinity(0)), MOST_CPU_PROCESSES))


def probe_here(asked: Asked, processes: int) -> Cluster:
    """Measure this machine with so many processes, started for it.

    Raises: RunFailed if one of them dies; Interrupted after SIGTERM or SIGINT.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it is said below
    settings = elastic.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="probe",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        found: dict[int, Cluster] = elastic.elastic_launch(settings, _work)(asked)
    except SignalException as stopped:
        raise Interrupted(f"stopped by {stopped.sigval.name}; nothing was written.", stopped.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        recorded: Any = failure.message  # declared a str; a dict once it is read from the worker's error file
        why = recorded["message"] if isinstance(recorded, dict) else recorded
        raise RunFailed(f"process {rank} of the probe ended: {why}. Nothing was written.") from None
    return found[0]


def probe_joined(asked: Asked) -> tuple[Cluster, World]:
    """Measure in the world that RANK, WORLD_SIZE, ... describe; every process gets the cluster, and who it is."""
    world = join_world(asked.run.launch)
    try:
        return measure(asked, world), world
    finally:
        leave_world()


def _work(asked: Asked) -> Cluster:
    """What each process that `probe_here` starts does."""
    return probe_joined(asked)[0]
