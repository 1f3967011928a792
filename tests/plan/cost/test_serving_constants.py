"""Engines are found in texts, and what is unknown of them falls back to what is known of all."""

from __future__ import annotations

import pytest

from argosy.plan.cost.serving_constants import ServingEngine, fitted_serving, spread_of


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


def test_five_rows_narrow_an_interval() -> None:
    for metric in ("ttft", "tpot", "e2e_latency", "throughput"):
        assert spread_of(metric, "NVIDIA", "calibrated") < spread_of(metric, "NVIDIA")
    assert spread_of("e2e_latency", "AMD", "calibrated") == spread_of("e2e_latency", "X", "calibrated")
    assert spread_of("tpot", "X", "calibrated") >= spread_of("tpot", "NVIDIA", "calibrated")
