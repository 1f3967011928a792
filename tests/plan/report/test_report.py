"""A plan is found where there is one: what was assumed gives way, devices may stay idle, and remedies are named."""

from __future__ import annotations

import pytest

from argosy.errors import UserError
from argosy.plan.report.report import plan_report
from argosy.plan.report.request import Question, of_model


def test_an_assumed_batch_gives_way_before_nothing_fits():
    found = plan_report(of_model("llama3.1-405b", "512xh100", Question(tokens=1e12)))
    assert found.fitting > 0 and found.global_batch == 4096
    assert "Assumed: --global-batch 4096, as with more nothing fits." in found.assumed


def test_a_batch_that_was_asked_for_stays_and_what_was_assumed_is_named():
    asked = of_model("llama3.1-405b", "512xh100", Question(tokens=1e12, global_batch=8192))
    with pytest.raises(UserError, match=r"nothing fits(.|\n)*Assumed: --seq-len 8192\."):
        plan_report(asked)


@pytest.mark.parametrize(("objective", "fix"), [("time", "tp=8,cp=1"), ("cost", "tp=2,cp=2"), ("goodput", "tp=8,cp=1")])
def test_devices_that_do_not_divide_stay_idle(objective, fix):
    asked = of_model("llama3.1-70b", "600xh100", Question(tokens=2e12, objective=objective, fix=fix))
    found = plan_report(asked)
    assert found.choices[0].devices < 600
    assert float(found.choices[0].run.time_s.mid) < 45 * 86_400, "with all 600 it takes 67 days"
    assert any(f"The plan is for {found.choices[0].devices} of 600 devices" in note for note in found.notes)


def test_the_parts_of_a_step_come_to_the_whole_run():
    found = plan_report(of_model("llama3-8b", "8xh100", Question(tokens=1e9, global_batch=64, fix="dp_shard=8")))
    parts, run = found.explanation.waterfall, found.explanation.choice.run
    assert parts["evaluations"] > 0 and parts["failures"] > 0
    assert sum(parts.values()) * run.steps == pytest.approx(run.time_s.mid, rel=1e-6)


def test_a_cheapest_plan_s_step_is_not_said_to_depend_on_memory():
    """What faster plans on more devices would do is no effect of memory."""
    asked = Question(global_batch=256, objective="cost", fix="zero=1,recompute=none,tp=1,cp=1,microbatch=1")
    found = plan_report(of_model("llama3-8b", "64xh100", asked)).explanation
    assert found.choice.devices < 64 and found.binding == "matmul rate"
    assert all(-0.1 < change.change < 1e-9 for change in found.sensitivities)


def test_nothing_fits_says_what_would_do():
    with pytest.raises(UserError) as refused:
        plan_report(of_model("llama3-8b", "1xh100-96gb-hbm2e-500w", Question(seq_len=2048, global_batch=8)))
    said = str(refused.value)
    assert "With state in host memory: --fix offload=all|optimizer" in said
    assert 'With 8-bit optimizer state (optimizer.state = "int8" in the run file), e.g.' in said
    assert "On 2 such devices" in said
    assert "weights=bf16" not in said, "12 bytes a parameter are too much too"


@pytest.mark.parametrize("finetune", [None, 1e6])
def test_weights_in_16_bits_and_adapters_are_named_where_they_fit(finetune):
    with pytest.raises(UserError) as refused:
        asked = Question(seq_len=2048, global_batch=8, finetune=finetune)
        plan_report(of_model("mistral-7b", "1xh100-96gb-hbm2e-500w", asked))
    said = str(refused.value)
    assert 'With weights in 16 bits, which changes results: --fix weights=bf16, e.g. "' in said
    assert ('As an adapter: --lora 16 (lora.rank in a run file), e.g. "' in said) == (finetune is not None)
