"""Where a speed-up comes from: the factors multiply to it, whatever their order."""

from __future__ import annotations

import math

from pytest import approx
from tests.plan.design.conftest import SERVE, TRAIN, Load

from argosy.plan.design.speedup import shares, speedups


def test_factors_that_do_not_meet_keep_what_is_theirs() -> None:
    gains = {"a": 2.0, "b": 3.0, "c": 1.0}
    assert shares(list(gains), lambda later: math.prod(gains[name] for name in later)) == approx(gains)


def test_what_two_bring_together_is_shared_evenly() -> None:
    def both(later: frozenset[str]) -> float:
        return 4.0 if later == {"a", "b"} else 1.0

    assert shares(["a", "b"], both) == approx({"a": 2.0, "b": 2.0})


def test_the_factors_of_a_speed_up_multiply_to_it(load: Load) -> None:
    small = TRAIN.replace("= 64", "= 2").replace("llama3-8b", "llama3.2-1b")  # few plans for each mixture
    formats = small + 'precision = ["bf16", "fp8"]\n' + SERVE
    space = load(formats + '[speedup]\nbefore = "a100"\nafter = "h100"\nafter_batch = 512\n')
    training, serving = speedups(space)
    for one in (training, serving):
        assert math.prod(one.factors.values()) == approx(one.whole, rel=1e-9) and one.whole > 1.5
    assert training.formats == ("bf16", "fp8") and {"format", "matmul rate", "memory", "batch"} <= set(training.factors)
    assert serving.formats == ("bf16", "bf16") and "format" not in serving.factors
    assert serving.factors["memory"] > 1.1


def test_a_replica_may_be_as_large_as_the_domain_of_the_fast_link(load: Load) -> None:
    (one,) = speedups(load(SERVE.replace("[1, 2]", "[16]") + '[speedup]\nbefore = "gb200"\nafter = "gb300"\n'))
    assert one.whole > 1


def test_a_replica_is_cut_only_as_the_model_can_be(load: Load) -> None:
    work = SERVE.replace("llama3-8b", "llama3-70b").replace("[1, 2]", "[3, 4]").replace("[1, 16]", "[1]")
    pair = '[speedup]\nbefore = "a100"\nafter = "h100"\n'
    (some,), (only,) = (speedups(load(each + pair)) for each in (work, work.replace("[3, 4]", "[4]")))
    assert some.speeds == only.speeds
