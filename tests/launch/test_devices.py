"""What this machine has to compute with."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from argosy.config.launch import LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.config.sync import SiteConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.launch.devices import ask, check_compiler, devices_of_run, find_devices
from argosy.plan.hardware.local_machine import cores_here
from argosy.plan.plan import Plan
from argosy.processes.child import ForkEntry, channel_to_parent
from argosy.processes.fork_server import ForkServer

CORES = cores_here()


def test_a_cpu_has_one_process_unless_the_user_says_otherwise():
    devices = find_devices(LaunchConfig(device="cpu"))
    assert (devices.count, devices.kind) == (1, "cpu")
    assert find_devices(LaunchConfig(device="cpu", processes=CORES)).count == CORES


def test_more_processes_than_cores_are_granted_with_a_warning():
    with pytest.warns(ArgosyWarning, match=f"launch.processes = {CORES + 1} on {CORES} cores"):
        assert find_devices(LaunchConfig(device="cpu", processes=CORES + 1)).count == CORES + 1


def test_processes_that_only_the_plan_asks_for_are_not_told_as_the_user_s():
    with pytest.warns(ArgosyWarning, match=rf"the plan's {CORES + 1} processes \(its share of launch.nodes = 2\) on"):
        find_devices(LaunchConfig(device="cpu", nodes=2), planned=CORES + 1)


def test_processes_that_run_already_are_taken_as_they_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_devices(LaunchConfig(device="cpu", processes=1), processes=CORES + 1).count == CORES + 1


ZEN_5 = "processor : 0\nflags\t\t: fpu vme avx512f avx512_bf16 avx512vbmi\n"
HASWELL = "processor : 0\nflags\t\t: fpu vme avx2\n"


@pytest.mark.parametrize(("text", "is_fast"), [(ZEN_5, True), (HASWELL, False), (None, False)])
def test_the_number_format_follows_what_a_cpu_is_and_not_the_moment(text, is_fast, tmp_path, monkeypatch):
    cpus = tmp_path / "cpuinfo"
    if text is not None:
        cpus.write_text(text)
    monkeypatch.setattr("argosy.launch.devices.CPUS", cpus)
    monkeypatch.setattr("argosy.observe.clock.matmul_peak_flops", None)  # nothing is measured
    run = RunConfig(plan="auto", launch=LaunchConfig(device="cpu", processes=1))
    assert devices_of_run(run).fast_bf16 is is_fast


def test_parts_of_a_run_compute_alike_on_other_cpus(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(ZEN_5)
    monkeypatch.setattr("argosy.launch.devices.CPUS", tmp_path / "cpuinfo")
    launch = LaunchConfig(device="cpu", processes=1)
    assert devices_of_run(RunConfig(plan="auto", launch=launch)).fast_bf16
    part = RunConfig(plan="auto", launch=launch, sites=(SiteConfig(name="oslo"), SiteConfig(name="lyon")))
    assert not devices_of_run(part).fast_bf16


@pytest.mark.parametrize(("kind", "compiler", "variable"), [("cpu", "g++", "CXX"), ("cuda", "clang", "CC")])
def test_a_plan_that_compiles_is_refused_where_no_compiler_is(kind, compiler, variable, tmp_path, monkeypatch):
    compiled = Plan.parse("compile=true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=rf"compile=true, and .* no compiler: g.* not on the PATH.* {variable}.*=false"):
        check_compiler(compiled, kind)
    check_compiler(Plan.parse("compile=false"), kind)
    (tmp_path / compiler).touch(0o755)
    check_compiler(compiled, kind)
    monkeypatch.setenv(variable, "another-compiler")
    with pytest.raises(UserError, match="another-compiler is not on the PATH"):
        check_compiler(compiled, kind)


def test_a_fork_server_that_is_stopped_while_it_starts_does_not_hold_up_the_start(capfd):
    with closing(ForkServer("colorsys")) as forks:
        os.kill(forks.pid, signal.SIGSTOP)
        patience = ResilienceConfig(heartbeat_timeout_s=1.0)
        devices = ask(forks, patience, LaunchConfig(device="cpu", processes=1), 0)
    assert devices.count == 1
    assert "waited for the process that looks for devices (the process that forks it: it was" in capfd.readouterr().err


def wait_for_file() -> None:
    """Entry of the fork server itself: wait until the test has its answer."""
    end_s = time.monotonic() + 60
    while not Path(os.environ["ANSWERED"]).exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.environ["LOADED"] = "yes"


def tell_what_is_loaded() -> None:
    """Entry: tell whether `wait_for_file` has ended in the fork server."""
    channel_to_parent().send("loaded", answer=os.environ["LOADED"])


def test_what_the_fork_server_does_meanwhile_does_not_hold_up_the_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("ANSWERED", str(tmp_path / "answered"))
    with closing(ForkServer("colorsys")) as forks:
        slow, launch = ForkEntry.of(wait_for_file), LaunchConfig(device="cpu", processes=1)
        assert ask(forks, ResilienceConfig(), launch, 0, meanwhile=[slow]).count == 1
        (tmp_path / "answered").touch()
        assert forks.fork("later", ForkEntry.of(tell_what_is_loaded), {}).receive()["answer"] == "yes"


@pytest.mark.parametrize(("capability", "bf16", "fp16"), [((7, 5), False, True), ((8, 0), True, False)])
def test_bf16_that_a_gpu_only_emulates_is_not_fast(capability, bf16, fp16, monkeypatch):
    for name, value in {
        "is_available": True,
        "get_device_capability": capability,
        "get_device_name": "Tesla T4",
        "get_device_properties": SimpleNamespace(total_memory=15e9, major=capability[0]),
        "current_device": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    devices = find_devices(LaunchConfig())
    assert (devices.kind, devices.fast_bf16, devices.fast_fp16) == ("cuda", bf16, fp16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r'launch\.device = "cuda", and torch sees no such device here\. Try "cpu"'):
        find_devices(LaunchConfig(device="cuda"))
