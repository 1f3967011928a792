"""The exact bytes on the wire: those that each rank sends in one step, by mesh axis and collective, in closed form.

The convention is that of ring algorithms. For a message of `size` bytes in a group of n ranks, a rank sends

    all_reduce   2 (n-1)/n size        all_gather, reduce_scatter, all_to_all   (n-1)/n size        send   size

where size is that of the whole: the result of an all-gather, or the input of a reduce-scatter (Thakur et al. 2005).
`observe.wire` counts the same in a running step. With M microbatches of B rows, T tokens of a row on one cp rank,
width D, e bytes of an activation, w of a weight, r of a gradient's sum, N elements of the rank's parameters (padded to
equal shares), a step sends

    axis       collective                     size                  times
    replicate  all_reduce, zero 0             r N                   1           or of the shard, r N/n, after it;
                                                                    with `sync`, or in tiers: `_replicas`
    shard      reduce_scatter, zero 1 to 3    r N                   1
               all_gather, zero 1, 2          w N                   1           of updated values
               all_gather, zero 3             e N, fp8_gather N     2 M         blocks; what is around them M
                                                                    M + 1       in a pipeline, around them 1;
                                                                    1           if its schedule splits backward
    tp         all_gather                     e B T D               4 M         each block; 1 M the embedding, the norm
               reduce_scatter                 e B T D               4 M         each block; 1 M the embedding, the norm
               all_gather                     8 tp B T              M           the loss
               all_reduce                     w                     1           each element that all ranks have whole
               all_reduce, DoRA               8                     M           each output of a matrix of cut inputs
    cp         send, ring                     keys and values       2 (n-1) M   each block
               send, ring                     their fp32 gradients  n M         each block
               all_to_all, Ulysses            q, k, v and output    2 M         each block
    pp         send                           e B T/tp D            M           each boundary, in either direction
    ep         all_to_all                     e B T D k             4 M         each layer with k experts of a token
    ends       all_reduce                     w                     1           each element of a tied embedding
    all cuts   all_gather                     4                     1           each element of a matrix under Muon
    stage      broadcast                      4 (on a GPU 2)        1           the same, over all ranks of the stage

Of what is frozen only values travel, and only blocks that backward reaches send in backward; the first of them may send
less than is counted here. Recomputed blocks send the messages of their forward once more, except the last sum over tp
ranks, which no gradient needs without a norm behind it. With recompute=selective the output of a ring is kept, so that
it sends nothing more.
104 bytes a step (`LOSS_BYTES`) cross all ranks.

The exact bytes of sums over replicas in tiers, and by the plan's word `sync`: those that `sync` sends, by bucket.

Where a replicas sum inside, and c groups of them between, each rank of a tier gets an equal part of the rows of each
matrix, filled up; S numbers in all, for r bytes of a number (`reduce`):

    inside      reduce_scatter, all_gather    r S each
    between     reduce_scatter, all_gather    r S/a each
    replicate   as `plan.sync` says, of S/(a c) numbers  1/(a c) of the bytes that leave the inner tiers

What is summed exactly whatever the word says (`plan.sync.is_summed_exactly`) goes in buckets of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from argosy.config.model import ModelConfig
from argosy.config.optimizer import settings_of
from argosy.config.schema import RunConfig
from argosy.config.sync import SyncConfig
from argosy.plan.cost.exact_state import DTYPE_BYTES, LocalShard, dp_rank_of, local_shard_of, place_of, stages_on
from argosy.plan.layer_spec import halo_tokens, layer_spec
from argosy.plan.parameters import NORMS_OF_PLACE, Parameter, Stage, layers_on, reached_layers, run_table
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSOR_COSTS, Sent, Summand, is_summed_exactly
from argosy.plan.workload import Workload


def summed(name: str, parameter: Parameter, cut: LocalShard, plan: Plan, run: RunConfig) -> Summand:
    """Return what replicas sum of a parameter."""
    whole_on_tp = plan.tp > 1 and parameter.tp_dim is None
    at_both_ends = plan.pp > 1 and run.model.embeds_at_both_ends
    is_exact = is_summed_exactly(name, parameter.shape, whole_on_tp, at_both_ends, plan.sync, run.sync)
    weight = DTYPE_BYTES[plan.weights]
    if plan.zero == 3 and cut.ranks > 1:
        return Summand(is_exact, cut.mine, weight * math.prod(cut.mine))
    shape = (-(-cut.local[0] // cut.ranks), *cut.local[1:])
    return Summand(is_exact, shape, weight * cut.numel)


def sent_inside(parameters: Sequence[Summand], tiers: Sequence[int], plan: Plan) -> Iterator[tuple[int, str, float]]:
    """Yield tier, kind and bytes of the messages that sum these parameters in tiers of these sizes, nearest first."""
    left = math.prod(tiers)
    elements = sum(one.part(left).elements for one in parameters)
    for tier, size in enumerate(tiers):
        for kind in ("reduce_scatter", "all_gather"):
            yield tier, kind, DTYPE_BYTES[plan.reduce] * elements * left
        left //= size


def sent_across(parameters: Sequence[Summand], k: int, n: int, plan: Plan, settings: SyncConfig) -> Iterator[Sent]:
    """Yield the messages that sum one of `k` parts of these parameters, in the model's order, over `n` replicas."""
    for one in parameters:
        if one.is_exact or not plan.is_compressed:
            yield "all_reduce", DTYPE_BYTES[plan.reduce] * one.part(k).elements
    if plan.is_compressed and n > 1:
        for bucket in _buckets((one for one in parameters if not one.is_exact), plan.bucket_mb * 2**20):
            yield from COMPRESSOR_COSTS[plan.sync].messages([one.part(k) for one in bucket], n, settings)


def _buckets(parameters: Iterable[Summand], bucket_bytes: int) -> Iterator[list[Summand]]:
    """Cut as `parallel.buckets.cut` does."""
    bucket: list[Summand] = []
    for one in reversed(list(parameters)):
        if sum(other.bucket_bytes for other in bucket) >= bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket


Traffic = Counter[tuple[str, str]]
"""(axis, kind of collective) -> bytes that one rank sends in one step."""

WORLD, ENDS, STAGE = "world", "ends", "stage"
"""Three more axes: WORLD has all ranks. ENDS has the two ranks that hold a tied embedding, in the first and the last
pipeline stage. STAGE has all ranks of a pipeline rank, which need the same updates."""
SUM_TIERS = ("inside", "between")
"""Tiers in which replicas sum before the rest does, nearest first; what is left counts as `replicate`."""
SPANNING = ("pp", "tp", "cp", "shard", "replicate", "ep", "expert_shard", "expert_replicate")
WIRE_AXES = (*SPANNING, *(f"{axis}_{tier}" for axis in ("replicate", "expert_replicate") for tier in SUM_TIERS))
"""Axes of traffic: `shard` is dp_shard x cp. If an axis spans all ranks, all bytes count under its name (the first such
name): a process group knows its ranks, not its purpose."""

LOSS_BYTES = 104
"""The step's loss, the squared gradient norm, the fingerprint's four parts and seven votes, fp64."""
KV_GRADIENT_BYTES = 4
"""Gradients of keys and values travel round a ring in fp32."""
LENGTH_BYTES = 4
"""Bytes of the squared length of a row (DoRA)."""
MOMENTUM_BYTES = 4
"""Bytes of an element of Muon's momentum, and of its result in fp32."""
INDEX_BYTES, ROUTING_WEIGHT_BYTES = 8, 4
"""Bytes of an expert's number or a count of tokens (int64), and of a routing weight (fp32)."""


@dataclass(frozen=True)
class Collective:
    """One collective of this rank, or several alike."""

    axis: str
    kind: str
    size: float
    """Bytes of the whole message, of all messages together."""
    ranks: int

    @property
    def bytes(self) -> float:
        """Bytes that the rank itself sends."""
        rounds = {"all_reduce": 2, "send": self.ranks / max(1, self.ranks - 1)}.get(self.kind, 1)
        return rounds * (self.ranks - 1) / self.ranks * self.size


def traffic(plan: Plan, run: RunConfig, rank: int = 0) -> Traffic:
    """Return the bytes that global rank `rank` sends in one step, padding included.

    Exact for dense models; with experts, exact for a load that is even over the ranks. With zero 3 in a pipeline, exact
    for up to three stages on a rank: with more, torch frees some and gathers them again.
    """
    sums: Traffic = Counter()
    spanning = spanning_axis(axis_sizes(plan), plan.world_size) or WORLD
    ends = _tied_ends, _replicated, _lengths
    for sends in (_gradients, _replicas, *ends, _tensor, _context, _pipeline, _experts, _muon, _everyone):
        for sent in sends(plan, run, rank):
            if sent.ranks > 1 and sent.size:
                by_all = sent.ranks == plan.world_size and sent.axis != ENDS
                sums[spanning if by_all else sent.axis, sent.kind] += round(sent.bytes)
    return sums


def axis_sizes(plan: Plan) -> dict[str, int]:
    """Return the number of ranks along each of `SPANNING`."""
    return {
        "pp": plan.pp,
        "tp": plan.tp,
        "cp": plan.cp,
        "shard": plan.shares_state,
        "replicate": plan.replicas,
        "ep": plan.ep,
        "expert_shard": plan.shares_experts,
        "expert_replicate": plan.expert_replicas,
    }


def spanning_axis(sizes: dict[str, int], world: int) -> str | None:
    """Return the first axis that spans all ranks, if there is one."""
    return next((axis for axis in SPANNING if 1 < sizes[axis] == world), None)


def _held(plan: Plan, run: RunConfig, rank: int) -> Iterator[tuple[str, Parameter, LocalShard]]:
    """Yield every parameter on this rank."""
    for stage in stages_on(plan, run, rank).values():
        for name, parameter in run_table(run, stage, plan.tp).items():
            yield name, parameter, local_shard_of(parameter, plan, rank)


def _trained(plan: Plan, run: RunConfig, rank: int) -> Iterator[tuple[str, Parameter, LocalShard]]:
    return (held for held in _held(plan, run, rank) if held[1].is_trained)


def _gradients(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the sums of gradients over data-parallel ranks, and the gathering of sharded values."""
    reduced, weight = DTYPE_BYTES[plan.reduce], DTYPE_BYTES[plan.weights]
    for name, parameter, cut in _held(plan, run, rank):
        shard, replicate = (
            ("expert_shard", "expert_replicate") if is_dealt_out(parameter, plan) else ("shard", "replicate")
        )
        padded = cut.ranks * cut.chunk
        if cut.ranks > 1 and plan.zero == 3:
            size = _times_gathered(plan, run, rank, name) * cut.gathered_bytes(parameter, plan, run)
            yield Collective(shard, "all_gather", size, cut.ranks)
        if not parameter.is_trained:
            continue
        if cut.ranks > 1:
            yield Collective(shard, "reduce_scatter", reduced * padded, cut.ranks)
            if plan.zero < 3:
                yield Collective(shard, "all_gather", weight * padded, cut.ranks)
        if not plan.sums_beside_fsdp:
            yield Collective(replicate, "all_reduce", reduced * cut.chunk, cut.replicas)


def _replicas(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the sums of gradients over replicas in tiers, or in fewer bytes."""
    if not plan.sums_beside_fsdp:
        return
    for stage in stages_on(plan, run, rank).values():
        groups: dict[tuple[bool, int], list[Summand]] = {}
        for name, parameter in run_table(run, stage, plan.tp).items():
            if not parameter.is_trained:
                continue
            cut = local_shard_of(parameter, plan, rank)
            groups.setdefault((is_dealt_out(parameter, plan), cut.replicas), []).append(
                summed(name, parameter, cut, plan, run)
            )
        for (is_dealt, replicas), parameters in groups.items():
            axis = "expert_replicate" if is_dealt else "replicate"
            inside = plan.inner_tiers(is_dealt)
            across = replicas // math.prod(inside)
            for tier, kind, size in sent_inside(parameters, inside, plan):
                yield Collective(f"{axis}_{SUM_TIERS[tier]}", kind, size, inside[tier])
            for kind, size in sent_across(parameters, math.prod(inside), across, plan, run.sync):
                yield Collective(axis, kind, size, across)


def is_dealt_out(parameter: Parameter, plan: Plan) -> bool:
    """Return True if the ranks of expert parallelism have other parts of a parameter."""
    return parameter.is_expert and plan.ep > 1


def _times_gathered(plan: Plan, run: RunConfig, rank: int, name: str) -> int:
    """Return how often FSDP2 gathers the parameter `name` in a step.

    A block is freed after its forward, the parameters around the blocks (the root module) after backward. A pipeline's
    stages free nothing after a backward, so that a block is gathered for each forward but those right after a
    backward, and for each backward right after a forward: M + 1 times, in whatever order. Schedules that split
    backward keep all gathered parameters until the end of the step.
    """
    microbatches = _rows(plan, run, rank) // plan.microbatch
    is_block = name.startswith("blocks.")
    if is_block and not _is_gathered_again(run, stages_on(plan, run, rank), int(name.split(".")[1])):
        return microbatches
    if plan.pp > 1:
        return microbatches + 1 if is_block and not SCHEDULES[plan.schedule].splits_backward else 1
    return 2 * microbatches if is_block else microbatches


def _is_gathered_again(run: RunConfig, stages: Mapping[int, Stage], layer: int) -> bool:
    """True if backward gathers a block: it reaches it or, as FSDP2 gathers one block ahead, the one after it."""
    stage = next(stage for stage in stages.values() if layer in layers_on(run.model, stage))
    reached = reached_layers(run, stage)
    return layer + 1 >= reached[0] if reached else stage.last and layer == layers_on(run.model, stage)[-1]


def _replicated(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the gradients of parameters that all tp ranks have whole: each rank computed a part of the sum."""
    elements = sum(math.prod(cut.mine) for _, parameter, cut in _trained(plan, run, rank) if parameter.tp_dim is None)
    yield Collective("tp", "all_reduce", DTYPE_BYTES[plan.weights] * elements, plan.tp)


def _lengths(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the squared lengths of rows, with DoRA's update and without, of which tp ranks have parts."""
    microbatches = _rows(plan, run, rank) // plan.microbatch
    for stage in stages_on(plan, run, rank).values():
        again, table = _recomputed(plan, run, stage), run_table(run, stage, plan.tp)
        for name, lengths in table.items():
            if name.endswith(".magnitude") and table[f"{name.removesuffix('magnitude')}a"].tp_dim is not None:
                times = microbatches * (1 + (int(name.split(".")[1]) in again))
                size = 2 * LENGTH_BYTES * math.prod(local_shard_of(lengths, plan, rank).local)
                yield Collective("tp", "all_reduce", times * size, plan.tp)


def _tied_ends(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the gradient of an embedding that the first and the last stage hold."""
    if run.model.embeds_at_both_ends and plan.pp > 1 and not SCHEDULES[plan.schedule].v_shaped:
        elements = sum(math.prod(cut.mine) for name, _, cut in _trained(plan, run, rank) if name == "embedding.weight")
        yield Collective(ENDS, "all_reduce", DTYPE_BYTES[plan.weights] * elements, 2)


def _tensor(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield hidden states before a layer's first matmul, and sums after its last; in backward the other way."""
    tokens, e = _tokens(plan, run, rank), DTYPE_BYTES[plan.precision]
    hidden = e * tokens * run.model.width
    for stage in stages_on(plan, run, rank).values():
        again, reached, table = _recomputed(plan, run, stage), reached_layers(run, stage), run_table(run, stage)
        layers = (*layers_on(run.model, stage), *reached, *again)  # forward, backward, recompute
        both_ways = sum(_gatherings(run.model, layer) for layer in layers)
        # A mixture needs its sum, to weight it, a norm or scale behind it too; async_tp's last product has it inside.
        has_more = "mlp_post_norm" in NORMS_OF_PLACE[run.model.norms.place] or run.model.layer_scale
        is_inside = plan.async_tp or has_more
        last_sums = sum(not (run.model.is_moe_layer(layer) or is_inside) for layer in again)
        # Around the blocks: the embedding's sum, the last norm's gathering, and their backwards.
        into_embedding = stage.first and table["embedding.weight"].is_trained
        out_of_norm = stage.last and (bool(reached) or table["norm.weight"].is_trained)
        # The same around each block of multi-token prediction.
        further = run.model.mtp.modules * stage.last
        embeds = further and further * table["embedding.weight"].is_trained
        gathers = both_ways + stage.last + into_embedding + further + embeds
        yield Collective("tp", "all_gather", hidden * gathers, plan.tp)
        sums = both_ways - last_sums + stage.first + out_of_norm + 2 * further
        sums -= stage.first and bool(reached) and run.lora.rank > 0  # nothing is trained before the first adapter
        yield Collective("tp", "reduce_scatter", hidden * sums, plan.tp)
        if stage.last:
            yield Collective("tp", "all_gather", 8 * plan.tp * tokens * (1 + further), plan.tp)


def _gatherings(model: ModelConfig, layer: int) -> int:
    """Return how often a block's forward gathers hidden states over tp ranks, and as often sums them."""
    has_shared = model.is_moe_layer(layer) and model.moe.shared_experts > 0
    return 3 if has_shared else 2


def _context(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the exchange of attention with other cp ranks."""
    n, e, model, tokens = plan.cp, DTYPE_BYTES[plan.precision], run.model, _tokens(plan, run, rank)
    streams = int(Workload.of_model(model, 1, 1).delta_streams) // plan.tp
    for stage in stages_on(plan, run, rank).values():
        repeated, reached = set(_recomputed(plan, run, stage)), set(reached_layers(run, stage))
        for layer in layers_on(model, stage):
            spec, back, again = layer_spec(model, layer), layer in reached, layer in repeated
            width = model.mla.key_width if model.mla.kv_rank else spec.core_width
            heads, kv_heads = spec.heads // plan.tp, max(1, spec.kv_heads // plan.tp)
            times, kv = 1 + back + again, 2 * kv_heads * width
            if spec.delta_net:
                yield Collective("cp", "all_to_all", times * streams * tokens * e, n)
            elif plan.context == "ulysses":
                yield Collective("cp", "all_to_all", times * 2 * (heads + max(kv_heads, n)) * width * tokens * e, n)
            elif spec.window:  # only the tokens before a rank's chunks travel, and their gradients
                halo = halo_tokens(place_of(rank, plan)["cp"], n, run.data.seq_len // (2 * n), spec.window)
                sent = times * kv * _rows(plan, run, rank) * halo * e  # none of it to the rank itself
                yield Collective("cp", "all_to_all", sent * n // max(1, n - 1), n)
            else:
                around = 1 + back + (again and plan.recompute == "full")
                yield Collective("cp", "send", (around * (n - 1) * e + back * n * KV_GRADIENT_BYTES) * kv * tokens, n)


def _pipeline(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield hidden states to the next stage, and their gradients to the one before, if these are on other ranks."""
    if plan.pp == 1:
        return
    hidden = DTYPE_BYTES[plan.precision] * _tokens(plan, run, rank) // plan.tp * run.model.width
    turns_here = SCHEDULES[plan.schedule].v_shaped and place_of(rank, plan)["pp"] == plan.pp - 1
    for stage in stages_on(plan, run, rank).values():
        boundaries = (not stage.first) + (not stage.last) - turns_here
        yield Collective("pp", "send", hidden * boundaries, plan.pp)


def _experts(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield tokens to their experts and back, and again in backward, for an even load, with their routing data."""
    model, moe, e = run.model, run.model.moe, DTYPE_BYTES[plan.precision]
    rows = _rows(plan, run, rank)
    pairs = _tokens(plan, run, rank) * moe.experts_per_token
    for stage in stages_on(plan, run, rank).values():
        layers, again, back = (
            sum(model.is_moe_layer(layer) for layer in some)
            for some in (layers_on(model, stage), _recomputed(plan, run, stage), reached_layers(run, stage))
        )
        yield Collective("ep", "all_to_all", 2 * (layers + back + again) * pairs * model.width * e, plan.ep)
        counts = rows // plan.microbatch * moe.experts * (1 + plan.overlap_experts)
        yield Collective("ep", "all_to_all", (layers + again) * counts * INDEX_BYTES, plan.ep)
        routing = INDEX_BYTES + ROUTING_WEIGHT_BYTES
        yield Collective("tp", "all_gather", (layers + again) * pairs * routing, plan.tp)
        yield Collective("tp", "reduce_scatter", back * pairs * ROUTING_WEIGHT_BYTES, plan.tp)
        for axis, ranks in (("tp", plan.tp), ("cp", plan.cp)):
            if moe.balance != "none" and moe.aux_coefficient:  # how often each row chose each expert
                yield Collective(axis, "all_reduce", (layers + again) * rows * moe.experts * INDEX_BYTES, ranks)
            if moe.capacity_factor:  # which experts the row's other tokens chose
                gathered = pairs * (plan.cp if axis == "cp" else 1)
                yield Collective(axis, "all_gather", (layers + again) * gathered * INDEX_BYTES, ranks)


def _muon(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield momenta of cut matrices, gathered cut by cut; and each rank's results, to all that need them.

    Stacks of experts that are cut only between the experts stay on their rank.
    """
    for name, parameter, cut in _trained(plan, run, rank):
        if settings_of(name, parameter.shape, run.optimizer).rule != "muon":
            continue
        is_dealt, is_stack = is_dealt_out(parameter, plan), len(parameter.shape) > 2
        is_matrix_cut = (parameter.tp_dim is not None and plan.tp > 1) or (cut.ranks > 1 and not is_stack)
        if is_matrix_cut:
            yield Collective(
                "expert_shard" if is_dealt else "shard", "all_gather", MOMENTUM_BYTES * cut.ranks * cut.chunk, cut.ranks
            )
            yield from _gathered_outer(parameter, cut, plan)
        if is_matrix_cut or not (is_dealt or cut.ranks > 1):
            yield Collective(
                STAGE, "broadcast", MOMENTUM_BYTES * math.prod(parameter.shape), plan.world_size // plan.pp
            )


def _gathered_outer(parameter: Parameter, cut: LocalShard, plan: Plan) -> Iterator[Collective]:
    """Yield the gathering of tensor and expert cuts; ZeRO 1 and 2 undo them in opposite order (`parallel.pieces`)."""
    shape = list(cut.local)
    for axis in ("tp", "ep") if plan.zero in (1, 2) else ("ep", "tp"):
        ranks, dim = (plan.ep, 0) if axis == "ep" else (plan.tp, parameter.tp_dim)
        if dim is None or (axis == "ep" and not parameter.is_expert):
            continue
        padded = [ranks * -(-parameter.shape[d] // ranks) if d == dim else size for d, size in enumerate(shape)]
        yield Collective(axis, "all_gather", MOMENTUM_BYTES * math.prod(padded), ranks)
        shape[dim] = parameter.shape[dim]


def _everyone(plan: Plan, run: RunConfig, rank: int) -> Iterator[Collective]:
    """Yield the joint decision of all ranks, and the experts' loads."""
    yield Collective(WORLD, "all_reduce", LOSS_BYTES, plan.world_size)
    if run.model.moe.experts:
        loads = run.model.all_layers * (2 * run.model.moe.experts + 1)
        yield Collective(WORLD, "all_reduce", 8 * loads, plan.world_size)


def _tokens(plan: Plan, run: RunConfig, rank: int) -> int:
    """Return the tokens of a cp rank in a whole step, those of all its tp ranks together."""
    return _rows(plan, run, rank) * run.data.seq_len // plan.cp


def _rows(plan: Plan, run: RunConfig, rank: int) -> int:
    """Return the rows of a step on the rank's data-parallel rank."""
    rows = plan.rows_of(dp_rank_of(rank, plan), run.train.global_batch)
    return rows.stop - rows.start


def _recomputed(plan: Plan, run: RunConfig, stage: Stage) -> list[int]:
    if plan.recompute == "none":
        return []
    return [layer for layer in reached_layers(run, stage) if layer % plan.recompute_every == 0]
