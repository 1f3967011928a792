"""Inference: published cache sizes, the roofline's two sides, and what does not fit."""

from __future__ import annotations

import pytest

from argosy.errors import UserError
from argosy.plan.cost.inference import Served, Serving, serve, words
from argosy.plan.report.question import ask

KIB = 1024


def served(model: str, cluster: str, sequences: int, seq_len: int = 4096, fix: str = "") -> Served:
    return serve(ask(model=model, cluster=cluster, global_batch=sequences, seq_len=seq_len, fix=fix, top=100))


def only(model: str, cluster: str, sequences: int, fix: str = "tp=1,pp=1") -> Serving:
    (way,) = served(model, cluster, sequences, fix=fix).choices
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
    ways = {(way.tp, way.pp): way for way in served("llama3-8b", "8xh100", 8).choices}
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
    ways = {(way.tp, way.pp): way for way in served("llama3-8b", "8xh100", 8).choices}
    assert ways[8, 1].decode_s.mid < ways[2, 1].decode_s.mid < ways[1, 1].decode_s.mid
    assert ways[8, 1].prefill_s.mid < ways[2, 1].prefill_s.mid < ways[1, 1].prefill_s.mid


def test_few_sequences_read_few_experts() -> None:
    """One token goes to 8 of 256 experts, those of 32 sequences to most."""
    one, many = (only("deepseek-v3", "16xh200", n, "tp=8,pp=2") for n in (1, 64))
    assert many.decode_s.mid > 1.5 * one.decode_s.mid


def test_room_is_for_as_many_as_fit() -> None:
    room = only("llama3-8b", "1xh100", 1).most_sequences
    assert only("llama3-8b", "1xh100", room).most_sequences == room
    with pytest.raises(UserError, match="nothing fits"):
        only("llama3-8b", "1xh100", room + 1)


@pytest.mark.parametrize(
    ("fix", "message"), [("zero=1", "--fix zero says nothing about inference"), ("tp=3", "no way to cut 32 heads")]
)
def test_pins_that_make_no_sense_here_are_refused(fix: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        served("llama3-8b", "8xh100", 8, fix=fix)


def test_in_words_every_way_has_a_line() -> None:
    found = served("llama3-8b", "8xh100", 8)
    assert len(words(found).splitlines()) == 2 + len(found.choices)
