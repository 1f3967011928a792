"""What stops a job: rates by component, their correction by what was seen, spares, lemons."""

from math import exp, factorial

import numpy as np
import pytest

from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.reliability import (
    COMPONENTS,
    FailureRates,
    burn_in,
    catalogue,
    components_of,
    device_hours_per_stop,
    node_rate_factor,
    node_stops_per_h,
    spare_nodes,
)
from argosy.plan.hardware.clusters import Cluster

FLEET = Cluster.parse("h100-16384")
LLAMA_HOURS = 16_384 * 54 * 24.0


def test_the_catalogue_names_every_component_and_its_sources():
    found = catalogue()
    assert list(found.shares) == list(COMPONENTS) and sum(found.shares.values()) == pytest.approx(1, abs=1e-3)
    assert any("2407.21783" in source for source in found.sources)
    assert 0.3 < found.std < 1.5, "published fleets of one kind differ by more than a factor of ten"


def test_llama_3_s_stops_lie_in_the_interval():
    low, mid, high = FailureRates.of(FLEET).expected_in_all(LLAMA_HOURS)
    assert low < 419 < high and mid == pytest.approx(419, rel=0.15)


def test_a_job_has_the_failures_of_what_it_is_made_of():
    assert set(components_of(Cluster.parse("8xh100"))).isdisjoint({"nic", "network"})
    assert "nvlink" not in components_of(Cluster.parse("16xl40s")) and "nic" in components_of(Cluster.parse("16xl40s"))
    assert set(components_of(Cluster.parse("laptop"))).isdisjoint({"gpu", "hbm", "nvlink"})
    alone, many = (device_hours_per_stop(FLEET, devices).mid for devices in (8, 64))
    assert alone > many, "a single node has no network to fail"
    by_column = device_hours_per_stop(FLEET, np.array([8, 64]))
    assert list(by_column.mid) == [alone, many]


def test_a_kind_of_device_that_nobody_told_of_is_less_certain_and_one_s_own_figure_more():
    known, strange = (device_hours_per_stop(Cluster.parse(f"64x{name}")) for name in ("h100", "mi300x"))
    assert strange.high / strange.mid > known.high / known.mid
    group = FLEET.groups[0]
    own = FLEET.model_copy(
        update={"groups": (group.model_copy(update={"device": group.device.model_copy(update={"mtbf_h": 1e5})}),)}
    )
    assert device_hours_per_stop(own).mid == pytest.approx(1e5)
    assert device_hours_per_stop(own).high < 2e5


def test_shares_of_what_a_job_has_add_up_and_so_do_expected_stops():
    rates = FailureRates.of(Cluster.parse("1024xh100"))
    found = rates.expected(1e6)
    assert sum(each.expected for each in found) == pytest.approx(rates.expected_in_all(1e6)[1])
    assert [each.expected for each in found] == sorted((each.expected for each in found), reverse=True)
    assert all(each.low <= each.expected * 10 and each.low <= each.high for each in found)


def test_many_stops_of_its_own_decide_a_job_s_rate():
    prior = FailureRates.of(FLEET)
    seen = {"gpu": 60, "hbm": 20, "software": 20}
    after = prior.after(seen, 0, 4e5)
    assert after.rate.mid == pytest.approx(100 / 4e5, rel=0.1)
    assert after.rate.high / after.rate.low < 1.5
    assert after.share("gpu") == pytest.approx(0.6, abs=0.03) and prior.share("gpu") < 0.4


def test_the_posterior_is_that_of_conjugate_numbers_where_the_prior_is_wide():
    """With k stops in T hours and a nearly flat prior of the logarithm, the rate is Gamma(k, T)."""
    wide = FailureRates(Estimate.log_normal(1e-3, 4.0), {"software": 1.0}, 5.0, {}).after({"software": 30}, 0, 3e4)
    drawn = np.random.default_rng(1).gamma(30, 1 / 3e4, 200_000)
    for value, level in zip((wide.rate.low, wide.rate.mid, wide.rate.high), (0.05, 0.5, 0.95), strict=True):
        assert value == pytest.approx(np.quantile(drawn, level), rel=0.02)


def test_one_surprise_says_little_and_two_are_believed():
    """On a laptop, whose catalogued rate is a stop in years, stops come of other causes."""
    prior = FailureRates.of(Cluster.parse("laptop"), 2)
    usual, one, two = (prior.after({"software": n}, 0, 2.0).mtbf_s(2).mid / 3600 for n in (0, 1, 2))
    assert usual > 5000 and one < usual and two < 10
    assert prior.after({"software": 2}, 0, 2.0).is_measured and not prior.after({}, 0, 2.0).is_measured


def test_no_stop_in_a_long_time_makes_a_job_better_than_the_catalogue():
    after = FailureRates.of(FLEET).after({}, 0, 1e6)
    assert after.rate.mid < FailureRates.of(FLEET).rate.mid / 5


def test_stops_of_unknown_causes_count_in_all_and_in_no_component():
    prior = FailureRates.of(Cluster.parse("8xh100"))
    strange = prior.after({"network": 3}, 2, 1e5)
    assert (strange.stops, strange.seen, strange.unexplained) == (5, {}, 5), "one node has no network"
    assert strange.share("gpu") == pytest.approx(prior.share("gpu"))


def test_draws_follow_the_interval():
    random, rates = np.random.default_rng(0), FailureRates.of(FLEET)
    for each in (rates, rates.after({"gpu": 7}, 1, 3e5)):
        low, high = np.quantile(each.drawn_rates(random, 20_000), (0.05, 0.95))
        assert (low, high) == pytest.approx((each.rate.low, each.rate.high), rel=0.05)


@pytest.mark.parametrize("repair_h", [1.0, 24.0, 24.0 * 14])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_spares_suffice_and_one_less_does_not(repair_h, confidence):
    mean = 0.3 * repair_h
    spares = spare_nodes(0.3, repair_h, confidence)

    def at_most(k):
        return sum(exp(-mean) * mean**i / factorial(i) for i in range(k + 1))

    assert at_most(spares) >= confidence
    assert at_most(spares - 1) < confidence


def test_spares_of_a_very_large_cluster_and_of_none_needed():
    of_nodes = node_stops_per_h(Cluster.parse("1000000xa100"))
    mean = of_nodes.mid * 24 * 30
    assert mean < spare_nodes(of_nodes.mid, 24 * 30) < mean + 2 * np.sqrt(mean)
    assert spare_nodes(1.0, 0.0) == spare_nodes(0.0, 24.0) == 0
    with pytest.raises(ValueError, match="confidence"):
        spare_nodes(1.0, 1.0, 1.0)


def test_stops_that_nobody_explains_take_no_node_out():
    rates = FailureRates.of(FLEET)
    seen, lost = rates.after({"gpu": 10}, 0, 1e5), rates.after({}, 10, 1e5)
    assert lost.rate.mid == pytest.approx(seen.rate.mid)
    assert node_stops_per_h(FLEET, lost).mid < 0.5 * node_stops_per_h(FLEET, seen).mid


def test_a_burn_in_leaves_out_the_lemons_as_drawn_nodes_do():
    hours, shape = 1000.0, catalogue().node_shape
    found = burn_in(FLEET, hours)
    mean = node_stops_per_h(FLEET).mid / FLEET.nodes
    nodes = np.random.default_rng(0).gamma(shape, mean / shape, 400_000)
    failed = np.random.default_rng(1).poisson(nodes * hours) > 0
    assert found.left_out == pytest.approx(failed.mean(), rel=0.03)
    of_hardware = mean * FLEET.nodes / (FailureRates.of(FLEET).rate.mid * FLEET.devices)
    assert found.saved == pytest.approx(of_hardware * (1 - nodes[~failed].mean() / nodes.mean()), rel=0.03)
    assert found.saved > 3 * found.left_out, "a few lemons cause most stops"


def test_a_node_that_stopped_twice_is_far_worse_than_the_mean_one():
    assert node_rate_factor(0, 0.01) < 1
    assert node_rate_factor(2, 0.01) > 10
