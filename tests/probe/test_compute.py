"""What is measured of a device is what a model of these sizes does, and the figures are those of the clock.

The work of compressing is measured for each word, by processes that send nothing to each other.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from argosy.parallel.world import World
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.measurements import Measurements
from argosy.plan.sync import COMPRESSED
from argosy.probe.compute import (
    DISK_BLOCK_BYTES,
    Matmul,
    matmuls_to_measure,
    measure_attention,
    measure_compression,
    measure_copy,
    measure_disk,
    measure_launch,
    measure_layer_host,
    measure_loader,
    measure_matmuls,
    seconds,
)
from tiny import model_config, run_config
from workers import WorkerPool

CPU = torch.device("cpu")


def test_a_call_takes_as_long_as_it_takes() -> None:
    assert 0.02 <= seconds(lambda: time.sleep(0.02), CPU, slice_s=0.1) < 0.06


def test_short_calls_are_timed_together() -> None:
    assert seconds(lambda: None, CPU, slice_s=0.02) < 1e-5


def test_each_weight_of_the_model_is_measured_in_its_three_matmuls() -> None:
    cases = [c for c in matmuls_to_measure(model_config(), 128, "cpu") if c.kind != "square"]
    weights = {(c.n, c.k) for c in cases if c.kind == "forward"}  # outputs, inputs
    assert weights == {(32, 32), (16, 32), (64, 32), (32, 64), (400, 32)}
    assert len(cases) == len(set(cases)) == len(weights) * 3 * 2  # each in two formats
    assert {(c.m, c.k, c.n) for c in cases if c.n == 32 and c.kind == "weight_gradient"} >= {(400, 128, 32)}
    assert all(128 in (c.m, c.k) for c in cases)


def test_experts_are_measured_with_their_share_of_the_tokens() -> None:
    moe = {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 48, "first_dense_layers": 1}
    cases = matmuls_to_measure(model_config(moe=moe), 128, "cpu")
    assert {c.m for c in cases if c.n == 48 and c.kind == "forward"} == {64}
    assert {c.m for c in cases if c.n == 64 and c.kind == "forward"} == {128}  # the dense layer


def test_rates_are_of_the_shapes_that_were_asked_for() -> None:
    asked = [Matmul(256, 256, 256, "square", "fp32"), Matmul(64, 128, 256, "weight_gradient", "fp32")]
    rates = measure_matmuls(World(), asked, slice_s=0.02)
    assert [(r.m, r.k, r.n, r.kind) for r in rates] == [(c.m, c.k, c.n, c.kind) for c in asked]
    a = torch.randn(256, 256)
    expected = 2 * 256**3 / seconds(lambda: a @ a, CPU, slice_s=0.02)
    assert 1 / 4 < rates[0].flops_per_s / expected < 4  # other people use this machine


def test_what_would_take_too_long_is_left_out() -> None:
    asked = [Matmul(256, 256, 256, "square", "fp32"), Matmul(10**6, 10**5, 10**5, "forward", "fp32")]
    assert len(measure_matmuls(World(), asked, slice_s=0.02)) == 1


@pytest.mark.parametrize("latent", [False, True], ids=["grouped queries", "latent attention"])
def test_attention_has_a_rate_in_each_format(latent: bool) -> None:
    keys = {"kv_heads": 4, "mla": {"kv_rank": 8, "rope_width": 8, "nope_width": 8, "value_width": 16}} if latent else {}
    rates = measure_attention(World(), model_config(**keys), seq_len=64, slice_s=0.01)
    assert [rate.number_format for rate in rates] == ["fp32", "bf16"]
    assert all(1e6 < rate.forward_flops_per_s < 1e13 for rate in rates)


def test_the_host_and_the_memory_have_likely_figures() -> None:
    launch_s, layer_s = measure_launch(World(), 0.02), measure_layer_host(World(), 0.05)
    assert 1e-7 < launch_s < layer_s < 1
    assert 1e8 < measure_copy(World(), 0.05) < 1e12


def measured(world: World) -> list[tuple[str, float]]:
    return [(rate.sync, rate.number_s) for rate in measure_compression(world, slice_s=0.01)]


def test_each_word_is_measured_the_same_on_all_processes(workers: WorkerPool) -> None:
    first, second = workers.run(2, measured)
    assert first == second
    assert [word for word, _ in first] == list(COMPRESSED)
    assert all(1e-12 < number_s < 1e-4 for _, number_s in first)


def test_the_planner_takes_what_was_measured(tmp_path: Path) -> None:
    cluster = Cluster.parse("8xh100")
    found = Measurements.model_validate({"compression": [{"sync": "int8", "number_s": 3e-9}]})
    cluster.model_copy(update={"measured": found}).save(tmp_path / "cluster.toml")
    costs = CostModel.of(run_config(tmp_path), Cluster.load(tmp_path / "cluster.toml"))
    assert costs.compression.measured_s == {"int8": 3e-9}


def test_the_disk_has_rates_and_keeps_no_file(tmp_path: Path) -> None:
    rates = measure_disk(World(), tmp_path, 2 * DISK_BLOCK_BYTES)
    assert 1e5 < rates.write_bytes_per_s < 1e12 and 1e5 < rates.read_bytes_per_s < 1e12
    assert not list(tmp_path.iterdir())


def test_the_loader_reads_the_run_s_data(corpus: Path) -> None:
    assert 1e4 < measure_loader(World(), run_config(corpus), 0.05) < 1e11


def test_without_prepared_data_it_reads_text_of_its_own(tmp_path: Path) -> None:
    assert 1e4 < measure_loader(World(), run_config(tmp_path / "none"), 0.1) < 1e11
    assert not list(tmp_path.iterdir())
