"""Trials run beside each other only if cores, memory and GPUs are enough for all of them."""

from __future__ import annotations

from argosy.config.load import load
from argosy.sweep.needs import Limits, Needs, Room, needs_of

SMALL = {"launch.device": "cpu", "plan": "dp_replicate=2,microbatch=1"}


def test_a_trial_that_does_not_fit_beside_others_runs_alone() -> None:
    room = Room(Limits(trials=0, cores=8, memory_bytes=10e9))
    assert room.fits(Needs(1, memory_bytes=20e9))
    room.take(0, Needs(1, memory_bytes=6e9))
    assert room.fits(Needs(1, memory_bytes=4e9)) and not room.fits(Needs(1, memory_bytes=5e9))
    room.take(1, Needs(7))
    assert room.is_full and not room.fits(Needs(1))
    room.give_back(0)
    assert room.fits(Needs(1, memory_bytes=5e9))


def test_trials_are_counted_and_have_gpus_of_their_own() -> None:
    room = Room(Limits(trials=2, cores=8, memory_bytes=1e9, gpus=("0", "1", "2")))
    assert not room.fits(Needs(1, gpus=4))
    assert room.take(0, Needs(1, gpus=2)) == ("0", "1")
    assert not room.fits(Needs(1, gpus=2)) and room.fits(Needs(1, gpus=1))
    assert room.take(1, Needs(1, gpus=1)) == ("2",)
    assert room.is_full
    room.give_back(0)
    room.take(5, Needs(1, gpus=1), gpus=("1",))  # as a sweep that was killed had dealt them
    assert room.take(6, Needs(1, gpus=1)) == ("0",)


def test_memory_is_that_of_the_planner_for_all_processes() -> None:
    limits = Limits(trials=2, cores=8, memory_bytes=1e9)
    small = needs_of(load("demo", SMALL), limits)
    large = needs_of(load("demo", {**SMALL, "model.preset": "llama-160m"}), limits)
    assert small.cores == 2 * 2 and small.gpus == 0
    assert (
        large.memory_bytes - small.memory_bytes > 2 * 16 * 100e6
    )  # two replicas of 100M parameters more, 16 bytes each
    assert needs_of(load("demo", {**SMALL, "launch.threads": 3}), limits).cores == 6
    assert needs_of(load("demo", SMALL | {"launch.device": "auto"}), Limits(0, 8, 1e9, ("0", "1"))) == Needs(2, gpus=2)
