"""Engines are found in texts, and what is unknown of them falls back to what is known of all."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from argosy.plan.cost.serving_constants import (
    ServingConstants,
    ServingEngine,
    fitted_serving,
    spread_of,
    unknown_std,
    unknown_variances,
)


@pytest.mark.parametrize(
    ("text", "name", "old"),
    [
        ("vLLM 0.16.0", "vLLM", False),
        ("vllm==0.5.4", "vLLM", True),
        ("LLM-Inference-Bench@4211f5d:TensorRT-LLM", "TensorRT-LLM", False),
        ("TensorRT-LLM v0.6.1 performance.md", "TensorRT-LLM", True),
        ("docs.nvidia.com/nim/benchmarking/llm", "TensorRT-LLM", False),
        ("vllm/performance-benchmark: SGLang 0.4", "SGLang", False),
        ("Deepspeed-MII", "DeepSpeed-MII", True),
        ("a paper", "", False),
    ],
)
def test_engine_of_a_text(text: str, name: str, old: bool) -> None:
    found = ServingEngine.of(text)
    assert (found.name, found.old) == (name, old)


def test_what_is_not_known_of_an_engine_is_that_of_all() -> None:
    found = fitted_serving()
    assert found.of(ServingEngine(), "NVIDIA", "B300") == found.constants
    assert found.of(ServingEngine("TGI"), "NVIDIA", "H200") == found.constants
    assert found.of(ServingEngine.of("vLLM 0.10"), "NVIDIA", "H100-SXM") != found.constants


def test_measured_devices_have_narrower_intervals_than_ports() -> None:
    of_nvidia, of_amd, of_another = (spread_of("e2e_latency", name, "calibrated") for name in ("NVIDIA", "AMD", "X"))
    assert of_nvidia < of_amd <= of_another
    for metric in ("tpot", "throughput"):
        assert spread_of(metric, "NVIDIA", "calibrated") < spread_of(metric, "NVIDIA")


def test_what_nobody_has_measured_widens_an_interval() -> None:
    """Of `overhead` in time = overhead^0.5: 0.4 for an engine, three times as much for its port to a maker's device."""

    def predict(constants: ServingConstants) -> NDArray[np.float64]:
        return np.array([1.0, float(constants.overhead) ** 0.5])

    groups = ServingEngine("TGI").groups("Maker", "M1")
    assert groups == ("TGI", "Maker", "TGI on Maker", "TGI on M1")
    new = unknown_variances(groups, {"Maker"})
    assert unknown_std(predict, ServingConstants(), new) == pytest.approx([0.0, 0.5 * 0.4 * 19**0.5], rel=1e-6)
    assert unknown_variances(groups, groups)["overhead"] == 0
