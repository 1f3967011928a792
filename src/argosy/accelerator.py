"""The run's device: the one place where torch is asked about GPUs and other accelerators.

`torch.accelerator` speaks for the backend that torch was built with or that a plug-in registered: cuda (NVIDIA, and AMD
by ROCm), xpu (Intel), hpu (Gaudi), npu (Ascend), mps (Apple). Random generators, names and properties are in the
backend's own module, which torch finds by the device (`torch.get_device_module`); what a backend lacks there is left
out or asked of the host. Every function takes a CPU too.

Argosy was tested on CPUs, and on one GPU of NVIDIA's (benchmarks/results/gpu.md). On the other backends nobody has run
it yet, and `told_of` says so.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from argosy.config.launch import DeviceType
from argosy.errors import ArgosyWarning

CPU = torch.device("cpu")
Kind = Literal["cpu", "accelerator"]
"""A device's name in the catalogue (`plan.hardware.devices.Device.kind`): sizes that are tuned differ by it."""
CLEAR_REFS = Path("/proc/self/clear_refs")
NVIDIA: DeviceType = "cuda"
NCCL = "nccl"
"""The backend of process groups on cuda devices: NCCL, or RCCL by the same name."""
TENSOR_CORES = (7, 0)
"""CUDA compute capability of the first devices with fast fp16 (Volta)."""
FP8_OF_AMD = ("gfx94", "gfx95")
"""ROCm's names of the architectures with fp8: CDNA 3 (MI300) and 4 (MI350)."""
Mark = float | torch.Event


def kind_of(device: torch.device) -> Kind:
    return "cpu" if device.type == "cpu" else "accelerator"


def is_accelerator(device: torch.device) -> bool:
    """Return True for a device that computes beside its host: neither a CPU nor a tensor without memory."""
    return device.type not in ("cpu", "meta")


def type_here() -> DeviceType:
    """Return the type of accelerator that torch can use on this machine; "cpu" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    known = get_args(DeviceType)
    return found.type if found is not None and found.type in known else "cpu"  # type: ignore[return-value]


def count_here() -> int:
    """Return how many accelerators torch can use on this machine."""
    return 0 if type_here() == "cpu" else torch.accelerator.device_count()


def numbered(number: int = 0) -> torch.device:
    """Return the accelerator of this number on this machine; the CPU if there is none."""
    kind = type_here()
    return CPU if kind == "cpu" else torch.device(kind, number)


def use(device: torch.device) -> None:
    """Make `device` the one that this process computes on."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def told_of(device: torch.device) -> None:
    """Warn of a backend that Argosy has never run on."""
    kind = "ROCm" if device.type == NVIDIA and torch.version.hip else device.type
    if is_accelerator(device) and kind != NVIDIA:
        warnings.warn(
            f"{kind} devices: Argosy goes through torch.accelerator here, and nobody has run it on them yet. Compare a "
            "short run with one on a CPU (argosy parity) before you trust it.",
            ArgosyWarning,
            stacklevel=2,
        )


# Process groups


def backend_of(device: torch.device) -> str:
    """Return the backend of process groups on such devices: gloo, nccl, xccl, or what a plug-in registered (hccl)."""
    return dist.get_default_backend_for_device(device)


def nccl_part(group: dist.ProcessGroup) -> Any:
    """Return NCCL's part of `group`, which can abort several as one; None if it has none."""
    if not dist.is_nccl_available() or dist.get_backend(group) != NCCL:
        return None
    with suppress(RuntimeError):
        return group._get_backend(torch.device(NVIDIA))
    return None


# Streams and events


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU always has."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Enqueue what this block computes in `stream`; None: where it would be anyway."""
    return nullcontext() if stream is None else stream


def mark(device: torch.device) -> Mark:
    """Return the present: of an accelerator an event in the current stream, of a CPU the clock."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks of one device; of an accelerator once it has reached the second one."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1e3


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the device takes for `call`."""
    start = mark(device)
    call()
    end = mark(device)
    if not isinstance(end, float):
        end.synchronize()
    return seconds_between(start, end)


# Between host and device


def sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on `device`. An accelerator copies what is the host's in its own time, out of pinned memory: out
    of any other the host would wait for all that the device has still to do."""
    if is_accelerator(device) and not is_accelerator(tensor.device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def sent_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; an accelerator's is there once the device was waited for, and not before."""
    return tensor.to(CPU, non_blocking=True) if is_accelerator(tensor.device) else tensor.clone()


# Memory


def memory_bytes(device: torch.device) -> float:
    """Return the memory of an accelerator."""
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        return float(module.get_device_properties(device).total_memory)
    if hasattr(module, "recommended_max_memory"):  # mps shares the host's
        return float(module.recommended_max_memory())
    return float(torch.accelerator.get_memory_info(device)[1])


def free_bytes(device: torch.device) -> float:
    """Return the memory of an accelerator that no process holds."""
    module = torch.get_device_module(device)
    if hasattr(module, "recommended_max_memory"):
        return float(module.recommended_max_memory() - module.driver_allocated_memory())
    return float(torch.accelerator.get_memory_info(device)[0])


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process since `forget_peak_memory`, or ever: allocated on an accelerator that
    counts it, else resident on the host."""
    if is_accelerator(device):
        with suppress(RuntimeError):  # mps counts no peak
            return int(torch.accelerator.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory(device: torch.device) -> None:
    """Restart `peak_memory_bytes` from what is held now, where the system can do that."""
    if is_accelerator(device):
        with suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not every kernel has it
            CLEAR_REFS.write_text("5")  # proc(5): "reset the peak resident set size"


def allocations(device: torch.device) -> list[Any] | None:
    """Return what the allocator holds, as https://pytorch.org/memory_viz reads it; None if the backend cannot tell.

    The history of allocations is not public (`torch.cuda.memory._record_memory_history`); a trace has each allocation
    with its time.
    """
    snapshot = getattr(torch.get_device_module(device), "memory_snapshot", None) if is_accelerator(device) else None
    return None if snapshot is None else snapshot()


# Random numbers


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of an accelerator's random generator; None for a CPU, whose is torch's own."""
    if not is_accelerator(device):
        return None
    module = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Put back what `random_state` returned."""
    module = torch.get_device_module(device)
    module.set_rng_state(state) if device.type == "mps" else module.set_rng_state(state, device)


# What the device is


def device_name(device: torch.device) -> str:
    """Return "cpu", or the driver's name of the accelerator; its type if the backend has no name for it."""
    name = getattr(torch.get_device_module(device), "get_device_name", None) if is_accelerator(device) else None
    return device.type if name is None else str(name(device))


def software(device: torch.device) -> str:
    """Return the versions that speed depends on, e.g. "torch 2.13.0, CUDA 13.0, NCCL 2.28.9"."""
    parts = [f"torch {torch.__version__}"]
    if device.type == NVIDIA:
        rocm = getattr(torch.version, "hip", None)
        parts += [f"ROCm {rocm}" if rocm else f"CUDA {torch.version.cuda}"]
        parts += [f"{'RCCL' if rocm else 'NCCL'} {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    elif is_accelerator(device):
        parts += [device.type]
    return ", ".join(parts)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability; (0, 0) of other devices, AMD's among them, whose numbers mean another thing.

    Tensor cores, fp8 and their like are told apart by it.
    """
    if device.type != NVIDIA or getattr(torch.version, "hip", None):
        return 0, 0
    return torch.cuda.get_device_capability(device)


def has_bf16(device: torch.device) -> bool:
    """Return True if the accelerator multiplies in bf16 by itself, not by emulation."""
    module = torch.get_device_module(device)
    if device.type == NVIDIA:
        return bool(module.is_bf16_supported(including_emulation=False))
    if hasattr(module, "is_bf16_supported"):
        return bool(module.is_bf16_supported())
    return torch.bfloat16 in torch.accelerator.get_device_capability(device)["supported_dtypes"]


def has_fast_fp16(device: torch.device) -> bool:
    """Return True if the accelerator is known to multiply faster in fp16 than in fp32."""
    return capability(device) >= TENSOR_CORES


def is_amd_with_fp8(device: torch.device) -> bool:
    """Return True for AMD's devices on which torchao's fp8 matmuls run; of NVIDIA's, `capability` tells."""
    if device.type != NVIDIA or not getattr(torch.version, "hip", None):
        return False
    return str(torch.cuda.get_device_properties(device).gcnArchName).startswith(FP8_OF_AMD)


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what a profile of work on `device` records."""
    if not is_accelerator(device):
        return [ProfilerActivity.CPU]
    of_device = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    return [ProfilerActivity.CPU, of_device]
