"""Plans by which a model is used, not trained: what of them counts then, and whether a model can be laid out so.

Free of torch: a command refuses a wrong plan before that is loaded.
"""

from __future__ import annotations

from argosy.config.model import MTPConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.config.train import LoraConfig, TrainConfig
from argosy.errors import UserError
from argosy.plan.plan import FP8, Plan, said_in
from argosy.plan.rules import first_problem

BATCH_TOKENS = 4096
"""Tokens of held-out text that a rank scores at once, unless a window has more."""
INFERENCE_KEYS = {
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "zero",
    "context",
    "layers",
    "precision",
    "weights",
}
"""Keys of a plan that say how a model is laid out and computes; the others are for training."""


def plan_named(text: str | Plan) -> Plan:
    """Return the plan that a user writes down; "" is one device. Raises: UserError, also for `auto`."""
    if isinstance(text, Plan):
        return text
    if said_in(text).is_auto:
        raise UserError(f'plan = "{text}": nothing is planned for a model that is only used. Name axes, such as tp=2.')
    return Plan.parse(text)


def plan_to_use(plan: Plan) -> Plan:
    """Return `plan` with what counts for a model that is not trained: stages one after the other, and no ZeRO but of
    the parameters.

    Raises: UserError for fp8, whose matmuls need many tokens.
    """
    if plan.precision in FP8:
        raise UserError(f'plan = "{plan}": precision = {plan.precision} is for training. Use precision=bf16.')
    said = plan.model_dump(include=INFERENCE_KEYS)
    if plan.stages != plan.pp:
        said.pop("layers")  # it says so of more stages
    return Plan(**{**said, "zero": 3 if plan.zero == 3 else 0, "compile": False})


def plan_of_rows(plan: Plan) -> Plan:
    """Return `plan_to_use` where ranks that share a sequence in training take rows of their own."""
    used = plan_to_use(plan)
    return used.model_copy(update={"dp_shard": used.dp_shard * used.cp, "cp": 1})


def plan_to_score(plan: Plan, seq_len: int) -> Plan:
    """Return `plan_to_use` with as many windows of so many tokens at once as a rank scores."""
    return plan_to_use(plan).model_copy(update={"microbatch": max(1, BATCH_TOKENS // seq_len)})


def run_of_rows(run: RunConfig, plan: Plan) -> RunConfig:
    """Return the run of a model that is laid out by `plan_of_rows`. Raises: UserError if it cannot be."""
    used = plan_of_rows(plan)
    return _run_to_use(run, used, 2 * used.tp, plan)


def run_to_score(run: RunConfig, plan: Plan, seq_len: int) -> RunConfig:
    """Return the run of a model that is laid out by `plan_to_score`. Raises: UserError if it cannot be."""
    return _run_to_use(run, plan_to_score(plan, seq_len), seq_len, plan)


def _run_to_use(run: RunConfig, plan: Plan, seq_len: int, said: Plan) -> RunConfig:
    """Return `run` with what its model needs to be used under `plan`: whole weights, no modules of multi-token
    prediction, no checks of training, and a batch that the ranks can deal out.
    """
    used = run.with_keys(
        model={"mtp": MTPConfig()},
        train=TrainConfig(steps=1, global_batch=plan.dp * plan.microbatch * plan.stages),
        data={"seq_len": seq_len},
        lora=LoraConfig(),
        resilience=ResilienceConfig(),
        sites=(),
    )
    if problem := first_problem(plan, used):
        raise UserError(f'plan = "{said}": {problem}')
    return used
