"""`plan = "auto"`: the search chooses what the user left open, for the devices at hand."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

from argosy.config.launch import USUAL_ACCELERATOR, DeviceType
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.heterogeneous import uneven_splits
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.hardware.devices import device_names, find_device
from argosy.plan.hardware.local_machine import cluster_of, device_named, own_part, resized
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import FP8, NUMERICS, Plan, Precision, check_can_estimate, said_in, with_sync, words_of
from argosy.plan.quantities import divisors
from argosy.plan.rules import first_problem
from argosy.plan.search.agreement import choose_word
from argosy.plan.search.search import AS_FAST, SearchResult, misfit, plainest, search_to_run, why_nothing_fits
from argosy.plan.search.space import check_plan, pins_of

MESHES_SPLIT = 16
"""On devices of several kinds, work is dealt out by speed under the best plans of so many meshes."""
UNKNOWN_GPU = "a100-80"
"""The device whose rates are taken for an unknown GPU: plans depend on how rates compare."""


@dataclass(frozen=True)
class Devices:
    """The devices that a plan is chosen for."""

    count: int
    """Number of processes, one device each."""
    kind: DeviceType
    fast_bf16: bool
    """True if bf16 matmuls are at least 1.5 times as fast as fp32 ones, by what the device is."""
    fast_fp16: bool = False
    """True if fp16 ones are, and bf16 ones are not: GPUs before Ampere."""
    name: str = ""
    """The driver's name of a GPU; empty if nobody asked."""
    memory_bytes: float | None = None
    """Memory of one device; None: as in the catalogue."""
    host_memory_bytes: float | None = None
    """Share of one GPU in its host's memory; None: as in the catalogue."""
    per_node: int = 0
    """Devices of one host; 0: all are on one host."""
    compute_capability: float | None = None
    """NVIDIA's; None: another maker's, or nobody asked."""


def processes_of(plan: str) -> int:
    """Return the processes that a written plan is for; 0 if `auto` fits it to the devices. Raises: UserError."""
    said = said_in(plan)
    return 0 if said.is_auto else Plan.from_words(said.words).world_size


def may_compile(plan: str) -> bool:
    """Return False if a written plan compiles nothing. Raises: UserError."""
    return Plan.from_words(said_in(plan).words).compile


def fast_precision(devices: Devices) -> Precision:
    """Return the precision that a plan takes if it names none: the one with the fastest matmuls."""
    return "bf16" if devices.fast_bf16 else "fp16" if devices.fast_fp16 else "fp32"


def check_written(run: RunConfig) -> None:
    """Refuse a written plan that cannot train `run` on as many devices as it needs; any "auto" passes.

    Raises: UserError.
    """
    if size := processes_of(run.plan):
        choose_plan(run, Devices(size, USUAL_ACCELERATOR, fast_bf16=False))  # it has all number formats


def choose_plan(run: RunConfig, devices: Devices, machine: Cluster | None = None) -> Plan:
    """Return the plan of `run.plan`, as `choose_with_reasons`."""
    return choose_with_reasons(run, devices, machine)[0]


def choose_with_reasons(run: RunConfig, devices: Devices, machine: Cluster | None = None) -> tuple[Plan, str]:
    """Return the plan of `run.plan`, complete and checked, with what it leaves open chosen for `devices`; and why it
    agrees as it does, in words, if that was left open.

    "auto" alone leaves everything open but `sync`; "auto,precision=fp32" all but that and the precision. "sync=auto"
    leaves `sync` open (`plan.search.agreement`). A string without "auto" names the axes itself, and leaves open only
    the microbatch, the precision and compilation if it does not name them.
    machine: the cluster that the devices belong to; None: the description of this machine
        (`plan.hardware.local_machine`), else the catalogue's devices.
    Raises: UserError if no plan can train this run, or "auto" finds none that fits the devices.
    """
    words, auto, sync_is_open = said_in(run.plan)
    written = Plan.from_words(words)
    if written.precision in FP8 and devices.kind != USUAL_ACCELERATOR:
        raise UserError(
            f"plan.precision = {written.precision} needs GPUs with fp8, and this run is for {devices.kind}. "
            "Try precision=bf16."
        )
    if "precision" not in words:
        written = written.model_copy(update={"precision": fast_precision(devices)})
    place = machine or machine_for(run, devices)
    is_known = devices.compute_capability or device_named(devices.name) in device_names()
    if "precision" in words and (machine or run.launch.cluster or is_known):
        place.check_precision(written.precision, has_experts=run.model.moe.experts > 0)
    costs, reasons = costs_of(run, place, devices.count), ""
    if sync_is_open:
        agreed = choose_word(costs, pins_of(written, {*words, "precision"}, auto))
        words["sync"], reasons = agreed.word, agreed.in_words()
        written = written.model_copy(update={"sync": agreed.word})
    plan = _chosen(costs, run, devices, written, words, auto)
    check_can_estimate(run, plan)
    return plan, reasons


def _chosen(
    costs: CostModel, run: RunConfig, devices: Devices, written: Plan, words: dict[str, str], auto: bool
) -> Plan:
    """Return the plan with the keys of `written` that `words` or "precision" name. Raises: UserError."""
    try:
        found = search_to_run(costs, pins_of(written, words.keys() | {"precision"}, auto))
    except UserError:  # it is worded for `argosy plan`
        return _plain(run, written, words, devices.count)
    if len(found):
        plan = found.plans.plan(plainest(found))
        says = {"shares", "layers"} & words.keys()
        return _dealt_by_speed(costs, found, plan) if auto and not says else plan
    if auto and devices.kind != "cpu":
        raise UserError(
            f'plan = "{run.plan}": {why_nothing_fits(costs, found)} `argosy plan` suggests what would fit; '
            "a plan that names its axes is tried with --launch.allow-memory."
        )
    return found.leanest


def plan_to_go_on(run: RunConfig, devices: Devices, before: Plan) -> Plan:
    """Return the plan of `run.plan` for a run whose state was computed with the plan `before`.

    The same plan, if it is one for these devices and `run.plan` does not say otherwise. Else what `run.plan` leaves
    open is chosen again, except for `NUMERICS`: the losses must not depend on how a run was interrupted.
    Raises: UserError as `choose_plan`.
    """
    words, auto, sync_is_open = said_in(run.plan)
    left_open = {"microbatch", "precision", "compile"} | ({"shares", "layers"} if run.resilience.rebalance else set())
    left_open |= {"sync"} if sync_is_open else set()
    open_keys = (Plan.model_fields.keys() if auto else left_open) - words.keys()
    same = Plan.from_words(words).model_copy(update={key: getattr(before, key) for key in open_keys})
    if same == before and same.world_size == devices.count and _fits(run, devices, same):
        written = [f"{key}={str(getattr(before, key)).lower()}" for key in Plan.model_fields]
    else:
        kept = [key for key in NUMERICS if key in open_keys and not (key == "sync" and sync_is_open)]
        text = with_sync(run.plan, before.sync)
        written = [text, *(f"{key}={str(getattr(before, key)).lower()}" for key in kept)]
    return choose_plan(run.model_copy(update={"plan": ",".join(written)}), devices)


def other_choice(run: RunConfig, devices: Devices, plan: Plan) -> str:
    """Return in words what `run.plan` would choose for a new run where `plan` goes on otherwise; "" if nothing."""
    new = fast_precision(devices)
    if "precision" in words_of(run.plan) or new == plan.precision:
        return ""
    return (
        f"The run goes on in {plan.precision}, as it began; a new run would take {new} here. "
        f"--plan {run.plan},precision={new} changes it, and with it the losses from here on."
    )


def _fits(run: RunConfig, devices: Devices, plan: Plan) -> bool:
    """Return True if the plan trains `run` and, on GPUs, is predicted to fit their memory."""
    if first_problem(plan, run) is not None:
        return False
    return devices.kind == "cpu" or misfit(costs_of(run, machine_for(run, devices), devices.count), plan) is None


def _dealt_by_speed(costs: CostModel, found: SearchResult, plan: Plan) -> Plan:
    """Return the best plan that deals work out by the speed of devices, if it beats `plan`, which does so evenly."""
    if not costs.kinds:
        return plan
    even_s = costs.step_s(plan)
    rows = found.best(found.step_s, MESHES_SPLIT)
    splits = uneven_splits(costs, [plan, *(found.plans.plan(int(row)) for row in rows)])
    best = min(splits, key=lambda split: split.step_s, default=None)
    return Plan.parse(best.plan) if best is not None and best.step_s < (1 - AS_FAST) * even_s else plan


def _plain(run: RunConfig, written: Plan, words: dict[str, str], count: int) -> Plan:
    """Return the written plan with the remaining devices on the plainest axis. Raises: UserError if it is not legal."""
    chosen: dict[str, int | bool] = {}
    if "auto" in words_of(run.plan) and "dp_replicate" not in words:
        chosen["dp_replicate"] = max(1, count // written.world_size)
    if "compile" not in words:
        chosen["compile"] = not (written.pp > 1 and SCHEDULES[written.schedule].splits_backward)
    plan = written.model_copy(update=chosen)
    if "microbatch" not in words:
        sizes = [plan.model_copy(update={"microbatch": n}) for n in divisors(max(1, run.train.global_batch // plan.dp))]
        plan = next((sized for sized in sizes if first_problem(sized, run) is None), sizes[0])
    check_plan(plan, run, count)
    return plan


def costs_of(run: RunConfig, cluster: Cluster, devices: int) -> CostModel:
    """Return the cost model of the run on so many devices of the cluster, with any memory where nobody knows it."""
    costs = CostModel.of(run, cluster).on(run, devices).as_started()
    if "memory_bytes" in cluster.device.assumed:  # nobody knows it, so it must not decide
        return replace(costs, rates=replace(costs.rates, memory_bytes=math.inf))
    return costs


def machine_for(run: RunConfig, devices: Devices) -> Cluster:
    """Return the description of this machine if it has such devices, else the catalogue's devices.

    A description may be of other devices, as predictions can be made for any. For a GPU that the catalogue does not
    know, a similar one is taken, with a warning.
    """
    cluster = cluster_of(run)
    if cluster is None or (cluster.device.kind == "cpu") != (devices.kind == "cpu"):
        return _by_the_catalogue(devices)
    return resized(own_part(run, cluster), devices.count)


def _by_the_catalogue(devices: Devices) -> Cluster:
    name = "cpu" if devices.kind == "cpu" else device_named(devices.name)
    if name not in device_names():
        if name:
            warnings.warn(
                f"the catalogue does not know {devices.name}: the plan is chosen as if it were as fast as "
                f"{UNKNOWN_GPU}. For a better choice, write its data sheet's figures to a file with `argosy config "
                "device`, set launch.cluster to that, and run `argosy probe --device` with it.",
                ArgosyWarning,
                stacklevel=5,
            )
        device = find_device(UNKNOWN_GPU)
        if able := devices.compute_capability:  # its fp8, if it has that, is twice as fast, as on all in the catalogue
            rates = device.peak_flops_per_s.model_copy(update={"fp8": 2 * device.peak("bf16")})
            said = {"name": devices.name, "compute_capability": able, "peak_flops_per_s": rates}
            device = device.model_copy(update=said)
    else:
        device = find_device(name)
    if devices.memory_bytes:
        known = tuple(key for key in device.assumed if key != "memory_bytes")
        device = device.model_copy(
            update={"memory_bytes": devices.memory_bytes, "reserved_bytes": 0.0, "assumed": known}
        )
    if devices.host_memory_bytes:
        device = device.model_copy(update={"host_memory_bytes": devices.host_memory_bytes})
    per_node = min(devices.count, devices.per_node or devices.count)
    nodes = -(-devices.count // per_node)
    return Cluster(groups=(NodeGroup(device=device, nodes=nodes, devices_per_node=per_node),))
