"""What `argosy plan --inference` says names each way to serve the model."""

from __future__ import annotations

from argosy.plan.report.inference_report import in_words, inference_report

from argosy.plan.report.request import Question, of_model


def test_in_words_every_way_has_a_line() -> None:
    report = inference_report(of_model("llama3-8b", "8xh100", Question(global_batch=8, seq_len=4096, top=100)))
    assert len(in_words(report).splitlines()) == 2 + len(report.choices)
