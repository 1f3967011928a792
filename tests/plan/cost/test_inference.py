"""Inference: published cache sizes, and the roofline's two sides."""

from __future__ import annotations

import pytest
from argosy.plan.report.inference_report import search_serving

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.inference import Serving
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.search.space import parse_pins

KIB = 1024


def ways_of(model: str, cluster: str, sequences: int, fix: str = "") -> list[Serving]:
    run = load(None, {"model.preset": model, "data.seq_len": 4096, "train.global_batch": sequences})
    return search_serving(CostModel.of(run, Cluster.parse(cluster)), parse_pins(fix))


def only(model: str, cluster: str, sequences: int, fix: str = "tp=1,pp=1") -> Serving:
    (way,) = ways_of(model, cluster, sequences, fix)
    return way


@pytest.mark.parametrize(
    ("model", "cluster", "fix", "of_token"),
    [
        ("llama3-8b", "1xh100", "tp=1,pp=1", 128 * KIB),  # 32 layers x 8 heads x 128 x 2 x 2 bytes
        ("llama3-70b", "8xh100", "tp=8,pp=1", 40 * KIB),  # 80 layers x 1 of 8 heads x 128 x 2 x 2 bytes
        ("deepseek-v3", "16xh200", "tp=1,pp=16", 70_272 / 16),  # 70 KB a token (DeepSeek-AI 2025, table 1)
    ],
)
def test_the_cache_of_a_token_is_what_is_published(model: str, cluster: str, fix: str, of_token: float) -> None:
    way = only(model, cluster, 16, fix)
    assert way.cache_bytes == pytest.approx(16 * 4096 * of_token)


def test_weights_are_cut_over_all_devices_of_a_copy() -> None:
    ways = {(way.tp, way.pp): way for way in ways_of("llama3-8b", "8xh100", 8)}
    whole = ways[1, 1].weights_bytes
    assert whole == pytest.approx(2 * 8.03e9, rel=0.01)
    assert ways[4, 2].weights_bytes == pytest.approx(whole / 8)
    assert (ways[1, 1].copies, ways[4, 2].copies) == (8, 1)


def test_one_sequence_is_decoded_as_fast_as_weights_are_read() -> None:
    """8.03e9 parameters, less the embedding, of 2 bytes, at 0.85 of 3.35 TB/s; the cache adds 4096 tokens."""
    read = 2 * (8.03e9 - 128_256 * 4096) + 4096 * 128 * KIB
    assert only("llama3-8b", "1xh100", 1).decode_s.mid == pytest.approx(read / (0.85 * 3.35e12), rel=0.01)


def test_more_sequences_share_the_reading() -> None:
    one, many = only("llama3-8b", "1xh100", 1), only("llama3-8b", "1xh100", 32)
    assert many.tokens_per_s > 10 * one.tokens_per_s
    assert many.decode_s.mid > one.decode_s.mid
    assert many.prefill_s == one.prefill_s


def test_tensor_parallelism_makes_a_token_faster() -> None:
    ways = {(way.tp, way.pp): way for way in ways_of("llama3-8b", "8xh100", 8)}
    assert ways[8, 1].decode_s.mid < ways[2, 1].decode_s.mid < ways[1, 1].decode_s.mid
    assert ways[8, 1].prefill_s.mid < ways[2, 1].prefill_s.mid < ways[1, 1].prefill_s.mid


def test_few_sequences_read_few_experts() -> None:
    """One token goes to 8 of 256 experts, those of 32 sequences to most."""
    one, many = (only("deepseek-v3", "16xh200", n, "tp=8,pp=2") for n in (1, 64))
    assert many.decode_s.mid > 1.5 * one.decode_s.mid
