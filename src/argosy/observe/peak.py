"""What a device is, and what it can do: the matmul rate that MFU is measured against."""

from __future__ import annotations

import time

import torch

SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS, MOST_S = 12, 1.0
"""Matmuls that are timed; no more is begun after MOST_S, since CPUs without fp16 take seconds for each."""


def matmul_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of a large square matmul, in FLOP/s, measured here and now (mostly 0.1 to 0.3 s).

    The best of several, since a busy machine can only make one slower.
    """
    size = SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < MOST_S:
        seconds.append(_seconds(a, b))
    return 2.0 * size**3 / min(seconds)


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    a @ b
    return time.perf_counter() - began


def device_name(device: torch.device) -> str:
    """Return "cpu", or the driver's name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def software(device: torch.device) -> str:
    """Return the versions that speed depends on, e.g. "torch 2.13.0, CUDA 13.0, NCCL 2.28.9"."""
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return ", ".join(parts)
