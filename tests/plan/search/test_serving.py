"""Only ways to serve that fit are offered, fronts have no way that another beats, and refusals say what is nearest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster, Factor
from argosy.plan.search.serving import Serving, ServingQuestion, ServingSearch, pareto
from argosy.plan.search.space import parse_pins


def search_for(
    model: str, cluster: str | Cluster, fix: str = "", serving: dict[str, Factor] | None = None, **asked: Any
) -> ServingSearch:
    run = load(None, {"model.preset": model, "data.seq_len": 4096, "train.global_batch": 8})
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    return ServingSearch(CostModel.of(run, machines), machines, ServingQuestion(**asked), parse_pins(fix))


def test_room_is_for_as_many_as_fit() -> None:
    room = search_for("llama3-8b", "1xh100", sequences=1).found()[0].most_sequences
    full = search_for("llama3-8b", "1xh100", sequences=room).found()[0]
    assert (full.sequences, full.most_sequences) == (room, room)
    assert full.memory_bytes < 0.9 * 80 * 2**30
    with pytest.raises(UserError, match=f"has room for {room} requests, and {room + 1} are asked for"):
        search_for("llama3-8b", "1xh100", sequences=room + 1).found()


def test_requests_are_answered_once_however_many_replicas_there_are() -> None:
    alone, spread, whole = (
        next(way for way in search_for("llama3-8b", cluster, fix="tp=1", sequences=many).found() if way.pp == 1)
        for cluster, many in (("1xh100", 1), ("8xh100", 1), ("8xh100", 8))
    )
    assert spread.tokens_per_s.mid == pytest.approx(alone.tokens_per_s.mid)
    assert spread.tokens_per_s_device == pytest.approx(alone.tokens_per_s_device / 8), "seven replicas wait"
    assert whole.tokens_per_s.mid == pytest.approx(8 * alone.tokens_per_s.mid)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"fix": "zero=1"}, "--fix zero says nothing about serving"),
        ({"fix": "tp=3"}, "no way to cut 32 heads"),
        ({"engine": "Windows"}, "--engine Windows: not known"),
        ({"weights": ("fp3",)}, "--weights fp3: not known. Try fp32, bf16"),
        ({"caches": ("4",)}, "--kv-cache 4: not known. Try 16, fp8"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        search_for("llama3-8b", "8xh100", **asked)


def test_no_way_of_the_front_beats_another() -> None:
    found = search_for("llama3-70b", "8xh100", weights=("bf16", "fp8")).found()
    front = pareto(found)
    speeds = [float(way.tpot_s.mid) for way in front]
    rates = [way.tokens_per_s_device for way in front]
    assert speeds == sorted(speeds)
    assert rates == sorted(rates)
    assert max(rates) == max(way.tokens_per_s_device for way in found)
    for way in found:
        assert any(
            float(best.tpot_s.mid) <= float(way.tpot_s.mid) and best.tokens_per_s_device >= way.tokens_per_s_device
            for best in front
        )


def test_each_way_uses_no_more_devices_and_memory_than_there_are() -> None:
    for way in search_for("llama3-70b", "16xh100").found():
        assert way.devices <= 16
        assert way.memory_bytes <= 0.9 * 80 * 2**30
        assert math.isclose(sum(way.parts.values()), float(way.tpot_s.mid), rel_tol=1e-6)


def test_prefill_apart_shortens_the_time_per_token() -> None:
    found = search_for("llama3-70b", "64xh100", prompt=8192, fix="tp=8,pp=1").found()

    def at(sequences: int, apart: bool) -> Serving:
        return next(w for w in found if w.sequences == sequences and bool(w.prefill_devices) == apart)

    assert float(at(64, True).tpot_s.mid) < 0.6 * float(at(64, False).tpot_s.mid)


def test_devices_grow_with_the_rate_and_with_the_limits() -> None:
    fewest = [
        search_for("llama3-70b", "64xh100", "pp=1", rate=rate, ttft_s=2.0, tpot_s=tpot).sized()[0].devices
        for rate, tpot in ((2, 0.05), (20, 0.05), (20, 0.025))
    ]
    assert fewest == sorted(fewest)
    assert fewest[0] < fewest[1] < fewest[2]


def test_what_holds_a_rate_keeps_both_latencies_and_says_what_a_token_costs() -> None:
    found = search_for("llama3-70b", "64xh100", "pp=1", rate=20, ttft_s=1.0, tpot_s=0.05).sized()
    assert {bool(way.prefill_devices) for way in found} == {True, False}
    for way in found:
        assert 0 < way.ttft_p95_s <= 1.0 and 0 < way.tpot_p95_s <= 0.05
        assert way.money_per_million is not None and way.kwh_per_million is not None
        hours = 1e6 / (20 * 512) / 3600 * way.devices
        assert way.money_per_million == pytest.approx(2.95 * hours, rel=0.01)
        assert 0.3 < way.kwh_per_million / hours < 2.0, "kW of a device, with its share of the node and the building"


def test_a_target_that_nothing_reaches_says_what_is_nearest_and_why() -> None:
    with pytest.raises(
        UserError, match=r"Nearest is tp = 8, pp = 1, bf16 weights: .* Further tokens take most time for weights"
    ):
        search_for("llama3-70b", "8xh100", rate=1, tpot_s=0.003).sized()
    with pytest.raises(UserError, match=r"The first token takes most time for"):
        search_for("llama3-70b", "8xh100", rate=1, ttft_s=0.01).sized()


def test_factors_of_ones_own_hold_for_their_engine_only() -> None:
    plain = Cluster.parse("1xh100")
    learnt = plain.model_copy(
        update={"serving": {"compute": Factor(value=2.0, std=0.1)}, "serving_engine": "vLLM 0.10"}
    )

    wrong = learnt.model_copy(update={"serving": {"speed": Factor(value=2.0, std=0.1)}})
    with pytest.raises(UserError, match=r"serving\.speed is no constant"):
        search_for("llama3-8b", wrong)

    def tpot(cluster: Cluster, engine: str) -> float:
        found = search_for("llama3-8b", cluster, engine=engine, sequences=64).found()[0]
        return float(found.tpot_s.mid)

    assert tpot(learnt, "vLLM 0.10") > 1.5 * tpot(plain, "vLLM 0.10")
    assert tpot(learnt, "") == tpot(learnt, "vLLM 0.10")
    assert tpot(learnt, "SGLang") == tpot(plain, "SGLang")
