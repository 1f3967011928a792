"""One site of a run, in this process: its state, and steps that are made from some gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from argosy.config.schema import RunConfig
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.sync.layout import Sites, at_site
from argosy.sync.ledger import RoundLedger
from argosy.training.outer_state import OuterState
from argosy.training.site_files import SiteFiles
from argosy.training.state import StepUpdate, TrainState
from tiny import run_config

PLAN = Plan(compile=False, sync="diloco")


def run_of(corpus: Path, sync: dict[str, float], optimizer: dict[str, str] | None = None) -> RunConfig:
    """A run of two sites, as one of them has it."""
    base = run_config(corpus, optimizer=optimizer or {}).model_dump(mode="json")
    keys = {"sync": sync, "site": "A", "sites": [{"name": "A"}, {"name": "B"}]}
    return at_site(RunConfig.model_validate(base | keys))


def site(run: RunConfig, folder: Path) -> tuple[TrainState, SiteFiles, Sites]:
    """The state of a site, whose folder is there."""
    state, sites = TrainState.begin(apply(PLAN, run, World()), PLAN, run), Sites.of(run, folder)
    sites.folder.mkdir(parents=True)
    state.outer = OuterState(sites, RoundLedger(folder), state.model.masters, is_diloco=True)
    assert state.outer is not None
    state.outer.begin(state.model.masters)
    return state, SiteFiles(state, state.outer, World()), sites


def gradient(state: TrainState, seed: int) -> dict[str, Tensor]:
    """Some gradient, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.value.shape, generator=generator) for p in state.model.pieces}


def plain(state: TrainState, norm: float) -> StepUpdate:
    """An update that clips nothing."""
    return StepUpdate(state.step, 1.0, norm, 0.0, 1e-2, 64, None)


def train(state: TrainState, seed: int, update: Callable[[TrainState, float], StepUpdate] = plain) -> None:
    """Make a step from `gradient`; `update` is given its norm."""
    some = gradient(state, seed)
    for piece in state.model.pieces:
        piece.value.grad = some[piece.name]
    state.apply(update(state, sum(g.double().square().sum().item() for g in some.values()) ** 0.5))
    state.model.zero_gradients()
