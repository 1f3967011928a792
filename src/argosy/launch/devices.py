"""What this machine has to compute with."""

from __future__ import annotations

import os
import warnings

import torch

from argosy.config.schema import LaunchConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.observe.peak import matmul_peak_flops
from argosy.plan.auto import Devices

FAST_BF16 = 1.5
"""bf16 pays where its matmuls are this much faster than fp32's: GPUs, and CPUs with AMX."""


def find_devices(launch: LaunchConfig, processes: int | None = None, planned: int = 0) -> Devices:
    """The devices for a plan: `processes` if they run already, else as many as `launch` says, or the plan needs.

    Raises: UserError if `launch` asks for a GPU and there is none, or for more processes than GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if launch.device == "cuda" and not gpus:
        raise UserError('launch.device = "cuda", and torch sees no GPU here. Try launch.device = "cpu".')
    if gpus and launch.device != "cpu":
        count = processes or launch.processes or planned or gpus
        if not processes and count > gpus:
            raise UserError(f"launch.processes = {count}, and there are {gpus} GPUs. Try launch.processes = {gpus}.")
        return Devices(count, "cuda", torch.cuda.is_bf16_supported())
    count = processes or launch.processes or planned or 1
    cores = len(os.sched_getaffinity(0))
    if not processes and count > cores:
        warnings.warn(
            f"launch.processes = {count} on {cores} cores: they will wait for each other.",
            ArgosyWarning,
            stacklevel=2,
        )
    return Devices(count, "cpu", _bf16_is_fast())


def _bf16_is_fast() -> bool:
    cpu = torch.device("cpu")
    return matmul_peak_flops(cpu, torch.bfloat16) > FAST_BF16 * matmul_peak_flops(cpu, torch.float32)
