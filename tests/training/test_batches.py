"""A rank's share of each step's samples: which they are, and what stands in for those that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.config.sync import SiteConfig
from argosy.data.loader import open_data
from argosy.observe.events import Events
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.sync.deal import SiteOrder
from argosy.sync.layout import Sites, at_site
from argosy.training.batches import Batches
from argosy.training.state import TrainState
from tiny import eager, run_config

Make = Callable[..., Batches]


@pytest.fixture
def batches(corpus: Path, tmp_path: Path) -> Iterator[Make]:
    """The batches of a run of one process, two rows a microbatch."""
    made: list[Batches] = []

    def make(plan: str = "microbatch=2", site: str = "", **sections: dict[str, Any]) -> Batches:
        run, alone, world = run_config(corpus, **sections), eager("microbatch=2"), World()
        state = TrainState.begin(apply(alone, run, world), alone, run)
        opened = open_data(run.data, run.seed, run.train.batches)
        if site:
            run = at_site(run.with_keys(site=site, sites=(SiteConfig(name="A"), SiteConfig(name="B"))))
            order = SiteOrder(opened.order, Sites.of(run, tmp_path).shares, site, lambda number: None)
            opened = replace(opened, order=order, batches=run.train.batches)
        made.append(Batches(run, eager(plan), opened, state, world, Events(tmp_path, "rank-0")))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tokens(one: Batches, step: int) -> torch.Tensor:
    return torch.cat([micro.tokens_BT for micro in one.read(step)])


def test_a_step_has_the_next_samples_of_the_run_in_microbatches(batches: Make) -> None:
    one = batches()
    assert [one.samples(step) for step in (0, 1, 5)] == [[(0, 8)], [(8, 16)], [(40, 48)]]
    assert [len(micro.tokens_BT) for micro in one.read(0)] == [2, 2, 2, 2]
    assert one.line(1) == {"first_sample": 8, "samples": 8}
    again = torch.cat([micro.tokens_BT for micro in one.of_rank(0, 1)])
    assert torch.equal(again, tokens(one, 1))
    assert one.cache_line() == {}  # there is no object store


def test_the_next_samples_stand_in_for_those_that_are_skipped(batches: Make) -> None:
    one, other = batches(), batches()
    one.skip(1)
    assert [one.samples(step) for step in (0, 1, 2)] == [[(0, 8)], [(16, 24)], [(24, 32)]]
    assert one.line(1) == {"first_sample": 16, "samples": 8, "samples_skipped": [[8, 16]]}
    assert torch.equal(tokens(one, 1), tokens(other, 2))
    one.skip(1)
    assert one.samples(1) == [(24, 32)]


def test_a_growing_batch_counts_its_samples_by_step(batches: Make) -> None:
    one = batches(train={"batch_ramp": [{"until_step": 2, "global_batch": 4}]})
    assert [one.samples(step) for step in range(4)] == [[(0, 4)], [(4, 8)], [(8, 16)], [(16, 24)]]
    assert [sum(len(micro.tokens_BT) for micro in one.read(step)) for step in (0, 2)] == [4, 8]


def test_ranks_drop_what_one_process_drops_of_a_smaller_batch_too(batches: Make) -> None:
    keys = {"lora": {"rank": 2, "dropout": 0.5}, "train": {"batch_ramp": [{"until_step": 2, "global_batch": 4}]}}
    one, two = batches(**keys), batches("dp_replicate=2,microbatch=2", **keys)
    for step in (1, 2):
        shares = [micro for rank in (0, 1) for micro in two.of_rank(rank, step)], one.of_rank(0, step)
        keys_of = ([keys for micro in some if (keys := micro.mask_keys_BT) is not None] for some in shares)
        assert torch.equal(*map(torch.cat, keys_of))


def test_sites_drop_what_one_process_drops(batches: Make) -> None:
    made = [batches(site=site, lora={"rank": 2, "dropout": 0.5}) for site in ("", "A", "B")]
    keys = [[m.mask_keys_BT for m in one.of_rank(0, 1) if m.mask_keys_BT is not None] for one in made]
    whole, *parts = map(torch.cat, keys)
    assert torch.equal(torch.cat(parts), whole)


def test_a_step_is_in_the_mixture_of_its_first_sample(batches: Make, corpus: Path) -> None:
    stages = [{"from_step": 2, "sources": {str(corpus): 1.0}}, {"from_step": 5, "sources": {str(corpus): 1.0}}]
    one = batches(data={"stages": stages})
    assert [one.stage(step) for step in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    one.skip(1)  # what comes in its place is of the next one
    assert [one.stage(step) for step in range(5)] == [0, 1, 1, 1, 2]
    alone = batches(site="A", data={"stages": stages})
    alone.skip(1)
    assert [alone.stage(step) for step in range(7)] == [0, 0, 1, 1, 1, 2, 2], "stand-ins are of the same mixture"
