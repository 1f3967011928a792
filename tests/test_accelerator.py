"""The one place that asks torch about accelerators: a backend that is not cuda is driven here with a stand-in for its
module, since no machine of ours has one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argosy import accelerator
from argosy.config.launch import LaunchConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.launch.devices import find_devices

SOURCE = Path(accelerator.__file__).parent
ONE_PLACE = Path("accelerator.py")
STAND_IN = Path("simulate/cuda_calls.py")
"""It answers in the place of torch.cuda."""
TYPES = Path("config/launch.py")
"""The table of the device types that a run file may name."""


@pytest.fixture
def gaudi(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """torch with the backend hpu: `torch.hpu` as a plug-in registers it, and what `torch.accelerator` says of it."""
    state: dict[str, Any] = {"rng": torch.arange(4, dtype=torch.uint8), "used": None}
    module = SimpleNamespace(
        get_device_name=lambda _: "HL-325L",
        get_device_properties=lambda _: SimpleNamespace(total_memory=128e9),
        get_rng_state=lambda _: state["rng"].clone(),
        set_rng_state=lambda new, _: state.update(rng=new),
        is_bf16_supported=lambda: True,
    )
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    torch.get_device_module.cache_clear()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("hpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: state.update(used=device))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: 7)
    yield state
    torch.get_device_module.cache_clear()


def test_an_accelerator_of_another_maker_is_found_and_described(gaudi: dict[str, Any]) -> None:
    with pytest.warns(ArgosyWarning, match="hpu devices: .* nobody has run it on them yet"):
        found = find_devices(LaunchConfig())
    assert (found.kind, found.count, found.name) == ("hpu", 8, "HL-325L")
    assert found.memory_bytes == 128e9 and found.fast_bf16 and not found.fast_fp16
    with pytest.raises(UserError, match=r'launch\.device = "cuda", and torch sees no such device here\. Try "hpu" or'):
        find_devices(LaunchConfig(device="cuda"))
    assert find_devices(LaunchConfig(device="cpu")).kind == "cpu"


def test_amd_s_devices_have_cuda_s_name_and_are_warned_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    with pytest.warns(ArgosyWarning, match="ROCm devices: .* nobody has run it on them yet"):
        accelerator.told_of(torch.device("cuda"))


def test_random_numbers_and_memory_are_the_backend_s(gaudi: dict[str, Any]) -> None:
    device = accelerator.numbered(3)
    assert device == torch.device("hpu", 3) and accelerator.kind_of(device) == "accelerator"
    before = accelerator.random_state(device)
    assert before is not None
    gaudi["rng"] = torch.zeros(4, dtype=torch.uint8)
    accelerator.set_random_state(before, device)
    assert torch.equal(gaudi["rng"], torch.arange(4, dtype=torch.uint8))
    assert accelerator.peak_memory_bytes(device) == 7
    accelerator.use(device)
    assert gaudi["used"] == device
    assert accelerator.allocations(device) is None and not accelerator.is_amd_with_fp8(device)
    assert torch.profiler.ProfilerActivity.HPU in accelerator.profiler_activities(device)


def test_each_device_has_the_backend_of_process_groups_that_torch_has_for_it() -> None:
    backends = {name: accelerator.backend_of(torch.device(name)) for name in ("cpu", "cuda", "xpu")}
    assert backends == {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


def test_a_cpu_goes_through_the_same_functions() -> None:
    cpu = torch.device("cpu")
    accelerator.synchronize(cpu)
    accelerator.use(cpu)
    assert accelerator.random_state(cpu) is None and accelerator.device_name(cpu) == "cpu"
    assert 0 < accelerator.seconds_of(lambda: torch.ones(64, 64) @ torch.ones(64, 64), cpu) < 60
    with accelerator.on_stream(None):
        assert accelerator.peak_memory_bytes(cpu) > 2**20


def test_no_other_module_names_torch_cuda() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place, text = path.relative_to(SOURCE), path.read_text()
        for node in ast.walk(ast.parse(text)) if "cuda" in text or "nccl" in text else ():
            is_attribute = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
            is_import = isinstance(node, ast.Import | ast.ImportFrom) and "torch.cuda" in ast.unparse(node)
            says_cuda = isinstance(node, ast.Constant) and node.value in ("cuda", "nccl")
            if place not in (ONE_PLACE, STAND_IN) and (is_attribute or is_import or (says_cuda and place != TYPES)):
                found.append(f"{place}:{node.lineno} {ast.unparse(node)}")
    assert not found
