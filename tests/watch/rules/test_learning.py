"""What is said of losses, gradients, rates and experts: which steps count, and the remedy for what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.plan.plan import Plan
from argosy.watch.facts import RunFacts
from argosy.watch.rules.learning import (
    bad_steps,
    growing_gradients,
    learning_rate_ended,
    overfits,
    skewed_experts,
    spikes,
)
from argosy.watch.rules.planner import Advice, Planner, Rule
from watched import event, small_run


def of_steps(count: int, run: Any = None, events: Any = (), **columns: Any) -> RunFacts:
    """A run of so many steps, with these columns; it knows no plan and no machine."""
    steps = {name: np.broadcast_to(np.asarray(values, dtype=float), count).copy() for name, values in columns.items()}
    return RunFacts(now_s=0.0, run=run, steps={"step": np.arange(count, dtype=float)} | steps, events=events)


def advice(rule: Rule, facts: RunFacts) -> Advice:
    found = rule(facts, Planner(facts))
    assert found is not None
    return found


def wave(last: float, count: int = 65, spread: float = 0.1) -> RunFacts:
    """Losses of a median of 2 whose deviations from it are all `spread`, and a last one."""
    losses = 2 + spread * (-1.0) ** np.arange(count)
    losses[-1] = last
    return of_steps(count, loss=losses)


# Eight robust standard deviations, each 1.4826 times the median deviation, above the median of 64 losses: 3.186 here.
@pytest.mark.parametrize(("last", "is_spike"), [(3.18, False), (3.19, True), (float("nan"), False)])
def test_a_loss_spikes_eight_robust_deviations_above_the_median_before_it(last, is_spike):
    assert spikes(wave(last)) == ({64: (last, 2.0)} if is_spike else {})


@pytest.mark.parametrize(("last", "is_spike"), [(2.39, False), (2.41, True)])
def test_a_loss_that_hardly_varies_spikes_a_fifth_above_it(last, is_spike):
    assert bool(spikes(wave(last, spread=0.001))) is is_spike


def test_64_steps_before_it_are_needed_and_1000_are_looked_back():
    assert spikes(wave(9.0, count=64)) == {}
    losses = np.full(1200, 2.0)
    losses[[150, 199, 200]] = 9.0
    assert spikes(of_steps(1200, loss=losses)) == {200: (9.0, 2.0)}


def struck(count: int, **facts: Any) -> list[Any]:
    """Bad steps 90, 91, ...; what they say beside."""
    told = {"reason": "not_finite", "loss": "nan", "grad_norm": 3.0, "outcome": "skip"} | facts
    return [event("bad_step", 1.0 + n, step=90 + n, **told) for n in range(count)]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "step 90 was not finite: loss nan, gradient norm 3, skip"),
        ({"reason": "norm_outlier", "loss": 2.5, "largest_grad_norm": 1.25},
         "step 90 was a gradient norm far above the others: loss 2.5, gradient norm 3, 1.25 would have been good"),
        ({"reason": "loss_spike", "loss": 9.87654, "largest_loss": 4.0},
         "step 90 was a spike: loss 9.88, gradient norm 3, 4 would have been good, skip"),
        ({"reason": "mine"}, "step 90 was mine: loss nan"),
    ],
)  # fmt: skip
def test_a_bad_step_is_told_with_its_limit(facts, words):
    found = advice(bad_steps, of_steps(100, small_run(), struck(1, **facts)))
    assert (found.severity, found.title, found.steps) == ("warning", "Step 90 was bad", (90, 90))
    assert found.evidence.startswith(words) and found.evidence.endswith("(of the last 100 steps).")
    assert found.do.startswith("Nothing, if it stays at this")


def test_three_bad_steps_ask_for_a_lower_rate_and_for_clipping_where_there_is_none():
    run = small_run(optimizer={"lr": 3e-3, "grad_clip": 0.0}, schedule={"warmup_steps": 7})
    found = advice(bad_steps, of_steps(100, run, struck(4)))
    assert found.title == "Steps 90, 91, 92, 93 were bad"
    assert "step 90" not in found.evidence and "step 91" in found.evidence  # the last three
    assert found.do == (
        "Lower optimizer.lr (0.003) to 0.0015, or raise schedule.warmup_steps (7) in a new run. Set "
        "optimizer.grad_clip = 1: nothing is clipped now."
    )
    assert found.facts == {"steps": [90, 91, 92, 93], "bad": 4, "transient": 0, "applied": 0}
    assert advice(bad_steps, of_steps(100, None, struck(3))).do == "Lower the learning rate."


def test_a_step_that_was_good_again_may_be_a_flipped_bit():
    once = event("transient", 1.0, step=95, reason="norm_outlier", first_grad_norm=1e6, grad_norm=1.5)
    found = advice(bad_steps, of_steps(100, small_run(), [once], loss=2.0))
    assert found.severity == "info" and found.do.startswith("A value that is wrong once is a flipped bit")
    assert "step 95 was bad once (gradient norm 1e+06) and good when it was done again (1.5)" in found.evidence


@pytest.mark.parametrize(
    ("objective", "plan", "is_advised"),
    [
        ("pretrain", "dp_replicate=2", True),
        ("pretrain", "dp_shard=2", False),
        ("dpo", "dp_replicate=2", False),
    ],
)
def test_replay_checks_are_advised_where_the_run_can_have_them(objective, plan, is_advised):
    once = event("transient", 1.0, step=95, reason="norm_outlier", first_grad_norm=1e6, grad_norm=1.5)
    run = small_run(train={"objective": objective})
    facts = replace(of_steps(100, run, [once], loss=2.0), plan=Plan.parse(plan))
    assert ("resilience.replay_check_every_steps" in advice(bad_steps, facts).do) is is_advised


def test_ranks_whose_numbers_are_corrupt_are_to_be_checked():
    world = event("generation", 0.0, ranks={"node0/0": 0, "node1/0": 1})
    found = [event("gradient_corrupt", 0.5, ranks=[1]), event("corruption", 0.6, rank=0), event("corruption", 0.7)]
    told = advice(bad_steps, of_steps(100, small_run(), [world, *found, *struck(1)]))
    assert told.do == (
        "Numbers were found corrupt: have rank 0 on node0, rank 1 on node1 checked, and take what is at fault "
        "out of the run."
    )


def growing(norms: Any, losses: Any, **sections: Any) -> Advice | None:
    facts = of_steps(400, small_run(**sections), grad_norm=np.repeat(norms, 100), loss=np.repeat(losses, 100))
    return growing_gradients(facts, Planner(facts))


def test_gradients_that_grow_threefold_over_400_steps_ask_for_half_the_rate():
    found = growing([1, 2, 3, 3.1], [2, 2, 2, 2], optimizer={"lr": 1e-3}, schedule={"warmup_steps": 0})
    assert found is not None and found.steps == (0, 399) and found.facts == {"medians": [1, 2, 3, 3.1]}
    assert found.title == "The gradient's norm has grown 3.1-fold while the loss did not fall"
    assert found.evidence == "Medians over quarters of steps 0 to 399: 1, 2, 3, 3.1; the loss went from 2.000 to 2.000."
    assert "lower optimizer.lr to 0.0005" in found.do


@pytest.mark.parametrize(
    ("model", "is_advised"),
    [
        ({}, True),
        ({"qk_norm": True}, False),
        ({"heads": 4, "kv_heads": 4, "head_width": 4, "mla": {"kv_rank": 8, "rope_width": 4}}, False),
    ],
)
def test_norms_of_queries_and_keys_are_advised_to_models_that_can_have_them(model, is_advised):
    found = growing([1, 2, 3, 3.1], [2, 2, 2, 2], model=model, schedule={"warmup_steps": 0})
    assert found is not None and ("model.qk_norm" in found.do) is is_advised and found.do.endswith(".")


def test_a_warmup_that_is_a_share_of_the_run_is_lengthened_by_that_share():
    for share, key in ((0.0, "schedule.warmup_steps (20) "), (0.03, "schedule.warmup_fraction (0.03) ")):
        events = [event("bad_step", float(step), step=step, reason="not_finite", loss="nan") for step in (2, 3, 4)]
        run = small_run(schedule={"warmup_steps": 20, "warmup_fraction": share}, optimizer={"grad_clip": 0.0})
        assert f"raise {key}"[:-1] in advice(bad_steps, of_steps(5, run, events)).do


@pytest.mark.parametrize(
    ("norms", "losses", "warmup"),
    [
        ([1, 2, 3, 3], [2, 2, 2, 2], 0),  # no more than threefold
        ([1, 5, 3, 4], [2, 2, 2, 2], 0),  # up and down
        ([1, 2, 3, 4], [2, 2, 2, 1.9], 0),  # it learns
        ([1, 2, 3, 4], [2, 2, 2, 2], 10),  # the first steps are those of a warmup
    ],
)
def test_gradients_that_waver_or_learn_or_warm_up_are_not_said_to_grow(norms, losses, warmup):
    assert growing(norms, losses, schedule={"warmup_steps": warmup}) is None


def test_the_first_step_at_a_hundredth_of_the_peak_is_named():
    lr = np.concatenate([np.linspace(0.1, 1, 50), np.full(50, 0.01)])
    found = advice(learning_rate_ended, of_steps(100, small_run(train={"steps": 400}), lr=lr))
    assert found.evidence == "Since step 50 it is at most 1.0 % of its peak (0.01 of 1), and 300 steps are left."
    assert (found.gain, found.gain_share, found.steps) == ("300 steps, 75.0 % of the run", 0.75, (50, 99))
    elsewhere = of_steps(100, small_run(train={"steps": 1000}), lr=lr, step=500.0 + np.arange(100))
    assert advice(learning_rate_ended, elsewhere).gain_share == 0.4, "the first 500 were made elsewhere"


@pytest.mark.parametrize(
    ("lr", "steps"),
    [
        (np.concatenate([np.ones(80), np.full(20, 0.011)]), 400),
        (np.concatenate([np.ones(81), np.full(19, 0.01)]), 400),
        (np.concatenate([np.ones(50), np.linspace(0, 0.01, 50)]), 400),  # it rises again
        (np.concatenate([np.ones(50), np.full(50, 0.01)]), 119),
        (np.zeros(100), 400),
        (np.concatenate([np.ones(900), np.linspace(0.01, 0, 60)[:30]]), 965),  # the tail of a cosine
    ],
)
def test_a_rate_that_is_larger_shorter_rising_or_near_the_end_is_not_said_to_have_ended(lr, steps):
    facts = of_steps(len(lr), small_run(train={"steps": steps}), lr=lr)
    assert learning_rate_ended(facts, Planner(facts)) is None


EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn_width": 32}


@pytest.mark.parametrize(
    ("balance", "remedy"),
    [
        ({"balance": "none"}, 'model.moe.balance is "none": set it to "bias" or "aux", in a new run: one that goes on'),
        ({"balance": "aux", "aux_coefficient": 0.02}, "Raise model.moe.aux_coefficient (0.02), or use balance"),
        (
            {"balance": "bias", "bias_rate": 0.002},
            "Raise model.moe.bias_rate (0.002), so that it follows faster, in a new run",
        ),
    ],
)
def test_uneven_experts_get_the_remedy_of_their_balance(balance, remedy):
    layers = {"experts.0.imbalance": 3.9, "experts.1.imbalance": 4.0, "experts.10.imbalance": 6.5}
    run = small_run(model={"moe": EXPERTS | balance})
    found = advice(skewed_experts, of_steps(50, run, **layers, **{"experts.1.dropped": 0.04}))
    assert found.title == "Experts are used unevenly in 2 layers" and found.do.startswith(remedy)
    assert found.evidence.startswith("layer 10: the busiest expert gets 6.5 times the mean (mean of steps 3 to 49).")
    assert found.facts["imbalance"] == pytest.approx({0: 3.9, 1: 4.0, 10: 6.5})
    assert found.facts["dropped"] == pytest.approx({1: 0.04})


def test_tokens_that_a_capacity_drops_are_said_though_experts_are_even():
    run = small_run(model={"moe": EXPERTS})
    found = advice(skewed_experts, of_steps(50, run, **{"experts.1.imbalance": 1.5, "experts.1.dropped": 0.06}))
    assert found.title == "Experts are used unevenly in 1 layer"
    assert "layer 1: the busiest expert gets 1.5 times the mean; 6.0 % of the choices are dropped" in found.evidence


def held_out(*losses: float, train: Any = (3.0, 2.0), events: Sequence[Any] = ()) -> Advice | None:
    evaluations = {"step": np.linspace(20, 199, len(losses)), "validation_loss": np.array(losses)}
    facts = replace(of_steps(200, small_run(), events, loss=np.repeat(train, 100)), evaluations=evaluations)
    return overfits(facts, Planner(facts))


def test_held_out_loss_above_its_best_three_times_in_a_row_is_overfitting():
    found = held_out(3.0, 2.5, 2.6, 2.6, 2.7)
    assert found is not None and found.steps == (64, 199)
    assert found.evidence == (
        "It was 2.500 at step 64 and is 2.700 at step 199, while the training loss went from 3.000 to 2.000."
    )
    assert found.facts == {"best": 2.5, "now": 2.7}
    assert found.do.startswith("Stop at step 65 in a new run; ")


def test_of_overfitting_the_best_checkpoint_that_is_kept_is_named():
    saves = [event("save", float(step), step=step) for step in (40, 60, 100, 200)]
    found = held_out(3.0, 2.5, 2.6, 2.6, 2.7, events=[*saves, event("prune", 201.0, step=60)])
    assert found is not None
    assert found.do.startswith("Use the checkpoint of step 40, the nearest that is kept (checkpoint.keep_every keeps")


@pytest.mark.parametrize(
    ("losses", "train"),
    [
        ((2.5, 2.6, 2.6), (3, 2)),  # too few
        ((3.0, 2.5, 2.6, 2.51, 2.7), (3, 2)),  # back within a hundredth meanwhile
        ((3.0, 2.5, 2.6, 2.6, 2.7), (2, 3)),  # the training loss rises too
        ((float("nan"),) * 5, (3, 2)),
    ],
)
def test_other_held_out_losses_are_not(losses, train):
    assert held_out(*losses, train=train) is None
