"""What `argosy plan --serve` says: the front, what a token's time is spent on, and devices for a rate."""

from __future__ import annotations

from typing import Any

from argosy.plan.report.request import Question, of_model
from argosy.plan.report.serving_report import ServingReport, in_words, serving_report
from argosy.plan.search.serving import ServingQuestion


def report_of(cluster: str = "8xh100", top: int = 100, **asked: Any) -> ServingReport:
    request = of_model("llama3-8b", cluster, Question(seq_len=2560, top=top, serving=True))
    return serving_report(request, ServingQuestion(**asked))


def test_every_way_of_the_front_has_a_line() -> None:
    report = report_of()
    lines = in_words(report).splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["tp", "pp"])
    end = next(i for i, line in enumerate(lines) if line.startswith("prefill: devices"))
    assert end - head - 1 == len(report.choices)
    assert any("reading weights and multiplying" in line for line in lines)


def test_fewer_lines_keep_both_ends_of_the_front() -> None:
    whole, some = report_of(), report_of(top=3)
    assert len(some.choices) == 3
    assert (some.choices[0], some.choices[-1]) == (whole.choices[0], whole.choices[-1])


def test_a_batch_is_not_assumed() -> None:
    assert not [line for line in report_of().assumed if "--global-batch" in line]


def test_a_cluster_that_is_too_small_for_a_rate_is_said_to_be() -> None:
    assert "it is too small by" in in_words(report_of("1xh100", rate=200.0, tpot_s=0.03))
    assert "too small" not in in_words(report_of("8xh100", rate=5.0, tpot_s=0.03))


def test_columns_stay_apart_however_many_devices_a_rate_takes() -> None:
    report = report_of(rate=1e10, tpot_s=0.03, ttft_s=1.0)
    lines = in_words(report).splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["devices", "tp"])
    for way, line in zip(report.sized, lines[head + 1 :], strict=False):
        cells = (way.devices, way.tp, way.pp, way.weights, way.cache, way.replicas, way.prefill_devices or "-")
        assert line.split()[:7] == [str(cell) for cell in cells]
