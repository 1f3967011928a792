"""`plan = "auto"`: the layout of a run on the devices at hand, where the user did not write one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import Plan, Precision, words_of
from argosy.plan.rules import first_problem

MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens that keep a device's matmuls at full speed; more only costs memory."""


@dataclass(frozen=True)
class Devices:
    """What a plan is chosen for."""

    count: int
    """Processes, one device each."""
    kind: Literal["cpu", "cuda"]
    fast_bf16: bool
    """bf16 matmuls are at least 1.5 times as fast as fp32 ones."""


def processes_of(plan: str) -> int:
    """Processes that a written plan is for; 0 if `auto` is to fit it to what there is. Raises: UserError."""
    words = words_of(plan)
    return 0 if "auto" in words else Plan.from_words(words).world_size


def check_written(run: RunConfig) -> None:
    """Refuse a written plan that cannot train `run` on as many devices as it needs; any "auto" passes.

    Raises: UserError.
    """
    if size := processes_of(run.plan):
        choose_plan(run, Devices(size, "cuda", fast_bf16=False))  # only cuda has all number formats


def choose_plan(run: RunConfig, devices: Devices) -> Plan:
    """The plan that `run.plan` writes down, with what it leaves open chosen for `devices`, and checked.

    "auto" alone leaves everything open; "auto,precision=fp32" all but the precision; a string without "auto"
    says the axes itself, and leaves open only the microbatch and the precision that it does not name.
    Raises: UserError if the plan cannot train this run.
    """
    words = words_of(run.plan)
    auto = words.pop("auto", None) is not None
    written = Plan.from_words(words)
    chosen: dict[str, int | Precision | bool] = {}
    if auto and "dp_replicate" not in words:
        chosen["dp_replicate"] = max(1, devices.count // written.world_size)
    if "precision" not in words:
        chosen["precision"] = "bf16" if devices.fast_bf16 else "fp32"
    if "compile" not in words:
        chosen["compile"] = not (written.pp > 1 and SCHEDULES[written.schedule].splits_backward)
    plan = written.model_copy(update=chosen)
    if "microbatch" not in words:
        plan = plan.model_copy(update={"microbatch": _microbatch(run, plan, devices.kind)})
    plan.check(run, devices.count)
    if plan.precision == "fp8" and devices.kind != "cuda":
        raise UserError(
            f"plan.precision = fp8 needs GPUs with fp8, and this run is for {devices.kind}. Try precision=bf16."
        )
    return plan


def _microbatch(run: RunConfig, plan: Plan, kind: str) -> int:
    """The largest divisor of a rank's share of the batch that stays within the device's useful tokens.

    A pipeline gets as many microbatches as it has stages, or the next number below that its schedule can run.
    """
    rows, left_over = divmod(run.train.global_batch, plan.dp)
    if left_over:
        return 1  # the check refuses this batch; with 1, the one it proposes is the nearest
    most = max(1, MICROBATCH_TOKENS[kind] // run.data.seq_len)
    if plan.pp > 1:
        most = max(1, min(most, rows // plan.stages))
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    admitted = [n for n in divisors if first_problem(plan.model_copy(update={"microbatch": n}), run) is None]
    return max((n for n in admitted if n <= most), default=min(admitted, default=1))
