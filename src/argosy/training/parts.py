"""The parts of a run on one rank, made once: what a trainer and its services are built of."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.config.identity import config_sha256
from argosy.config.optimizer import OPTIMIZERS
from argosy.config.schema import RunConfig
from argosy.config.train import BUILTIN_LOSSES
from argosy.data.loader import OpenData, open_data
from argosy.data.order import SampleOrder
from argosy.errors import UserError
from argosy.models.initialize import materialize
from argosy.models.preference import WITH_REFERENCE
from argosy.models.user_code import check_loss
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CommunicationMeter
from argosy.observe.heartbeat import Heartbeat
from argosy.optim.optimizer import check_rule
from argosy.parallel.apply import apply
from argosy.parallel.world import World, node_of_each_rank
from argosy.plan.plan import Plan
from argosy.plan.rules import first_problem
from argosy.plan.sync import LOCAL
from argosy.sync.deal import SiteOrder
from argosy.sync.layout import Sites
from argosy.sync.ledger import RoundLedger
from argosy.training.batches import Batches
from argosy.training.checkpointer import Checkpointer
from argosy.training.evaluation import Evaluator
from argosy.training.outer_state import OuterState
from argosy.training.records import Records
from argosy.training.rows import ReferenceScorer
from argosy.training.state import Survivor, TrainState
from argosy.training.stop import StopSignal


class Parts:
    """The parts of a run on one rank."""

    def __init__(
        self,
        run: RunConfig,
        plan: Plan,
        world: World,
        run_dir: Path,
        stop: StopSignal,
        survivor: Survivor,
        heartbeat: Heartbeat,
    ):
        """Make the parts of a run with its initial weights. All ranks call it together.

        Raises: UserError if the run asks for what its plan, or the user's code, does not allow.
        """
        self.began_s = time.monotonic()
        self.run, self.world, self.run_dir = run, world, run_dir
        self.stop, self.survivor, self.heartbeat = stop, survivor, heartbeat
        memory_before_bytes = survivor.enter(world, run)
        self.plan = plan = plan_in_force(run, plan, world, run_dir)
        """As the world began with it; a plan that rebalancing puts in force later differs in shares alone."""
        self.records = records = Records(run, plan, world, run_dir)
        records.memory_before_bytes = memory_before_bytes
        check_user_code(run, plan)
        beside_adapter = run.model.weights is not None and run.lora.rank > 0
        model = apply(plan, run, world, partial(materialize, is_read=beside_adapter))
        sites = Sites.of(run, run_dir) if run.sites and plan.sync in LOCAL else None
        ledger = RoundLedger(run_dir)
        self.data = data = _open_data(run, ledger, sites)
        self.state = state = TrainState.begin(model, plan, run)
        if sites is not None:
            state.outer = OuterState(sites, ledger, model.masters, plan.sync == "diloco")
        self.batches = Batches(run, plan, data, state, world, records.events)
        events, progress, lasting = records.events, records.progress, config_sha256(run)
        self.checkpointer = Checkpointer(
            run_dir, run.checkpoint, plan, data.identity, world, events, progress, lasting, stop.check
        )
        nodes = node_of_each_rank(world)
        self.meter = CommunicationMeter(model.meshes.axis_of_groups(), nodes.__getitem__, world.device)
        self.clock = StepClock(world.device, heartbeat, self.meter)
        self.evaluator = Evaluator(run, plan, data.sources, model, world, heartbeat, progress)

    def has_signal(self) -> bool:
        """Return True once a signal came to any process. All ranks call it together."""
        has_signal = torch.tensor(float(self.stop.number is not None))
        if self.world.size > 1:  # in host memory: the host need not wait for what a GPU has still to do
            dist.all_reduce(has_signal, group=self.world.host_group)
        return has_signal.item() > 0

    def advance(self) -> None:
        """Show that a wait is no hang, and let a world that is over end meanwhile. Raises: WorldIsOver."""
        self.heartbeat.advance()
        self.stop.check()

    def score_references(self) -> None:
        """Have what the objective compares answers with. All ranks call it together."""
        train, batches = self.run.train, self.batches
        if train.objective in WITH_REFERENCE and batches.references is None:
            skips = self.run.data.on_bad_shard == "skip"
            about = (self.run_dir, self.plan.microbatch, train.objective == "kto", skips, self.heartbeat)
            scorer = ReferenceScorer(self.state.model, self.data, self.world, *about, self.records.progress)
            batches.compare_with(scorer.references(self.state.step))

    def show(self, what: str) -> None:
        """Show the user what is done now beside training; "" if nothing is."""
        self.records.progress.doing(what)


def plan_in_force(run: RunConfig, plan: Plan, world: World, run_dir: Path) -> Plan:
    """Return `plan` with the shares of the folder's plan.toml, if that differs in nothing else. All call it together.

    A world that takes the place of another so goes on with the shares that were measured.
    """
    if not run.resilience.rebalance:
        return plan
    found = Plan.parse(world.share_first(lambda: str(plan.with_shares_in(run_dir)), str))
    return found if first_problem(found, run) is None else plan


def _open_data(run: RunConfig, ledger: RoundLedger, sites: Sites | None) -> OpenData:
    """Open the data of a run; of a run with sites, with this site's samples only."""
    if sites is None:
        return open_data(run.data, run.seed, run.train.batches)
    data = open_data(run.data, run.seed, sites.shares.global_batch)
    ahead = sites.shares.ahead
    assert isinstance(data.order, SampleOrder)
    order = SiteOrder(data.order, sites.shares, sites.me, lambda number: ledger.dealt_by(number - ahead))
    return replace(data, order=order, batches=run.train.batches)


def check_user_code(run: RunConfig, plan: Plan) -> None:
    """Try the user's loss and optimizer, and refuse what the run asks for and they cannot do.

    Raises: UserError.
    """
    if run.train.loss not in BUILTIN_LOSSES:
        check_loss(run.extend.code, run.train.loss)
    if run.optimizer.kind not in OPTIMIZERS:
        check_rule(run.extend.code, run.optimizer)
    declared = {declaration.kind: declaration for declaration in run.not_deterministic}
    for declaration in declared.values():
        if every := run.resilience.replay_check_every_steps:
            raise UserError(
                f"resilience.replay_check_every_steps = {every}: the {declaration} ({declaration.place}) is declared "
                "not deterministic, so no replay gives the same bits. Set it to 0."
            )
    if "optimizer" in declared and plan.world_size > 1 and not (plan.zero and plan.dp_shard == plan.world_size):
        raise UserError(
            f'plan = "{plan}": ranks that each update the same parameter would drift apart, as the '
            f"{declared['optimizer']} is declared not deterministic. Try dp_shard={plan.world_size},zero=1, or draw "
            "its random numbers from update.name and update.step."
        )
    if "loss" in declared and plan.tp > 1:
        raise UserError(
            f'plan = "{plan}": the ranks of a tp group each compute the {declared["loss"]}, which is declared not '
            "deterministic, and would not get the same. Try tp=1."
        )
