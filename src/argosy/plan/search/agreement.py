"""`sync=auto`: how replicas, or sites, agree, from what the links between them are predicted to cost.

Replicas: of the ways in `ORDER`, from the one that loses least to the one that loses most, the first whose predicted
step is within `WORSE_BY` of the fastest of them. Only ways are compared whose quality was measured and is within 2 % of
exact sums (benchmarks/results/thin_link_quality.md). PowerSGD was so with exact sums in the first tenth of the run: it
counts if `sync.exact_steps` says that.

Sites, with the keys of `[sync]` that the run leaves open: of `ROUNDS_TRIED`, from the one that loses least, the first
by which they are predicted to wait for at most `MOST_WAITING_SHARE` of their time; with each number of steps first the
widest number format. Every 50 steps DiLoCo was within 2 % of exact sums, with an outer momentum that fits the length of
the run (the same results). Before steps are more than that, fragments take turns and travel while training goes on
(streaming DiLoCo; mixing and 4 bits as in Douillard et al. 2025). The sites of a run choose alike, as nothing is asked
but what their run file and the cluster's file say."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from argosy.config.schema import RunConfig
from argosy.config.sync import SyncConfig, Wire, batches_of, check_fragments
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import seconds
from argosy.plan.cost.sites import RoundCosts, rounds_of
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan, said_in
from argosy.plan.search.search import best_to_run, plainest, search_to_run
from argosy.plan.search.space import Pins, pins_of
from argosy.plan.sync import USUAL_OF_SITES, Sync

ORDER: tuple[Sync, ...] = ("exact", "int8", "int4", "powersgd")
WORSE_BY = 0.1
EXACT_SHARE = 0.1
"""Share of a run's steps that have to be exact before PowerSGD is a choice."""


@dataclass(frozen=True)
class SyncChoice:
    """The chosen word of `sync`, and what the other ways would have taken."""

    word: Sync
    step_s: Mapping[Sync, float]
    """Predicted seconds of a step with each way that was compared, in their order."""

    def in_words(self) -> str:
        if len(self.step_s) < 2:
            return f"sync=auto takes {self.word}: there are no replicas that could agree in another way."
        each = ", ".join(f"{word} {seconds(step_s)}" for word, step_s in self.step_s.items())
        return (
            f"sync=auto takes {self.word}: predicted steps are {each}; of those within {100 * WORSE_BY:.0f} % of the "
            "fastest it loses least."
        )


def choose_word(costs: CostModel, pins: Pins) -> SyncChoice:
    """Return how replicas of the run should agree under the best plan that keeps to `pins`."""
    if costs.run.sites:
        return SyncChoice(USUAL_OF_SITES, {})
    found: dict[Sync, float] = {}
    for word in _allowed(costs.run):
        best = best_to_run(costs, {**pins, "sync": (word,)})
        if best is not None:  # there is none without replicas
            found[word] = best[1]
    if not found:
        return SyncChoice("exact", {})
    enough = (1 + WORSE_BY) * min(found.values())
    return SyncChoice(next(word for word, step_s in found.items() if step_s <= enough), found)


def _allowed(run: RunConfig) -> list[Sync]:
    if run.resilience.check_collectives:  # checksums fit exact sums only
        return ["exact"]
    is_warmed_up = bool(run.train.steps) and run.sync.exact_steps >= EXACT_SHARE * run.train.steps
    return [word for word in ORDER if word != "powersgd" or is_warmed_up]


ROUNDS_TRIED = ((10, 1), (20, 1), (50, 1), (48, 2), (48, 4), (100, 1), (200, 1), (500, 1))
"""Steps between two rounds of the same weights, and fragments."""
MIXING = 0.5
"""Share of a site's own weights that it keeps where fragments travel while it trains."""
MOST_WAITING_SHARE = 0.1
CHOSEN_KEYS = ("every_steps", "fragments", "wire", "overlap_steps", "mixing")
"""Keys of `[sync]` that are chosen where the run file does not set them."""


@dataclass(frozen=True)
class ChosenRounds:
    """The chosen rounds of sites, and their predicted cost."""

    sync: SyncConfig
    rounds: RoundCosts
    inner_step_s: float
    """Seconds of a step within a site."""

    @property
    def waiting(self) -> float:
        """Share of its time that rounds take of a site, the last one counted, once it trains alone."""
        takes_s = float(self.rounds.alone_s)
        return takes_s / (takes_s + self.inner_step_s)

    def keys(self) -> dict[str, Any]:
        """Return the keys of `[sync]` that say so, without those that have their usual value."""
        usual = SyncConfig()
        said = {key: getattr(self.sync, key) for key in CHOSEN_KEYS}
        return {key: value for key, value in said.items() if key == "every_steps" or value != getattr(usual, key)}

    def in_words(self) -> str:
        keys = ", ".join(f"{key} = {value!r}" for key, value in self.keys().items()).replace("'", '"')
        enough = self.waiting <= MOST_WAITING_SHARE
        why = (
            f"the most exact way that waits for {100 * MOST_WAITING_SHARE:.0f} % or less"
            if enough
            else "none waits less"
        )
        rounds = self.rounds
        waits_s = float(rounds.waits_s) + rounds.slows_s
        is_longer_at_last = rounds.rounds > 0 and rounds.last_s > 1.01 * waits_s
        at_last = f" and {seconds(rounds.last_s)} at the end" if is_longer_at_last else ""
        return (
            f"sync=auto takes diloco with {keys}: sites are predicted to wait {seconds(waits_s)} every "
            f"{rounds.steps} steps of {seconds(self.inner_step_s)}{at_last}, {100 * self.waiting:.1f} % of their time: "
            f"{why}."
        )


def choose_rounds(run: RunConfig, cluster: Cluster, given: Collection[str]) -> ChosenRounds:
    """Return how the sites of `run` should agree on a cluster whose links were measured.

    given: keys of `[sync]` that stay as they are. Raises: UserError if the cluster has no links between such sites, or
    no plan trains the run.
    """
    check_sites_of(run, cluster)
    costs, inner_step_s = inner_step(run, cluster)
    choices = []
    for sync in _settings(costs, cluster, inner_step_s, set(given)):
        of_these = costs.on(run.model_copy(update={"sync": sync}), costs.devices)
        chosen = ChosenRounds(sync, rounds_of(of_these, cluster, inner_step_s), inner_step_s)
        if chosen.waiting <= MOST_WAITING_SHARE:
            return chosen
        choices.append(chosen)
    return min(choices, key=lambda chosen: chosen.waiting)


def inner_step(run: RunConfig, cluster: Cluster) -> tuple[CostModel, float]:
    """Return the cost model of the slowest site, and the seconds of its step under the plan that it would take.

    Raises: UserError if no plan trains the run at a site, or they cannot share its batch.
    """
    try:
        batches = batches_of(run.sites, run.train.global_batch)
    except ValueError as problem:
        raise UserError(str(problem)) from None
    each = []
    for site, batch in zip(run.sites, batches, strict=True):
        # `measured` is what one machine's probe found: the files of the sites differ in it.
        place = cluster.of_site(site.name).model_copy(update={"measured": cluster.measured_at.get(site.name)})
        part = run.with_keys(train={"global_batch": batch}, plan=site.plan or run.plan)
        each.append(_step_at(part, place))
    return max(each, key=lambda of_site: of_site[1])


def _step_at(run: RunConfig, place: Cluster) -> tuple[CostModel, float]:
    """Return the cost model of a site whose part of the run this is, and the seconds of its step."""
    costs = CostModel.of(run, place)
    words, is_auto, _ = said_in(run.plan)
    written = Plan.from_words(words)
    pins: Pins = {**pins_of(written, words, is_auto), "sync": (USUAL_OF_SITES,)}
    if not is_auto:
        costs = costs.on(costs.run, written.world_size)
    found = search_to_run(costs, pins)
    if not len(found):
        raise UserError(f'plan = "{run.plan}": no plan fits a site of {place.name}. `argosy plan` says more.')
    return costs, float(found.step_s[plainest(found)])


def check_sites_of(run: RunConfig, cluster: Cluster | None) -> None:
    """Refuse a description of the machine that does not know the run's sites. Raises: UserError."""
    names = [site.name for site in run.sites]
    if cluster is not None and cluster.links and set(names) <= cluster.sites.keys():
        return
    has = "nobody has described it" if cluster is None else f"{cluster.name or 'the cluster'} has the sites "
    has += "" if cluster is None else ", ".join(cluster.sites)
    raise UserError(
        f'plan = "{run.plan}": sync=auto needs to know how thin the link between {" and ".join(names)} is, and {has}. '
        "Measure it with `argosy probe --run RUN.toml --site NAME` at each of them, name a cluster's file with these "
        "sites and their [[links]] as launch.cluster, or say sync=diloco."
    )


def _settings(costs: CostModel, cluster: Cluster, inner_step_s: float, given: set[str]) -> Iterator[SyncConfig]:
    """Yield what may be chosen, in the order of the rule."""
    run, seen = costs.run, []
    for (every, fragments), wire in product(ROUNDS_TRIED, get_args(Wire)):
        usual = {"every_steps": every, "fragments": fragments, "wire": wire, "overlap_steps": 0, "mixing": 0.0}
        sync = run.sync.model_copy(update={key: value for key, value in usual.items() if key not in given})
        if sync.fragments > 1 and "overlap_steps" not in given:
            travels_s = rounds_of(costs.on(run.model_copy(update={"sync": sync}), costs.devices), cluster, 0.0).seconds
            steps = min(math.ceil(travels_s / inner_step_s), sync.every_steps // sync.fragments - 1)
            sync = sync.model_copy(update={"overlap_steps": max(0, steps)})
        if sync.overlap_steps and "mixing" not in given:
            sync = sync.model_copy(update={"mixing": MIXING})
        try:
            check_fragments(sync, run.model.layers)
        except ValueError:
            continue
        if sync not in seen:
            seen.append(sync)
            yield sync
