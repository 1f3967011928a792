"""How many devices train a run in a given time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.config.section import seconds_of
from argosy.errors import UserError
from argosy.plan.cost.estimate import Estimate
from argosy.plan.report.report import PlanRequest
from argosy.plan.report.request import Question, of_model
from argosy.plan.report.within import WithinAnswer, best_by_size, fewest_within, in_words, of_each, recommended

DAY = 86_400.0
FEW = "tp=1|8,cp=1,schedule=1f1b,recompute=none|full,recompute_every=1"
"""Of all plans, a twentieth, with one for each number of devices."""


def request(cluster: str, global_batch: int = 512, fix: str = FEW, price: float | None = None) -> PlanRequest:
    asked = Question(tokens=4e11, global_batch=global_batch, fix=fix, price=price)
    return of_model("llama3-8b", cluster, asked)


def took_s(answer: WithinAnswer, devices: int) -> float:
    return next(float(size.run.time_s.mid) for size in answer.sizes if size.devices == devices)


@pytest.fixture(scope="module")
def of_64() -> WithinAnswer:
    """What is found for thirty days on at most 64 devices."""
    return fewest_within("64xh100", request("64xh100"), 30 * DAY)


def test_it_is_the_smallest_number_that_is_in_time(of_64):
    found = of_64
    assert found.fewest is not None and found.surely is not None
    assert took_s(found, found.fewest.devices) <= 30 * DAY
    assert all(float(size.run.time_s.mid) > 30 * DAY for size in found.sizes if size.devices < found.fewest.devices)
    assert found.surely.devices > found.fewest.devices
    assert float(found.surely.run.time_s.high) <= 30 * DAY
    assert {size.devices % 8 for size in found.sizes if size.devices > 8} == {0}  # whole nodes


def test_a_small_run_is_not_said_to_cost_nothing(of_64):
    run = replace(of_64.fewest.run, money=Estimate.exactly(0.43))
    assert ", 0.43 USD)" in in_words(replace(of_64, fewest=replace(of_64.fewest, run=run)))


def test_longer_takes_fewer_devices(of_64):
    longer = fewest_within("c", request("16xh100"), 90 * DAY).fewest
    assert longer is not None and of_64.fewest is not None
    assert longer.devices < of_64.fewest.devices


def test_a_device_alone_is_as_many_as_it_takes(of_64):
    found = fewest_within("h100", request("8xh100"), 30 * DAY, is_open=True)
    assert found.fewest is not None and of_64.fewest is not None
    assert found.fewest.devices == of_64.fewest.devices


def test_out_of_reach_it_says_how_fast_and_how_many_would_do():
    found = fewest_within("8xh100", request("8xh100"), 30 * DAY)
    assert (found.fewest, found.beyond) == (None, 16)
    assert "not within 30.0 days with 8 devices; the fastest is" in in_words(found)
    never = fewest_within("h100", request("1xh100", global_batch=16), 60.0, is_open=True)
    assert (never.fewest, never.beyond) == (None, None)
    assert "a larger global batch" in in_words(never)


def test_the_cheapest_is_recommended_and_one_without_a_plan_spoils_nothing():
    dear = ("dear", request("32xh100", price=9.0), False)
    cheap, small = ("cheap", request("32xh100", price=1.0), False), ("small", request("1xt4", fix=""), False)
    found = of_each([dear, cheap, small], 30 * DAY)
    best = recommended(found)
    assert best is not None and best.named == "cheap"
    assert "nothing fits" in found[2].problem
    with pytest.raises(UserError, match="nothing fits"):
        of_each([small], 30 * DAY)


def test_every_size_has_its_shortest_run():
    *_, sizes = best_by_size(request("32xh100"))
    assert [size.devices for size in sizes] == sorted({size.devices for size in sizes})


def test_more_devices_are_named_only_where_they_pay_and_round_numbers_are_looked_at():
    asked = of_model("llama3.1-70b", "8xh100", Question(tokens=5e11, fix=FEW))
    found = fewest_within("h100", asked, 30 * DAY, is_open=True)
    times = [float(size.run.time_s.mid) for size in found.sizes]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
    assert {576, 704, 768} <= {size.devices for size in found.sizes}


@pytest.mark.parametrize(("word", "seconds"), [("30d", 30 * DAY), ("1.5h", 5400), ("2W", 14 * DAY), ("90 m", 5400)])
def test_times_as_people_type_them(word, seconds):
    assert seconds_of(word) == seconds


@pytest.mark.parametrize("word", ["30", "d", "0d", "-3d", "a month", ""])
def test_what_is_no_time_is_refused(word):
    with pytest.raises(ValueError, match="no length of time"):
        seconds_of(word)
