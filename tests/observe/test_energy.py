"""What NVML tells of GPUs, by a library that says what NVML's does: the tests' machine has no GPU.

The machine shows itself in the units of the lines.

Energy is measured where hardware tells and estimated elsewhere; a fake powercap tree stands for the kernel's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.config.observe import EnergyConfig
from argosy.observe import energy as energy_module
from argosy.observe.energy import (
    CataloguePower,
    EnergyMeter,
    Rapl,
    RunSoFar,
    energy_of_run,
    price_of,
    totals_of,
    watts_per_device,
)
from argosy.observe.events import Events
from argosy.observe.node_metrics import VISIBLE, HostMeter, NvmlDevices
from argosy.plan.cost.estimate import Estimate
from argosy.plan.hardware.clusters import Cluster
from tiny import run_config


class NVMLError(Exception):
    """As pynvml's: also what a device cannot tell."""


class FakeNvml:
    NVMLError, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = NVMLError, 0, 1

    def __init__(self, gpus: int = 4, unknown: tuple[str, ...] = ()):
        self.energy_mj = [1_000_000 * (number + 1) for number in range(gpus)]
        self._unknown = unknown
        self.silent: tuple[int, ...] = ()
        """GPUs that cannot tell their energy now."""

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
            "nvmlDeviceGetTotalEnergyConsumption": self._energy,
        }
        if name in self._unknown:
            return self._refuse
        return answers[name]

    def _energy(self, gpu: int) -> int:
        if gpu in self.silent:
            raise NVMLError("the GPU is lost")
        return self.energy_mj[gpu]

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


def test_time_in_which_a_gpu_was_silent_is_estimated_and_not_counted_once_more(clock):
    nvml = FakeNvml(gpus=3)
    meter = EnergyMeter(opened(nvml), None, lambda: 100.0)
    told = []
    for silent in ((), (1,), (), ()):
        clock.now_s += 10
        nvml.energy_mj = [each + 1_000_000 for each in nvml.energy_mj]  # 100 W each
        nvml.silent = silent
        told.append(meter.look([0, 1, 2])["energy"])
    assert [each["source"] for each in told] == ["nvml", "estimate", "estimate", "nvml"]
    assert [each["joules"] for each in told] == [3000] * 4


@pytest.mark.parametrize("visible", [None, "7", ""])
def test_without_a_gpu_nothing_is_known(monkeypatch, visible):
    if visible is None:
        assert NvmlDevices.open(FakeNvml(gpus=0)) is None
    else:
        monkeypatch.setenv(VISIBLE, visible)
        assert NvmlDevices.open(FakeNvml()) is None


def test_the_machine_shows_shares_bytes_and_rates(tmp_path):
    meter = HostMeter.open(tmp_path)
    assert meter is not None
    sum(number * number for number in range(10**6))
    seen = meter.look()
    assert set(seen) == {
        "cpu", "memory_used_bytes", "memory_bytes", "disk_free_bytes", "network_sent_bytes_per_s",
        "network_received_bytes_per_s", "load",
    }  # fmt: skip
    assert 0 < seen["cpu"] <= 1 and 0 < seen["memory_used_bytes"] < seen["memory_bytes"]
    assert seen["disk_free_bytes"] > 0 and min(seen.values()) >= 0


RANGE_UJ = 262_143_328_850
"""max_energy_range_uj of an Intel Xeon."""


def powercap(root: Path, **microjoules: int) -> None:
    """The tree of a machine with two packages, as Linux shows it."""
    names = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    for folder, name in names.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "name").write_text(name + "\n")
        (root / folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        (root / folder / "energy_uj").write_text(f"{microjoules.get(name.replace('-', '_'), 0)}\n")


def test_packages_and_their_memory_add_up_and_nothing_counts_twice(tmp_path):
    powercap(tmp_path, package_0=10**6, dram=5, core=7)
    rapl = Rapl.open(tmp_path)
    assert rapl is not None
    powercap(tmp_path, package_0=4 * 10**6, dram=10**6 + 5, core=3 * 10**6, package_1=2 * 10**6, psys=9 * 10**6)
    assert rapl.joules() == pytest.approx(3 + 1 + 2)
    assert rapl.joules() == 0


def test_a_counter_that_begins_again_is_followed(tmp_path):
    powercap(tmp_path, package_0=RANGE_UJ - 10**6)
    rapl = Rapl.open(tmp_path)
    powercap(tmp_path, package_0=2 * 10**6)
    assert rapl is not None and rapl.joules() == pytest.approx(3)


def test_a_time_in_which_one_counter_could_not_be_read_counts_in_none(tmp_path):
    """It is estimated instead, and would count twice."""
    powercap(tmp_path)
    rapl = Rapl.open(tmp_path)
    powercap(tmp_path, package_0=5 * 10**6)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert rapl is not None and rapl.joules() is None
    powercap(tmp_path, package_0=6 * 10**6, package_1=9 * 10**6)
    assert rapl.joules() is None
    powercap(tmp_path, package_0=8 * 10**6, package_1=9 * 10**6)
    assert rapl.joules() == pytest.approx(2)


def test_counters_that_must_not_be_read_are_none(tmp_path):
    assert Rapl.open(tmp_path / "none") is None
    powercap(tmp_path)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()  # as if only root may read it: the tests may be root
    assert Rapl.open(tmp_path) is None


class Counter:
    """Stands for GPUs or CPUs that take a steady power."""

    def __init__(self, clock: Clock, watts: float | None):
        self._clock, self._watts, self._then_s = clock, watts, clock.now_s

    def joules(self, count: int = 1) -> float | None:
        past_s, self._then_s = self._clock.now_s - self._then_s, self._clock.now_s
        return None if self._watts is None else self._watts * past_s * count


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        monkeypatch.setattr(energy_module.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    "gpu_w, cpu_w, catalogue_w, joules, source",
    [
        (600.0, 200.0, 8.0, 10 * (2 * 600 + 200), "nvml"),
        (600.0, None, None, 10 * 2 * 600, "nvml"),
        (None, 200.0, 8.0, 10 * 200, "rapl"),
        (None, None, 8.0, 10 * 2 * 8, "estimate"),
    ],
)
def test_what_is_measured_comes_before_what_is_estimated(clock, gpu_w, cpu_w, catalogue_w, joules, source):
    gpus: Any = gpu_w and Counter(clock, gpu_w)
    cpus: Any = cpu_w and Counter(clock, cpu_w)
    meter = EnergyMeter(gpus, cpus, lambda: catalogue_w)
    clock.now_s += 10
    estimated = {"total_estimated_s": 20.0} if source == "estimate" else {}
    assert meter.look([4, 5]) == {
        "energy": {"joules": joules, "source": source, "total_joules": joules, "total_device_s": 20.0, **estimated}
    }


def test_gpus_that_do_not_tell_are_estimated_not_taken_for_cpus(clock):
    silent: Any = Counter(clock, None)
    cpus: Any = Counter(clock, 200.0)
    meter = EnergyMeter(silent, cpus, lambda: 700.0)
    clock.now_s += 10
    assert meter.look([0])["energy"]["source"] == "estimate"


def test_energy_nobody_knows_is_left_out(clock):
    assert EnergyMeter(None, None, lambda: None).look([0]) == {}


def test_joules_are_whole_and_none_is_lost_and_totals_go_on_after_a_restart(clock, tmp_path):
    meter = EnergyMeter(None, None, lambda: 0.3)
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for _ in range(10):
            clock.now_s += 1
            file.write(json.dumps({"ranks": [0], **meter.look([0])}) + "\n")
        file.write('{"ranks": [0]}\n{"energy": {"jou')  # a line without it, and one that was cut off
    lines = [json.loads(line) for line in path.read_text().splitlines()[:10]]
    assert {type(line["energy"]["joules"]) for line in lines} == {int}
    assert sum(line["energy"]["joules"] for line in lines) in (2, 3)
    assert totals_of(path) == (lines[-1]["energy"]["total_joules"], 10.0, 10.0)
    assert totals_of(tmp_path / "none") == (0.0, 0.0, 0.0)


# ---- of a whole run -----------------------------------------------------------------------------------------------

MACHINE = Cluster.parse("2xh100")
STEP_S = Estimate.exactly(2.0)


def write_lines(run_dir: Path, node: str, **energy: Any) -> None:
    path = run_dir / "nodes" / f"{node}.jsonl"
    path.parent.mkdir(exist_ok=True)
    line = {"time_s": time.time(), "generation": 1, "ranks": [0], "energy": energy}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def so_far(device_s: float = 3600.0, money: float | None = None) -> RunSoFar:
    return RunSoFar(tokens=10**6, steps=1000, device_s=device_s, devices=2, money=money)


def test_a_run_is_the_sum_over_its_nodes_with_what_it_is_worth_here(tmp_path):
    for node in ("a", "b"):
        write_lines(tmp_path, node, joules=1, source="nvml", total_joules=900_000, total_device_s=900.0)
        write_lines(tmp_path, node, joules=1, source="nvml", total_joules=1_800_000, total_device_s=1800.0)
    worth = EnergyConfig(grid_kg_per_kwh=0.1, pue=1.5, price_per_device_h=3.0, currency="EUR")
    found = energy_of_run(tmp_path, worth, MACHINE, so_far(money=3.0), STEP_S)
    assert found is not None and found.source == "nvml" and found.currency == "EUR"
    assert found.kwh == pytest.approx(1.0, rel=1e-3)
    assert found.co2_kg == pytest.approx(1.0 * 1.5 * 0.1, rel=1e-3)
    assert (found.money, found.per_token.money) == (3.0, 3e-6)
    assert found.per_token.kwh == pytest.approx(1e-6, rel=1e-3)
    watts = watts_per_device(MACHINE)
    assert watts is not None and found.predicted is not None
    assert found.predicted.kwh == pytest.approx(2 * 2000 * watts / 3.6e6, rel=1e-3)
    assert found.predicted.co2_kg == pytest.approx(found.predicted.kwh * 1.5 * 0.1, rel=1e-3)
    assert found.predicted.money == pytest.approx(2 * 2000 / 3600 * 3.0, rel=1e-3)
    assert "1 kWh (nvml), 0.15 kg CO2, 3.00 EUR; predicted" in found.in_words()


def test_steps_that_no_line_knows_are_estimated_and_the_whole_is_marked_so(tmp_path):
    write_lines(tmp_path, "a", joules=1, source="nvml", total_joules=500_000, total_device_s=1000.0)
    found = energy_of_run(tmp_path, EnergyConfig(), MACHINE, so_far(), STEP_S)
    watts = watts_per_device(MACHINE)
    assert found is not None and watts is not None and found.source == "estimate"
    assert found.kwh == pytest.approx((500_000 + 2600 * watts) / 3.6e6, rel=1e-3)
    assert "(an estimate)" in found.in_words()


@pytest.mark.parametrize("estimated_s, source", [(30.0, "rapl"), (900.0, "estimate")])
def test_a_run_of_which_much_was_estimated_is_marked_so_whatever_measures_it_now(tmp_path, estimated_s, source):
    totals = {"total_joules": 3_600_000, "total_device_s": 3600.0, "total_estimated_s": estimated_s}
    write_lines(tmp_path, "a", joules=1, source="rapl", **totals)
    found = energy_of_run(tmp_path, EnergyConfig(), None, so_far(), None)
    assert found is not None and found.source == source


def test_a_run_from_before_there_were_lines_on_an_unknown_machine_has_no_figures(tmp_path):
    assert energy_of_run(tmp_path, EnergyConfig(), None, so_far(), None) is None


def test_a_price_is_the_run_file_s_else_the_machine_s():
    own = EnergyConfig(price_per_device_h=3.0, currency="EUR")
    priced_machine = MACHINE.model_copy(update={"price_per_device_h": 2.0, "currency": "CHF"})
    assert [price_of(machine, own) for machine in (None, MACHINE, priced_machine)] == 3 * [(3.0, "EUR")]
    assert price_of(priced_machine, EnergyConfig()) == (2.0, "CHF") and price_of(None, EnergyConfig()) is None


def test_the_catalogue_s_power_is_that_of_the_world_at_hand_once_it_has_started(tmp_path):
    watts, events = CataloguePower(run_config(Path("no data")), tmp_path), Events(tmp_path, "rank-0")
    assert watts() is None
    of = {"processes": 2, "per_node": 2, "peak_flops_per_s": {"fp32": 1e9}}
    events.write("start", time_s=1.0, hardware={**of, "device": "cpu"})
    of_cpu = watts()
    events.write("start", hardware={**of, "device": "NVIDIA H100 80GB HBM3"})
    assert of_cpu is not None and watts() == watts_per_device(MACHINE) != of_cpu


def test_an_unknown_machine_that_measures_has_energy_and_no_price(tmp_path):
    write_lines(tmp_path, "a", joules=1, source="rapl", total_joules=3_600_000, total_device_s=3600.0)
    found = energy_of_run(tmp_path, EnergyConfig(), None, so_far(), None)
    assert found is not None and found.money is None and found.predicted is None
    assert found.kwh == pytest.approx(1.0, rel=1e-3) and found.co2_kg == pytest.approx(1.2 * 0.445, rel=1e-3)
