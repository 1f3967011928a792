"""The rules that a plan must keep to train a run.

Each rule tells when it is broken, for one plan or for columns of plans (`plan.layouts`). For one plan it also explains
the problem in words: the values, the rule, and often a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from argosy.config.schema import RunConfig
from argosy.plan.layer_spec import dense_widths, head_counts, names_of_heads
from argosy.plan.layouts import Layouts
from argosy.plan.pipeline import INTERLEAVED, SPLITTING, cannot_run, cannot_run_a_share
from argosy.plan.plan import FP8, NO_WORKERS, NOT_OF_SITES, Plan
from argosy.plan.quantities import around, divisors, lowest, numbers_of
from argosy.plan.sync import COMPRESSED, OF_SITES, WITH_SERVERS

Plans = Any
"""A `Plan` or `Layouts`: both have these columns, as numbers or arrays. mypy cannot type arithmetic on that union."""
Breaks = Callable[[Plans, RunConfig], Any]
"""Returns True, or a mask of plans, where a rule is broken; only arithmetic and & | ~, so that it serves both."""


class Rule:
    """A rule. Called with a plan and a run, it returns None, or an explanation of how the plan breaks the rule."""

    def __init__(self, breaks: Breaks, words: Callable[[Plan, RunConfig], str]):
        self.breaks, self.words, self.__name__ = breaks, words, words.__name__

    def __call__(self, plan: Plan, run: RunConfig) -> str | None:
        return self.words(plan, run) if self.breaks(plan, run) else None


RULES: list[Rule] = []
"""All rules, in the order in which they are asked: the first that a plan breaks is the one that is told."""


def rule(breaks: Breaks) -> Callable[[Callable[[Plan, RunConfig], str]], Rule]:
    """Make a rule of `breaks` and the decorated function, which explains a plan that breaks it; add it to `RULES`."""

    def made(words: Callable[[Plan, RunConfig], str]) -> Rule:
        RULES.append(Rule(breaks, words))
        return RULES[-1]

    return made


def _of_ratio(key: str, broken: Callable[[Plans, RunConfig, tuple[int, ...]], Any]) -> Breaks:
    """Return what is broken where the plan says this ratio, given its numbers; nothing where it does not."""
    return lambda p, run: reduce(or_, (said & broken(p, run, numbers) for said, numbers in p.numbers(key)), False)


@rule(_of_ratio("shares", lambda p, run, numbers: (p.dp == 1) | (p.dp % len(numbers) != 0)))
def shares_are_of_ranks(plan: Plan, run: RunConfig) -> str:
    if plan.dp == 1:
        return f"plan.shares = {plan.shares}, and there is one data-parallel rank, which has all of it. Leave it out."
    return (
        f"plan.shares = {plan.shares} has {len(numbers_of(plan.shares))} numbers, which do not divide the {plan.dp} "
        "data-parallel ranks: give one for each rank, or for each of equal blocks of ranks, such as replicas."
    )


def _differ_in_a_replica(p: Plans, run: RunConfig) -> Any:
    found: Any = False
    for said, numbers in p.numbers("shares"):
        many = len(numbers)
        block = p.dp // many
        whole = p.dp_shard % (block + (block == 0)) == 0  # of a replica are several numbers
        across = (block % p.dp_shard != 0) & (whole ^ True)
        found = found | (said & across)
        for together in (size for size in range(2, many + 1) if many % size == 0):
            if any(len(set(numbers[i : i + together])) > 1 for i in range(0, many, together)):
                found = found | (said & (p.dp_shard == together * block))
    return found & ((p.zero == 3) | (p.ep > 1))


@rule(_differ_in_a_replica)
def ranks_that_gather_together_are_alike(plan: Plan, run: RunConfig) -> str:
    remedy = "Use zero=2, or let dp_replicate separate what is unlike"
    if plan.dp_replicate > 1:
        remedy += f", with a number for each of its {plan.dp_replicate} replicas"
    if plan.ep > 1:
        what = f"plan.ep = {plan.ep}: ranks that exchange tokens with each other's experts"
        remedy = remedy.replace("Use zero=2, or let", "Let")
    else:
        what = f"plan.zero = 3: ranks that gather each layer's parameters together, dp_shard = {plan.dp_shard} of them,"
    return f"plan.shares = {plan.shares} with {what} run as many microbatches. {remedy}."


@rule(_of_ratio("layers", lambda p, run, ns: (p.stages != len(ns)) | (p.pp == 1) | (sum(ns) != run.model.layers)))
def stages_have_the_layers(plan: Plan, run: RunConfig) -> str:
    said = f"plan.layers = {plan.layers}"
    if plan.pp == 1:
        return f"{said} with plan.pp = 1: it says how many layers each pipeline stage has. Leave it out."
    numbers = numbers_of(plan.layers)
    if len(numbers) != plan.stages:
        return f"{said} has {len(numbers)} numbers, and the pipeline has {plan.stages} stages: give one for each."
    return f"{said} adds up to {sum(numbers)}, and model.layers = {run.model.layers}. Change one of the numbers."


@rule(lambda p, run: run.train.global_batch % (p.portions * p.microbatch) != 0)
def batch_is_dealt_out(plan: Plan, run: RunConfig) -> str:
    rows = plan.portions * plan.microbatch
    below, above = run.train.global_batch // rows * rows, -(-run.train.global_batch // rows) * rows
    near = " or ".join(str(n) for n in (below, above) if n)
    of = f"portions of plan.shares = {plan.shares}" if plan.shares else "data-parallel ranks"
    return (
        f"train.global_batch = {run.train.global_batch} is not a multiple of {rows} "
        f"({plan.portions} {of} x plan.microbatch = {plan.microbatch}). Try {near}."
    )


def _any_of_heads(broken: Callable[[Plans, int, int], Any]) -> Callable[[Plans, RunConfig], Any]:
    """Return what is broken for the heads and key/value heads of any layer."""
    return lambda p, run: reduce(or_, (broken(p, *counts) for counts in head_counts(run.model)))


def _uneven_heads(p: Plans, heads: int, kv_heads: int) -> Any:
    return (heads % p.tp != 0) | ((kv_heads % p.tp != 0) & (p.tp % kv_heads != 0))


@rule(_any_of_heads(_uneven_heads))
def heads_are_dealt_out(plan: Plan, run: RunConfig) -> str:
    heads, kv_heads = next(counts for counts in head_counts(run.model) if _uneven_heads(plan, *counts))
    its_heads, its_kv_heads = names_of_heads(run.model, heads, kv_heads)
    if heads % plan.tp:
        problem = f"plan.tp = {plan.tp} does not divide {its_heads}: each rank computes as many heads."
    else:
        problem = f"plan.tp = {plan.tp} and {its_kv_heads}: one must divide the other, so that each rank has as many "
        problem += "key/value heads, or shares one."
    tries = (plan.model_copy(update={"tp": tp}) for tp in divisors(heads) if tp > 1)
    good = [other.tp for other in tries if not any(_uneven_heads(other, *counts) for counts in head_counts(run.model))]
    return f"{problem} Try plan.tp = {around(plan.tp, good)}." if good else problem


@rule(lambda p, run: run.model.delta_net.key_heads % (p.tp * p.cp) != 0)
def delta_heads_are_dealt_out(plan: Plan, run: RunConfig) -> str:
    heads = run.model.delta_net.key_heads
    return f"plan.tp x cp = {plan.tp * plan.cp} must divide model.delta_net.key_heads = {heads}. Try {divisors(heads)}."


@rule(lambda p, run: reduce(or_, (width % p.tp != 0 for width in dense_widths(run.model)), False))
def feed_forward_is_dealt_out(plan: Plan, run: RunConfig) -> str:
    width, layer = next((width, layer) for width, layer in dense_widths(run.model).items() if width % plan.tp)
    name = f"model.ffn_widths = {width} (layer {layer})" if run.model.ffn_widths else f"model.ffn_width = {width}"
    return f"plan.tp = {plan.tp} does not divide {name}."


def _pieces(p: Plans) -> Any:
    """Return the pieces of a sequence: with context parallelism, each rank has an early and a late one."""
    return p.tp * p.cp * (1 + (p.cp > 1))


@rule(lambda p, run: run.data.seq_len % _pieces(p) != 0)
def tokens_are_dealt_out(plan: Plan, run: RunConfig) -> str:
    pieces = _pieces(plan)
    two = "2 x plan.cp (an early and a late chunk for each rank) x " if plan.cp > 1 else ""
    return (
        f"data.seq_len = {run.data.seq_len} is not a multiple of {pieces} = {two}plan.tp = {plan.tp}. "
        f"Try data.seq_len = {max(1, run.data.seq_len // pieces) * pieces}."
    )


def _ulysses_lacks_heads(p: Plans, heads: int, kv_heads: int) -> Any:
    heads, kv_heads = heads // p.tp, kv_heads // p.tp  # of a tensor-parallel rank
    kv_heads = kv_heads + (kv_heads == 0)
    uneven = (heads % p.cp != 0) | ((kv_heads % p.cp != 0) & (p.cp % kv_heads != 0))
    return (p.cp > 1) & p.is_("context", "ulysses") & uneven


@rule(_any_of_heads(_ulysses_lacks_heads))
def ulysses_has_heads(plan: Plan, run: RunConfig) -> str:
    heads, kv_heads = next(counts for counts in head_counts(run.model) if _ulysses_lacks_heads(plan, *counts))
    where = f", {names_of_heads(run.model, heads, kv_heads)[1]}" if len(head_counts(run.model)) > 1 else ""
    mine = f"{heads // plan.tp} heads and {max(1, kv_heads // plan.tp)} key/value heads"
    return (
        f"plan.context = ulysses with plan.cp = {plan.cp}: {mine} on each of plan.tp = {plan.tp} ranks{where}; plan.cp "
        "must divide the former, and divide the latter or be a multiple. Try context=ring."
    )


@rule(lambda p, run: (p.pp > 1) & (p.stages > run.model.layers))
def every_stage_has_a_layer(plan: Plan, run: RunConfig) -> str:
    said = f"plan.pp = {plan.pp} with schedule {plan.schedule} makes {plan.stages} stages"
    return f"{said}, and model.layers = {run.model.layers}: each stage needs a layer."


@rule(lambda p, run: (p.pp > 1) & p.is_("schedule", *INTERLEAVED) & (p.stages_per_rank < 2))
def schedule_is_of_several_stages(plan: Plan, run: RunConfig) -> str:
    return f"plan.stages_per_rank = 1 with schedule {plan.schedule}: it interleaves at least 2. Or use 1f1b."


@rule(lambda p, run: cannot_run(p, p.microbatches(run.train.global_batch)))
def schedule_admits_the_microbatches(plan: Plan, run: RunConfig) -> str:
    n = plan.microbatches(run.train.global_batch)
    problem = f"plan.schedule = {plan.schedule} with plan.pp = {plan.pp} cannot run {n} microbatches a step"
    remedy = "(train.global_batch / data-parallel ranks / plan.microbatch)"
    if plan.schedule in ("1f1b", "dualpipev"):
        rows = run.train.global_batch // plan.portions * plan.most_portions
        most = max((size for size in divisors(rows) if rows // size >= plan.stages), default=0)
        smaller = f" Try plan.microbatch = {most}{' or less' if most > 1 else ''}." if most else ""
        return f"{problem} {remedy}: at least {plan.stages}, its stages.{smaller}"
    below, above = n // plan.pp * plan.pp, -(-n // plan.pp) * plan.pp
    return f"{problem} {remedy}: try {below} or {above}."


@rule(lambda p, run: cannot_run_a_share(p, run.train.global_batch))
def schedule_admits_every_share(plan: Plan, run: RunConfig) -> str:
    of_portion = run.train.global_batch // (plan.portions * plan.microbatch)
    each = [of_portion * share for share in lowest(numbers_of(plan.shares))]
    wrong = next(n for n in each if cannot_run(plan, n))
    needs = f"at least {plan.stages}, its stages" if wrong < plan.stages else f"a multiple of {plan.pp}"
    return (
        f"plan.shares = {plan.shares} gives pipelines {', '.join(map(str, each))} microbatches, and plan.schedule = "
        f"{plan.schedule} with plan.pp = {plan.pp} cannot run {wrong}: it takes {needs}. Try shares that are more "
        "alike, a smaller plan.microbatch, or schedule=gpipe."
    )


@rule(
    lambda p, run: (
        (p.pp > 1)
        & p.is_("schedule", *SPLITTING)
        & (p.is_("compile", True) | p.is_("recompute", "selective") | (run.model.mtp.modules > 0))
    )
)
def split_backward_is_eager(plan: Plan, run: RunConfig) -> str:
    if modules := run.model.mtp.modules:  # the tokens that they look up are on no way from the stage's input
        return (
            f"plan.schedule = {plan.schedule} splits backward, which torch cannot with model.mtp.modules = {modules}. "
            "Use schedule=interleaved_1f1b."
        )
    if plan.compile:
        return f"plan.schedule = {plan.schedule} splits backward, which compiled blocks cannot. Add compile=false."
    return (
        f"plan.schedule = {plan.schedule} splits backward, and recompute=selective keeps results for one backward "
        "only. Use recompute=full or none, or schedule=interleaved_1f1b."
    )


@rule(
    lambda p, run: (
        (p.ep > 1) & ((run.model.moe.experts % p.ep != 0) | (p.dp_shard * p.cp % p.ep != 0))
        if run.model.moe.experts
        else p.ep > 1
    )
)
def experts_are_dealt_out(plan: Plan, run: RunConfig) -> str:
    experts = run.model.moe.experts
    if not experts:
        return f"plan.ep = {plan.ep}, and the model has no experts (model.moe.experts = 0). Leave ep out."
    of, many = ("model.moe.experts", experts) if experts % plan.ep else ("dp_shard x cp", plan.dp_shard * plan.cp)
    good = [ep for ep in divisors(many) if ep > 1 and experts % ep == 0]
    remedy = f"Try plan.ep = {around(plan.ep, good)}." if good else "Leave ep out."
    return f"plan.ep = {plan.ep} does not divide {of} = {many}. {remedy}"


@rule(lambda p, run: (p.is_("overlap_experts", True) & (p.ep == 1)) | (p.is_("async_tp", True) & (p.tp == 1)))
def messages_that_are_hidden_travel(plan: Plan, run: RunConfig) -> str:
    word, axis = ("overlap_experts", "ep") if plan.overlap_experts and plan.ep == 1 else ("async_tp", "tp")
    return f"plan.{word} = true with plan.{axis} = 1: it sends nothing. Leave it out, or give {axis} some of the ranks."


@rule(lambda p, run: (p.is_("user_buffers", True) | p.is_("fp8_gather", True)) & (p.shards_parameters ^ True))
def messages_of_fsdp_are_sent(plan: Plan, run: RunConfig) -> str:
    word = "user_buffers" if plan.user_buffers else "fp8_gather"
    return f"plan.{word} = true is for messages of zero=3 over dp_shard or cp, and there are none. Leave it out."


@rule(
    lambda p, run: (
        p.is_("async_tp", True)
        & (p.is_("precision", *FP8) | p.is_("recompute", "selective") | ((p.pp > 1) & p.is_("schedule", *SPLITTING)))
    )
)
def products_that_exchange_are_whole(plan: Plan, run: RunConfig) -> str:
    word = "precision" if plan.precision in FP8 else "recompute" if plan.recompute == "selective" else "schedule"
    said = f"plan.async_tp = true with {word} = {getattr(plan, word)}"
    return f"{said}: a product and its exchange are one operator, in bf16 or wider, both ways. Leave one of them out."


@rule(lambda p, run: (p.ep > 1) & (p.pp > 1) & (p.zero == 3) & p.is_("recompute", "selective"))
def recomputed_experts_are_gathered_alike(plan: Plan, run: RunConfig) -> str:
    return (
        f"plan.recompute = selective with plan.ep = {plan.ep}, plan.pp = {plan.pp} and plan.zero = 3: in a pipeline "
        "FSDP2 gathers experts at other times in backward than in forward, which torch takes for another computation. "
        "Use recompute=full or none, or zero=2."
    )


@rule(
    lambda p, run: (
        (p.is_("precision", "fp8", "fp8_blockwise", "mxfp8") & (run.model.moe.experts > 0))
        | (p.is_("precision", "fp16") & p.is_("weights", "bf16"))
        | (p.is_("precision", "mxfp8") & (p.microbatch * run.data.seq_len // p.cp % FP8["mxfp8"] != 0))
        | (p.is_("fp8_gather", True) & np.logical_not(p.is_("precision", "fp8_rowwise")))
    )
)
def number_formats_go_together(plan: Plan, run: RunConfig) -> str:
    if plan.precision == "fp16" and plan.weights == "bf16":
        return "plan.weights = bf16 with precision = fp16: weights would lose what fp16 resolves. Try precision=bf16."
    if plan.fp8_gather and plan.precision != "fp8_rowwise":
        what, why = "fp8_gather = true", "only fp8_rowwise multiplies by what was gathered as it is; else leave it out"
    elif run.model.moe.experts:
        what, why = "experts", "in eight bits, theirs have a scale for each row"
    else:
        what = f"{plan.microbatch * run.data.seq_len // plan.cp} tokens of a microbatch on a rank"
        why = f"gradients of weights are sums of {FP8['mxfp8']} tokens each"
    return f"plan.precision = {plan.precision} with {what}: {why}. Try precision=fp8_rowwise or bf16."


@rule(lambda p, run: (p.is_("precision", *FP8) | p.is_("async_tp", True)) & (run.lora.rank > 0))
def adapters_have_plain_products(plan: Plan, run: RunConfig) -> str:
    word, other = ("precision", "bf16") if plan.precision in FP8 else ("async_tp", "false")
    said = f"lora.rank = {run.lora.rank} with plan.{word} = {getattr(plan, word)}"
    return f"{said}: its layers know no adapters. Try {word}={other}."


@rule(lambda p, run: p.is_("sync", *OF_SITES) ^ bool(run.sites))
def sites_agree_now_and_then(plan: Plan, run: RunConfig) -> str:
    if not run.sites and plan.has_servers:
        return NO_WORKERS
    if not run.sites:
        return (
            f"plan.sync = {plan.sync}, and the run has no [[sites]]: it says how sites agree. Name two sites or more "
            "(docs/sites.md), or leave sync out."
        )
    return NOT_OF_SITES.format(plan.sync)


@rule(lambda p, run: p.is_("sync", *COMPRESSED) & (p.replicas == 1))
def compressed_sums_have_replicas(plan: Plan, run: RunConfig) -> str:
    return (
        f"plan.sync = {plan.sync} with plan.dp_replicate = 1: it says how replicas of the state sum their gradients, "
        "and there is only one. Leave sync out, or give dp_replicate some of the ranks."
    )


@rule(lambda p, run: (p.is_("sync", *COMPRESSED) | p.shards_parameters) & run.resilience.check_collectives)
def sums_that_are_checked_are_exact_and_ours(plan: Plan, run: RunConfig) -> str:
    why, remedy = f"sync = {plan.sync}: checksums fit exact sums only", "leave sync out"
    if plan.shards_parameters:
        why, remedy = "zero = 3: FSDP2 sums the gradients, and carries no checksums", "try zero=2 or lower"
    return f"resilience.check_collectives = true with plan.{why}. Set it to false, or {remedy}."


@rule(
    lambda p, run: (
        ((p.dp_replicate == 1) | (p.world_size != p.dp_replicate) | (run.model.moe.experts > 0))
        & (run.resilience.replay_check_every_steps > 0)
    )
)
def replicas_that_replay_are_whole(plan: Plan, run: RunConfig) -> str:
    said = f"resilience.replay_check_every_steps = {run.resilience.replay_check_every_steps}"
    why = "only whole replicas of a model without experts can compute each other's gradients"
    return f'{said} with plan = "{plan}": {why}. Try dp_replicate alone, or 0 here.'


def _tiers_do_not_divide(p: Plans) -> Any:
    unit = p.sum_inside * p.sum_between
    cut = (unit > 1) & ((p.replicas % unit != 0) | (unit >= p.replicas))
    return cut | ((p.sum_between > 1) & (p.sum_inside == 1))


@rule(lambda p, run: _tiers_do_not_divide(p))
def tiers_divide_the_replicas(plan: Plan, run: RunConfig) -> str:
    if plan.sum_inside == 1:
        return f"plan.sum_between = {plan.sum_between} with sum_inside = 1: the first tier is sum_inside. Name it so."
    unit, many = plan.sum_inside * plan.sum_between, plan.replicas
    said = f"plan.sum_inside = {plan.sum_inside}" + f" x sum_between = {plan.sum_between}" * (plan.sum_between > 1)
    good, plural = [n for n in divisors(many) if 1 < n < many], "s" * (many != 1)
    remedy = f"Try {around(unit, good) or good[-1]}." if good else "Leave it out."
    return (
        f"{said} has to divide the plan's {many} replica{plural} of the state into two groups or more (replicas are "
        f"dp_replicate, and with zero = 0 the other data and context ranks too). {remedy}"
    )


def _tiers_cut_experts(p: Plans) -> Any:
    sizes = p.sum_inside, p.sum_inside * p.sum_between
    return (p.zero == 0) & reduce(or_, [(size % p.ep != 0) & (p.ep % size != 0) for size in sizes])


@rule(lambda p, run: _tiers_cut_experts(p))
def tiers_hold_whole_sets_of_experts(plan: Plan, run: RunConfig) -> str:
    return (
        f"plan.sum_inside = {plan.sum_inside} and sum_between = {plan.sum_between} with ep = {plan.ep} and zero = 0: "
        "neighbours have other experts, so ep must divide the replicas of a tier, or be a multiple of them. "
        f"Try sum_inside = {plan.ep}."
    )


@rule(lambda p, run: p.is_("sync", *WITH_SERVERS) & p.is_("precision", "fp16"))
def asynchronous_gradients_have_no_loss_scale(plan: Plan, run: RunConfig) -> str:
    said = "plan.sync = async with precision = fp16: workers come and go"
    return f"{said}, and a loss scale would be found anew each time. Try precision=bf16 or fp32."


@rule(lambda p, run: p.is_("sync", *WITH_SERVERS) & bool(run.train.frozen or run.lora.rank or run.evaluate.tasks))
def servers_train_all_weights_and_score_no_tasks(plan: Plan, run: RunConfig) -> str:
    key = "train.frozen" if run.train.frozen else "lora.rank" if run.lora.rank else "evaluate.tasks"
    return f"{key} is not supported with plan.sync = async. Remove it, or use sites (sync=local, sync=diloco)."


@rule(lambda p, run: p.is_("sync", *OF_SITES) & (run.model.moe.experts > 0) & (run.model.moe.balance == "bias"))
def sites_have_no_state_but_weights(plan: Plan, run: RunConfig) -> str:
    return (
        f'plan.sync = {plan.sync} with model.moe.balance = "bias": each site would have biases of its own, which '
        'are no weights that sites agree on. Use balance = "aux".'
    )


OF_MICROBATCHES = (batch_is_dealt_out, schedule_admits_the_microbatches, schedule_admits_every_share)
"""Rules that another microbatch may satisfy."""


def breaks_any(plans: Layouts, run: RunConfig, besides: tuple[Rule, ...] = ()) -> Any:
    """Return a mask of the plans that cannot train `run`. `first_problem` explains why, for one plan.

    besides: rules that are left out.
    """
    broken = reduce(or_, (rule.breaks(plans, run) for rule in RULES if rule not in besides))
    of_stages = (r.breaks(plans, s) for s in _stages(run) for r in OF_MICROBATCHES if r not in besides)
    return reduce(or_, of_stages, broken)


def first_problem(plan: Plan, run: RunConfig) -> str | None:
    """Explain the first rule that `plan` breaks; return None if it can train `run`."""
    problem = next((problem for rule in RULES if (problem := rule(plan, run))), None)
    if problem is not None:
        return problem
    return next((_of_stage(p, stage) for stage in _stages(run) for r in OF_MICROBATCHES if (p := r(plan, stage))), None)


def _stages(run: RunConfig) -> Iterator[RunConfig]:
    """Yield the run as it would be with the batch of each stage of its ramp."""
    for stage in run.train.batch_ramp:
        yield run.with_keys(train={"global_batch": stage.global_batch, "batch_ramp": ()})


def _of_stage(problem: str, stage: RunConfig) -> str:
    """Return a problem with the batch of a stage, which calls it train.global_batch, under its own name."""
    return problem.replace(f"train.global_batch = {stage.train.global_batch}",
                           f"train.batch_ramp: global_batch = {stage.train.global_batch}")  # fmt: skip
