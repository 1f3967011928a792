"""The exact memory of the state: bytes of parameters, gradients and optimizer moments that each rank holds.

All is arithmetic on the table of parameters (`plan.parameters`). With n ranks that share the state (dp_shard x cp),
N elements of a parameter on one tensor-parallel rank, w bytes of a weight (4, or 2 with weights=bf16) and m moments
(AdamW 2, Lion and Muon 1) it takes

    zero   parameters   gradients     moments
    0      w N          w N           4 m N
    1      w N          w N + w N/n   4 m N/n
    2      w N          w N/n         4 m N/n
    3      w N/n        w N/n         4 m N/n

(Rajbhandari et al. 2020, with fp32 weights that are their own master copy.) Of a parameter that is frozen there are
neither gradients nor moments. Stage 1 holds sums beside what backward
left. Parameters are cut along dim 0 into n chunks of ceil(rows/n) rows; the last ones may be smaller, or empty, and
buffers of gradients and of stage 3 are padded to the full chunk. All of this is counted: the tests hold the figures
to what ranks really hold, byte for byte. What lives inside a step is not counted: activations, one bucket
of gradients, and the blocks that stage 3 gathers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from argosy.config.optimizer import OPTIMIZERS, OptimizerConfig, settings_of
from argosy.config.schema import RunConfig
from argosy.plan.parameters import Parameter, Stage, run_table
from argosy.plan.pipeline import split_layers
from argosy.plan.plan import FP8, MESH_AXES, Plan
from argosy.plan.quantities import numbers_of

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2} | dict.fromkeys(FP8, 2)
"""Bytes of an element that is stored or sent, by the plan's word: fp8 is for matmuls only, all around them is bf16."""
FACTOR_BYTES = 2
"""Bytes of the factor of a row that is gathered in fp8."""
INT8_BLOCK = 256
"""Elements of a row that share one fp32 scale."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds between backward and the optimizer's step."""

    parameters: int
    gradients: int
    optimizer: int
    """Moments, on the device or wherever `plan.offload` keeps them."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class LocalShard:
    """One parameter on one rank: its local shard, and the ranks that share it."""

    local: tuple[int, ...]
    """The shape that tensor and expert parallelism leave."""
    ranks: int
    """Ranks that share this shape (the n of ZeRO); 1 for stage 0."""
    replicas: int
    """Replicas of what these ranks share."""
    rank: int
    """Place of this rank among them."""

    @property
    def numel(self) -> int:
        """Elements on all of these ranks together."""
        return math.prod(self.local)

    @property
    def chunk(self) -> int:
        """Elements of one rank's share, padded to the size of the largest share."""
        return -(-self.local[0] // self.ranks) * math.prod(self.local[1:])

    @property
    def mine(self) -> tuple[int, ...]:
        """Shape of this rank's share, without padding."""
        return (_chunk_of(self.local[0], self.ranks, self.rank), *self.local[1:])

    def in_bytes(self, parameter: Parameter, plan: Plan, run: RunConfig) -> LocalShard | None:
        """Return the shard of a quantised parameter as it is held (`lora.base`), with bytes in its last dim; None if
        it is not quantised."""
        if not (run.lora.is_quantised and parameter.is_linear):
            return None
        columns = parameter.shape[-1]
        if parameter.tp_dim == len(parameter.shape) - 1:
            columns = -(-columns // plan.tp)  # ranks with fewer have as many bytes
        return replace(self, local=(*self.local[:-1], run.lora.row_bytes(columns)))

    def gathered_bytes(self, parameter: Parameter, plan: Plan, run: RunConfig) -> int:
        """Return the bytes of the whole as ZeRO 3 gathers it, padding included."""
        if (packed := self.in_bytes(parameter, plan, run)) is not None:
            return self.ranks * packed.chunk
        if plan.fp8_gather and parameter.is_linear and self._fits_fp8(plan):
            return self.numel + FACTOR_BYTES * self.numel // self.local[-1]
        element = DTYPE_BYTES[plan.weights if plan.precision == "fp32" else plan.precision]
        return element * self.ranks * self.chunk

    def _fits_fp8(self, plan: Plan) -> bool:
        """Return True if the rank's part of a matrix is multiplied in fp8, and ranks share its rows evenly."""
        sides = self.local[-2:]
        return all(side % FP8[plan.precision] == 0 for side in sides) and self.local[0] % self.ranks == 0


def state_bytes(plan: Plan, run: RunConfig, rank: int = 0) -> StateBytes:
    """Return the bytes of the state on global rank `rank` when gradients have been summed; exact, padding included."""
    parameters = gradients = optimizer = 0
    moments = moments_of(run)
    seen: set[str] = set()  # the first rank of a V-shaped pipeline has a tied embedding twice, and updates it once
    for stage in stages_on(plan, run, rank).values():
        for name, parameter in run_table(run, stage, plan.tp).items():
            cut = local_shard_of(parameter, plan, rank)
            w = DTYPE_BYTES[weight_format(name, parameter, plan, run)]
            held, each = cut.in_bytes(parameter, plan, run), 1
            if held is None:
                held, each = cut, w
            parameters += each * (held.chunk if plan.zero == 3 else held.numel)
            if not parameter.is_trained:
                continue
            gradients += w * _gradient_elements(cut, plan)
            optimizer += 0 if name in seen else moment_bytes(name, parameter.shape, cut.mine, run.optimizer, moments)
            seen.add(name)
    return StateBytes(parameters, gradients, optimizer)


def weight_format(name: str, parameter: Parameter, plan: Plan, run: RunConfig) -> str:
    """Return how a parameter is stored: as `plan.weights` says; the matrices beside an adapter in 16 bits, if they are
    multiplied so: casting them once or each time gives the same numbers. A router is multiplied in fp32."""
    is_base = run.lora.rank and not parameter.is_adapter and len(parameter.shape) > 1 and ".router." not in name
    return "bf16" if is_base and plan.precision in ("bf16", *FP8) else plan.weights


def _gradient_elements(cut: LocalShard, plan: Plan) -> int:
    if cut.ranks == 1:
        return cut.numel
    # Gradients that are summed in another dtype are cast piece by piece, without the padding; FSDP2 casts it too.
    # Where FSDP2's sums go on over replicas, buffers are ours, and hold what it has cut, unpadded.
    is_padded = not plan.sums_beside_fsdp if plan.zero == 3 else plan.reduce == plan.weights
    share = cut.chunk if is_padded else math.prod(cut.mine)
    return share + (cut.numel if plan.zero == 1 else 0)


def moments_of(run: RunConfig) -> Mapping[str, int]:
    """Return how many moments each optimizer keeps of a parameter, those of the user's included."""
    return OPTIMIZERS | {name: len(d.facts["moments"]) for name, d in run.extend.declared("optimizer").items()}


def moment_bytes(
    name: str,
    shape: tuple[int, ...],
    mine: tuple[int, ...],
    config: OptimizerConfig,
    moments: Mapping[str, int] = OPTIMIZERS,
) -> int:
    """Return the bytes of optimizer state for the part `mine` of a parameter of `shape`: 4 for each element and moment.

    With state = "int8", matrices take 1 byte an element and 4 for each block of 256 elements of a row.
    """
    settings = settings_of(name, shape, config)
    elements = math.prod(mine)
    if not elements:
        return 0
    rows = math.prod(mine[:-1])
    each = elements + 4 * rows * -(-mine[-1] // INT8_BLOCK) if settings.int8 else 4 * elements
    return moments[settings.rule] * each


def local_shard_of(parameter: Parameter, plan: Plan, rank: int) -> LocalShard:
    """Return the local shard of `parameter` on global rank `rank`."""
    at = place_of(rank, plan)
    local = list(parameter.shape)
    if parameter.tp_dim is not None:
        local[parameter.tp_dim] = _chunk_of(local[parameter.tp_dim], plan.tp, at["tp"])
    shards, replicas, among = plan.shares_state, plan.replicas, at["dp_shard"] * plan.cp + at["cp"]
    if parameter.is_expert:
        local[0] //= plan.ep
        shards, replicas, among = plan.shares_experts, plan.expert_replicas, among // plan.ep
    return LocalShard(tuple(local), shards, replicas, among if shards > 1 else 0)


def place_of(rank: int, plan: Plan) -> dict[str, int]:
    """Return the rank's coordinate along each axis of the mesh; the last axis varies fastest."""
    place = {}
    for axis in reversed(MESH_AXES):
        rank, place[axis] = divmod(rank, getattr(plan, axis))
    return place


def dp_rank_of(rank: int, plan: Plan) -> int:
    """Return the place of global rank `rank` among the data-parallel ranks."""
    at = place_of(rank, plan)
    return at["dp_replicate"] * plan.dp_shard + at["dp_shard"]


def stages_on(plan: Plan, run: RunConfig, rank: int) -> dict[int, Stage]:
    """Return the pipeline stages of global rank `rank` by their numbers, in the model's order."""
    if plan.pp == 1:
        return {0: Stage(range(run.model.layers))}
    if plan.layers:
        ends = [0, *accumulate(numbers_of(plan.layers))]
        layers = tuple(range(first, end) for first, end in pairwise(ends))
    else:
        layers = split_layers(run.model, run.data.seq_len, plan.stages)
    return {
        stage: Stage(layers[stage], first=stage == 0, last=stage == plan.stages - 1)
        for stage in plan.stages_of(place_of(rank, plan)["pp"])
    }


def _chunk_of(size: int, ranks: int, rank: int) -> int:
    """Return how many of `size` rows are one rank's: chunks of ceil(size/ranks), the last ones smaller, or empty."""
    chunk = -(-size // ranks)
    return max(0, min(chunk, size - rank * chunk))
