"""What NVML tells of GPUs, by a library that says what NVML's does: the tests' machine has no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from argosy.observe.devices import VISIBLE, NvmlDevices


class NVMLError(Exception):
    """As pynvml's: also what a device cannot tell."""


class FakeNvml:
    NVMLError, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = NVMLError, 0, 1

    def __init__(self, gpus: int = 4, unknown: tuple[str, ...] = ()):
        self.energy_mj = [1_000_000 * (number + 1) for number in range(gpus)]
        self._unknown = unknown

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.energy_mj:
            raise NVMLError("no driver")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.energy_mj)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        if number >= len(self.energy_mj):
            raise NVMLError("no such device")
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return int(uuid.removeprefix("GPU-"))

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetName": lambda gpu: f"NVIDIA H100 {gpu}",
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=60 * 2**30),
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 55 + gpu,
            "nvmlDeviceGetPowerUsage": lambda gpu: 650_500,
            "nvmlDeviceGetClockInfo": lambda gpu, clock: 1755,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: self.energy_mj[gpu],
        }
        if name in self._unknown:
            return self._refuse
        return answers[name]

    def _refuse(self, *args: Any) -> Any:
        raise NVMLError("not supported")


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)


def opened(nvml: FakeNvml) -> NvmlDevices:
    devices = NvmlDevices.open(nvml)
    assert devices is not None
    return devices


def test_each_rank_s_gpu_is_shown_in_the_units_of_the_lines():
    assert opened(FakeNvml()).look([6, 7])[1] == {
        "ranks": [7],
        "name": "NVIDIA H100 1",
        "utilisation": 0.97,
        "memory_bytes": 60 * 2**30,
        "temperature_c": 56,
        "power_w": 650.5,
        "clock_mhz": 1755,
    }


@pytest.mark.parametrize("visible, gpus", [("2,0", [2, 0]), ("GPU-3, 1", [3, 1]), ("1", [1])])
def test_gpus_are_those_that_the_processes_see_in_their_order(monkeypatch, visible, gpus):
    monkeypatch.setenv(VISIBLE, visible)
    assert [gpu["name"] for gpu in opened(FakeNvml()).look([0, 1])] == [f"NVIDIA H100 {number}" for number in gpus]


def test_what_a_gpu_does_not_tell_is_left_out():
    devices = opened(FakeNvml(unknown=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption")))
    assert "power_w" not in devices.look([0])[0] and "clock_mhz" in devices.look([0])[0]
    assert devices.joules(1) is None


def test_energy_is_that_since_the_last_call_also_after_a_reset():
    nvml = FakeNvml()
    devices = opened(nvml)
    nvml.energy_mj = [1_500_000, 2_000_000, 9_000_000, 9_000_000]
    assert devices.joules(2) == pytest.approx(500)
    nvml.energy_mj[0] = 30_000  # the driver was loaded anew
    assert devices.joules(2) == pytest.approx(30)


@pytest.mark.parametrize("visible", [None, "7", ""])
def test_without_a_gpu_nothing_is_known(monkeypatch, visible):
    if visible is None:
        assert NvmlDevices.open(FakeNvml(gpus=0)) is None
    else:
        monkeypatch.setenv(VISIBLE, visible)
        assert NvmlDevices.open(FakeNvml()) is None
