"""What the GPUs of a node show: utilisation, memory, temperature, power, clock and energy, as NVML tells them.

NVML is NVIDIA's; without its library or the package `nvidia-ml-py` (the extra `devices`) nothing is known. AMD's
devices are left out. The device itself is not touched: NVML asks the driver.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


class NvmlDevices:
    """The GPUs that this node's processes see, in CUDA's order: the i-th process has the i-th."""

    def __init__(self, nvml: Any, handles: Sequence[Any]):
        """`nvml` is the module `pynvml`, initialised."""
        self._nvml, self._handles = nvml, handles
        self._before_mj: dict[int, int] = {}

    @classmethod
    def open(cls, nvml: Any = None) -> NvmlDevices | None:
        """Return the GPUs; None if there are none, or nobody knows of them."""
        try:
            nvml = nvml or importlib.import_module("pynvml")  # nvidia-ml-py
            nvml.nvmlInit()
            handles = _handles(nvml)
        except Exception:  # no package, no library, no driver, no permission
            return None
        found = cls(nvml, handles)
        found.joules(len(handles))  # from here on
        return found if handles else None

    def look(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return what each GPU of these ranks, ascending, shows now; what it does not tell is left out."""
        found = []
        for rank, handle in zip(ranks, self._handles, strict=False):
            shown = {"ranks": [rank], **{key: self._ask(ask, handle) for key, ask in self._questions().items()}}
            found.append({key: value for key, value in shown.items() if value is not None})
        return found

    def joules(self, count: int) -> float | None:
        """Return the energy that the first `count` GPUs have taken since the last call; None if one does not tell.

        A counter that was reset, as a driver does it when it is loaded, counts from 0.
        """
        total = 0.0
        for number, handle in enumerate(self._handles[:count]):
            now = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            if now is None:
                return None
            before = self._before_mj.get(number, now)
            self._before_mj[number] = now
            total += (now - before if now >= before else now) / 1e3
        return total

    def _questions(self) -> dict[str, Callable[[Any], Any]]:
        nvml = self._nvml
        return {
            "name": lambda gpu: _text(nvml.nvmlDeviceGetName(gpu)),
            "utilisation": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        }

    def _ask(self, ask: Callable[[Any], Any], handle: Any) -> Any:
        with suppress(self._nvml.NVMLError):  # not supported, or the GPU is lost
            return ask(handle)
        return None


def _handles(nvml: Any) -> list[Any]:
    """Return the handles of the visible GPUs, which CUDA_VISIBLE_DEVICES names by number or UUID, in its order."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
