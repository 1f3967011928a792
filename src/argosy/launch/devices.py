"""The devices of this machine."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from argosy.config.launch import DeviceType, LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.errors import ArgosyWarning, RunFailed, UserError
from argosy.observe.terminal import print_message
from argosy.plan.hardware.local_machine import cores_here, host_memory_bytes
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices, processes_of
from argosy.processes.child import ChannelClosed, ForkEntry, channel_to_parent
from argosy.processes.fork_server import ForkServer, Unanswered

LAUNCH, PLANNED = "ARGOSY_LAUNCH", "ARGOSY_PLANNED"
CPUS = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
"""Instructions, as Linux names them, with which a CPU's bf16 matmuls are at least 1.5 times as fast as those of fp32 (4
times on a Zen 5)."""
MOST_TRIES = 3
"""Processes that look for devices, one after the other, of which none answers, end the run."""
SEARCH_S = 120.0
"""Importing torch from a slow disk may take this long, whatever a run's first step may."""


def find_devices(launch: LaunchConfig, processes: int | None = None, planned: int = 0) -> Devices:
    """Return the devices for a plan: `processes` if they run already, else as many as `launch` says or the plan needs.

    Raises: UserError if `launch` asks for a device and there is none, or for more processes than GPUs.
    """
    # Not at the top: `ask` needs no torch.
    from argosy.accelerator import (
        capability,
        count_here,
        device_name,
        has_bf16,
        has_fast_fp16,
        memory_bytes,
        numbered,
        told_of,
        type_here,
    )

    here, gpus = type_here(), count_here()
    if launch.device not in ("auto", "cpu", here):
        others = f'"{here}" or "cpu"' if gpus else '"cpu"'
        raise UserError(f'launch.device = "{launch.device}", and torch sees no such device here. Try {others}.')
    if gpus and launch.device != "cpu":
        count = processes or launch.processes or planned or gpus
        if not processes and count > gpus:
            raise UserError(
                f"{_wanted(launch, planned)} on this machine, and there are {gpus} GPUs. Try launch.processes = {gpus}."
            )
        first = numbered()
        told_of(first)
        bf16 = has_bf16(first)
        fp16 = not bf16 and has_fast_fp16(first)
        on_host = host_memory_bytes() / min(count, gpus)
        major, minor = capability(first)
        return Devices(
            count,
            here,
            bf16,
            fp16,
            device_name(first),
            memory_bytes(first),
            on_host,
            per_node=gpus,
            compute_capability=major + minor / 10 or None,
        )
    count = processes or launch.processes or planned or 1
    cores = cores_here()
    if not processes and count > cores:
        warnings.warn(
            f"{_wanted(launch, planned)} on {cores} cores: they will wait for each other.",
            ArgosyWarning,
            stacklevel=2,
        )
    near = int(os.environ.get("LOCAL_WORLD_SIZE", count)) if processes else count
    return Devices(count, "cpu", bf16_is_fast(), memory_bytes=host_memory_bytes() / near, per_node=near)


def _wanted(launch: LaunchConfig, planned: int) -> str:
    """Return in words how many processes this machine is to have, and which setting says so."""
    if launch.processes:
        return f"launch.processes = {launch.processes}"
    nodes = f" (its share of launch.nodes = {launch.nodes})" if launch.nodes > 1 else ""
    return f"the plan's {planned} processes{nodes}"


def check_compiler(plan: Plan, kind: DeviceType) -> None:
    """Raise UserError if `plan` compiles, and there is no compiler here that torch would take for such devices.

    Inductor makes C++ for CPUs (`torch._inductor.config.cpp.cxx`); Triton has a C compiler build what starts kernels.
    """
    variable, usual = ("CXX", ["g++"]) if kind == "cpu" else ("CC", ["gcc", "clang"])
    names = [os.environ[variable]] if os.environ.get(variable) else usual
    if plan.compile and not any(map(shutil.which, names)):
        raise UserError(
            f"compile=true, and this machine has no compiler: {' or '.join(names)} is not on the PATH. Install g++ "
            f"(Debian, Ubuntu: apt-get install g++), name another in {variable}, or train more slowly with "
            "compile=false in the plan: --plan auto,compile=false."
        )


def devices_of_run(run: RunConfig, find: Callable[[LaunchConfig, int], Devices] | None = None) -> Devices:
    """Return the devices of all nodes of a run that is to start, which are assumed to be like this one.

    A part of a run (a site, a worker) takes no CPU's bf16 for fast: other parts may have other CPUs, and all are to
    compute alike. find: finds those here, for a plan that needs as many processes; None: `find_devices`.
    Raises: UserError.
    """
    nodes = run.launch.nodes
    planned = -(-processes_of(run.plan) // nodes)
    here = find(run.launch, planned) if find else find_devices(run.launch, None, planned)
    fast_bf16 = here.fast_bf16 and not (run.sites and here.kind == "cpu")
    return replace(here, count=here.count * nodes, fast_bf16=fast_bf16)


def tell() -> None:
    """Send the client the result of `find_devices`. Entry of a process that is forked where the client has no torch."""
    client = channel_to_parent()
    launch = LaunchConfig.model_validate_json(os.environ[LAUNCH])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            devices = find_devices(launch, None, int(os.environ[PLANNED]))
        except UserError as error:
            client.send("refused", text=str(error))
            return
    client.send("found", devices=asdict(devices), warned=[str(w.message) for w in warned])


def ask(
    fork_server: ForkServer,
    patience: ResilienceConfig,
    launch: LaunchConfig,
    planned: int,
    *,
    meanwhile: Sequence[ForkEntry] = (),
) -> Devices:
    """Call `find_devices` in a process of `fork_server`, without torch in this one.

    meanwhile: called in the fork server once it has forked that process, as it would be idle until there is a plan.
    patience: one that is stopped for heartbeat_timeout_s, or takes longer than first_step_s and SEARCH_S, is replaced.
    Raises: UserError, RunFailed.
    """
    settings = {LAUNCH: launch.model_dump_json(), PLANNED: str(planned)}
    for _ in range(MOST_TRIES):
        channel = fork_server.fork("devices", ForkEntry.of(tell), settings)
        for entry in meanwhile:
            fork_server.prepare(entry, {})
        try:
            limit_s = max(patience.first_step_s, SEARCH_S)
            answer = fork_server.answer("devices", channel, limit_s, patience.heartbeat_timeout_s)
            break
        except ChannelClosed:
            raise RunFailed("the process that looks for devices died; what it printed says why") from None
        except Unanswered as problem:
            print_message(f"argosy: waited for the process that looks for devices ({problem}): it is started again")
            fork_server.replace()
        finally:
            channel.close()
    else:
        raise RunFailed(f"the process that looks for devices did not answer, {MOST_TRIES} times in a row")
    if answer["kind"] == "refused":
        raise UserError(answer["text"])
    for text in answer["warned"]:
        warnings.warn(text, ArgosyWarning, stacklevel=2)
    return Devices(**answer["devices"])


def bf16_is_fast() -> bool:
    """Return True if this CPU has instructions for bf16: what it is, since a measurement depends on the moment."""
    try:
        words = CPUS.read_text(errors="replace").split()
    except OSError:  # no Linux
        return False
    return not BF16_FLAGS.isdisjoint(words)
