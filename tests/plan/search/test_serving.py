"""Only ways to serve a model that fit are offered, and pins that make no sense are refused."""

from __future__ import annotations

import pytest
from argosy.plan.report.inference_report import search_serving

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.inference import Serving
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.search.space import parse_pins


def ways_of(model: str, cluster: str, sequences: int, fix: str = "") -> list[Serving]:
    run = load(None, {"model.preset": model, "data.seq_len": 4096, "train.global_batch": sequences})
    return search_serving(CostModel.of(run, Cluster.parse(cluster)), parse_pins(fix))


def test_room_is_for_as_many_as_fit() -> None:
    room = ways_of("llama3-8b", "1xh100", 1)[0].most_sequences
    assert ways_of("llama3-8b", "1xh100", room)[0].most_sequences == room
    with pytest.raises(UserError, match="nothing fits"):
        ways_of("llama3-8b", "1xh100", room + 1)


@pytest.mark.parametrize(
    ("fix", "message"), [("zero=1", "--fix zero says nothing about inference"), ("tp=3", "no way to cut 32 heads")]
)
def test_pins_that_make_no_sense_here_are_refused(fix: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ways_of("llama3-8b", "8xh100", 8, fix)
