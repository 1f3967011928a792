"""The Plan: how one job is laid out over devices. The planner predicts it, the trainer runs it exactly."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError

from argosy.config.lines import read_table
from argosy.config.problems import KeyPlace, problem_of
from argosy.config.schema import RunConfig
from argosy.config.section import Section
from argosy.errors import UserError
from argosy.files import atomic_write
from argosy.plan.pipeline import SCHEDULES, SPLITTING, Schedule
from argosy.plan.quantities import Quantities, checked, lowest, numbers_of
from argosy.plan.sync import COMPRESSED, FAITHFUL, USUAL_OF_SITES, WITH_SERVERS, Sync

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8"]
FP8: dict[Precision, int] = {"fp8": 16, "fp8_rowwise": 16, "fp8_blockwise": 128, "mxfp8": 32}
"""Matmuls in eight bits: with one scale for a whole matrix, one for each of its rows, one for 128 numbers of a row and
for 128 x 128 of a weight, or one for 32 numbers of a row. Both sides of a rank's share of a matrix are multiples of
these numbers: others are multiplied in bf16."""
FP8_CORES = (8, 9)
"""CUDA compute capability of the first devices with fp8 (Ada; Hopper is 9.0)."""
HOPPER = (9, 0)
"""Capability of the only devices with `F.scaled_grouped_mm` in fp8 by rows, of which torch 2.13 tests no others, and
with `F.scaled_mm` by blocks, which cuBLAS has for no others."""
MXFP8_CORES = 10
"""The major number of that of devices whose matmuls take a scale for each 32 numbers in fp8 (B200, B300)."""


def measured_format(precision: str) -> str:
    """Return the number format of the matmuls that measure a device for a plan in `precision`: those in fp8 need
    matrices in a special layout, and bf16's go through the same parts of a GPU."""
    return "bf16" if precision in FP8 else precision


def why_not_in_fp8(
    precision: str, capability: tuple[int, int], is_amd_with_fp8: bool, has_experts: bool, who: str, others: str
) -> str | None:
    """Explain why a device cannot multiply as a plan's `precision` (one of `FP8`) says; return None if it can: one rule
    for the planner, which has the catalogue, and for the start, which asks the driver.

    capability: of CUDA; (0, 0) of other devices. who: the device in words. others: precisions that it has.
    """
    has_fp8 = is_amd_with_fp8 or capability >= FP8_CORES
    where = f"{who} (compute capability {capability[0]}.{capability[1]})" if any(capability) else who
    hopper = "a GPU of compute capability 9.0 (Hopper), the only one for which torch multiplies {} in fp8"
    if precision == "mxfp8" and capability[0] != MXFP8_CORES:
        needs, others = "a GPU of compute capability 10 (B200, B300)", "fp8_rowwise" if has_fp8 else others
    elif precision == "fp8_blockwise" and capability != HOPPER:
        needs, others = hopper.format("by blocks"), "fp8_rowwise" if has_fp8 else others
    elif not has_fp8:
        needs = "a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), or AMD's from CDNA 3 on"
    elif has_experts and capability != HOPPER:
        precision, needs = f"{precision} with experts", hopper.format("them")
    else:
        return None
    return f"plan.precision = {precision} needs {needs}; this one is {where}. Try precision={others}."


Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "activations", "optimizer", "all"]
Objective = Literal["time", "cost", "energy", "goodput"]
"""The quantity that plans are ranked by."""

Ratio = Annotated[str, BeforeValidator(str), AfterValidator(checked)]
"""Whole numbers joined by colons, such as 3:1; empty: nothing is said, and all get as much."""

NOT_OF_SITES = (
    "plan.sync = {}, and the run has [[sites]]: sites agree by sync=diloco, sync=local or sync=async. "
    "Leave sync out for diloco."
)
NO_WORKERS = (
    "plan.sync = async, and the run has no [[sites]]: they are its workers. Name two or more (docs/async.md), or leave "
    "sync out."
)

PLAN_VARIABLE = "ARGOSY_PLAN"
"""Environment variable: the plan that a fork server prepares itself for (`parallel.apply.load`)."""
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh axes, outermost first; their product is the number of processes. `ep` is laid over dp and cp."""
MESH = (*MESH_AXES, "ep")
TOO_LARGE = re.compile(r"\d{10}")
"""In a value of a plan: products of such numbers are beyond arrays of whole numbers."""
OTHER_NAMES = {
    "dp_shard": "fsdp hsdp data_parallel_shard_degree",
    "dp_replicate": "ddp data_parallel_replicate_degree",
    "tp": "sp sequence_parallel tensor_parallel_degree tensor_model_parallel_size",
    "cp": "context_parallel_degree context_parallel_size",
    "pp": "pipeline_parallel_degree pipeline_model_parallel_size",
    "ep": "expert_parallel_degree expert_model_parallel_size",
    "stages_per_rank": "vpp vp",
    "microbatch": "mbs micro_batch_size local_batch_size",
    "recompute": "activation_checkpoint gradient_checkpointing ac",
    "precision": "dtype bf16 fp8",
}
"""Key of a plan -> other programs' names of it."""
NUMERICS = ("precision", "weights", "reduce", "sync", "compile")
"""Keys of a plan that change the numbers of training; the others change only the order in which numbers are summed."""


class Plan(Section, Quantities[int]):
    """One complete layout. It is also a string (`str` and `parse`): "dp_replicate=2,microbatch=4,precision=bf16"."""

    pp: PositiveInt = 1
    """Pipeline stages, or ranks that hold several stages each."""
    dp_replicate: PositiveInt = 1
    """Data-parallel replicas that hold the whole state."""
    dp_shard: PositiveInt = 1
    """Data-parallel ranks that share one copy of the state; `zero` says which part of it."""
    cp: PositiveInt = 1
    """Context-parallel ranks that share a sequence; with those of dp_shard they also share the state."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks that share each matrix, and between matrices the tokens (sequence parallelism)."""
    async_tp: bool = False
    """True if tokens travel between tensor-parallel ranks under the products that need them, rank by rank."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, laid over the dp_shard and cp ranks."""
    overlap_experts: bool = False
    """True if tokens go to their experts in two halves: while one travels, the experts of the other are computed."""
    zero: Annotated[int, Field(ge=0, le=3)] = 3
    """State that dp_shard x cp ranks share: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too (FSDP2)."""
    user_buffers: bool = False
    """True if FSDP2's messages lie in memory that NCCL allocates and registers; elsewhere without effect."""
    fp8_gather: bool = False
    """True if FSDP2 gathers in fp8 the weights that are multiplied in fp8."""
    schedule: Schedule = "1f1b"
    """Order of the microbatches in the pipeline."""
    stages_per_rank: PositiveInt = 2
    """Pipeline stages on each rank under an interleaved schedule (the other schedules fix it)."""
    context: Literal["ring", "ulysses"] = "ring"
    """Attention over cp ranks: pass keys and values round a ring, or exchange heads for tokens."""
    recompute: Recompute = "none"
    """Activations computed again in backward: none, the cheap ones (selective), or all of a layer (full)."""
    recompute_every: PositiveInt = 1
    """Recompute in every n-th layer only."""
    offload: Offload = "none"
    """State kept in host memory while it is not needed."""
    microbatch: PositiveInt = 1
    """Sequences that one data-parallel rank runs through the model at once."""
    shares: Ratio = ""
    """Microbatches of a step, in proportion: a number for each data-parallel rank, or for each of as many equal blocks
    of neighbours; 3:1 gives each rank of the first half three times as many as one of the other. Empty: all alike."""
    layers: Ratio = ""
    """Layers of each pipeline stage, in the model's order: 5:3 of 8. Empty: dealt out by cost (`split_layers`)."""
    precision: Precision = "fp32"
    """Number format of the model's arithmetic; fp8: of matmuls, with a scale for each matrix, (rowwise) each row,
    (blockwise) 128 numbers of a row and 128 x 128 of a weight, or (mxfp8) each 32 numbers."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Number format of the weights that the optimizer updates; bf16 ones are rounded stochastically."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are summed over ranks."""
    sync: Sync = "exact"
    """The way replicas agree on a step: exact sums of gradients, or sums that send fewer bytes."""
    sum_inside: PositiveInt = 1
    """Replicas next to each other (of a node, or a site) that sum among themselves first, exactly; 1: all at once."""
    sum_between: PositiveInt = 1
    """Groups of them (nodes of a site) that sum next; what is left, 1/(sum_inside x sum_between), goes further."""
    bucket_mb: Annotated[int, Field(ge=1, le=1024)] = 4
    """Gradients that are summed in one message, MiB."""
    compile: bool = True
    """True if blocks and loss go through torch.compile."""

    def __str__(self) -> str:
        """Write the axes that are not 1, and what `auto` would otherwise choose; `parse` reads the same plan."""
        said = self.model_dump(exclude_defaults=True) | self.model_dump(include={"microbatch", "precision"})
        words = [f"{key}={word_of(said[key])}" for key in type(self).model_fields if key in said]
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a plan from `text`; axes that it does not name are 1.

        Raises: UserError for an unknown key or a value out of range.
        """
        return cls.from_words(words_of(text))

    @classmethod
    def from_words(cls, words: dict[str, str]) -> Self:
        """Make a plan from keys and values, as `words_of` gives them. Raises: UserError."""
        for key, word in words.items():
            if key not in cls.model_fields:
                longer = [name for name in cls.model_fields if name.startswith(f"{key}_")]
                known = {name: [here] for here, names in OTHER_NAMES.items() for name in names.split()}
                near = longer or known.get(key) or difflib.get_close_matches(key, cls.model_fields, n=1)
                hint = f"did you mean {' or '.join(near)}?" if near else f"the keys are: {', '.join(cls.model_fields)}."
                raise UserError(f"plan: unknown key {key!r}; {hint}")
            if TOO_LARGE.search(word):
                raise UserError(f"plan.{key} = {word}: numbers of ten digits or more are of no plan. Lower it.")
        try:
            return cls.model_validate({key: _number(word) for key, word in words.items()})
        except ValidationError as error:
            problems = [problem_of(e, cls, lambda key: KeyPlace("plan.")) for e in error.errors()]
            raise UserError("\n".join(map(str, problems))) from None

    @property
    def fixed_stages(self) -> int:
        """Stages on each rank that the schedule demands; 0: as many as the plan says."""
        return SCHEDULES[self.schedule].stages_per_rank or 0

    @property
    def shares_of_ranks(self) -> tuple[int, ...]:
        """Portions of a batch that each data-parallel rank takes."""
        numbers = lowest(numbers_of(self.shares)) or (1,)
        return tuple(number for number in numbers for _ in range(self.dp // len(numbers)))

    @property
    def holders_of_shares(self) -> int:
        """Number of holders of shares: replicas, or the data-parallel ranks of the only one."""
        if self.dp_replicate > 1:
            return self.dp_replicate
        return 1 if self.shards_parameters or self.ep > 1 else self.dp

    def rows_of(self, dp_rank: int, batch: int) -> slice:
        """Return the rows of a batch of so many that a data-parallel rank trains on.

        A batch is cut into equal portions, as many as the shares add up to, and each rank takes the next of them. So
        which samples are in a step does not depend on the shares, and neither does their order.
        """
        shares, portion = self.shares_of_ranks, batch // self.portions
        first = sum(shares[:dp_rank]) * portion
        return slice(first, first + shares[dp_rank] * portion)

    def microbatches_of(self, dp_rank: int, batch: int) -> int:
        """Return how many microbatches of a batch of so many rows a data-parallel rank runs."""
        rows = self.rows_of(dp_rank, batch)
        return (rows.stop - rows.start) // self.microbatch

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages that a pipeline rank holds, in the order of the model."""
        if self.pp > 1 and SCHEDULES[self.schedule].v_shaped:
            return [pp_rank, self.stages - 1 - pp_rank]
        return list(range(pp_rank, self.stages, self.pp))

    @property
    def layers_of_ranks(self) -> tuple[int, ...]:
        """Layers of each pipeline rank, where `layers` says which stage has which; else none."""
        of_stages = numbers_of(self.layers)
        if len(of_stages) != self.stages or self.pp == 1:
            return ()
        return tuple(sum(of_stages[stage] for stage in self.stages_of(rank)) for rank in range(self.pp))

    def numbers(self, key: str) -> list[tuple[bool, tuple[int, ...]]]:
        """Return the numbers of a ratio, with True as the mask of `Layouts.numbers`; none if nothing is said."""
        return [(True, numbers_of(text))] if (text := getattr(self, key)) else []

    @property
    def is_compressed(self) -> bool:
        return self.sync in COMPRESSED

    @property
    def has_servers(self) -> bool:
        """True if it is the plan of a worker, which agrees with others through parameter servers."""
        return self.sync in WITH_SERVERS

    @property
    def sums_in_tiers(self) -> bool:
        """True if replicas sum among neighbours first."""
        return self.sum_inside > 1

    @property
    def sums_beside_fsdp(self) -> bool:
        """True if the sum over replicas is ours, and FSDP2, where it splits parameters, knows of one replica only."""
        return self.is_compressed or self.sums_in_tiers

    def inner_tiers(self, is_dealt: bool = False) -> tuple[int, int]:
        """Return how many replicas sum inside, and how many groups of them between, before the rest.

        is_dealt: those of experts that ep ranks share: with stage 0, ep of the replicas next to each other have other
        experts.
        """
        inside, unit = self.sum_inside, self.sum_inside * self.sum_between
        if is_dealt and self.zero == 0:
            inside, unit = max(1, inside // self.ep), max(1, unit // self.ep)
        return inside, unit // inside

    def is_(self, key: str, *words: object) -> bool:
        """Return True if `key` has one of these values."""
        return getattr(self, key) in words

    def save(self, path: Path, prediction: str = "") -> None:
        """Write the plan as TOML, atomically, and below it its `prediction` (`plan.cost.prediction`)."""
        lines = [f"{key} = {_toml(value)}" for key, value in self.model_dump().items()]
        with atomic_write(path) as file:
            file.write(("\n".join([*lines, "", prediction]).rstrip() + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        table = read_table(path)
        table.pop("prediction", None)
        return cls.model_validate(table)

    def with_shares_in(self, run_dir: Path) -> Self:
        """Return this plan with the shares of the folder's plan.toml, which ranks have come to by themselves
        (`training.services.rebalance`), if that differs in nothing else."""
        path = run_dir / "plan.toml"
        said = self.load(path) if path.exists() else self
        return said if said.model_copy(update={"shares": self.shares}) == self else self


def check_can_estimate(run: RunConfig, plan: Plan) -> None:
    """Raises: UserError if observe.noise_scale_every_steps cannot be had under `plan`."""
    if not run.observe.noise_scale_every_steps:
        return
    asked = f'observe.noise_scale_every_steps = {run.observe.noise_scale_every_steps} with plan = "{plan}"'
    if plan.is_compressed and plan.sync not in FAITHFUL:
        raise UserError(f"{asked}: {plan.sync} changes the norm of the sum. Try sync=exact, bf16 or int8, or 0 here.")
    if not plan.has_own_gradients:
        why = "no rank has a gradient of its own under cp, ep and zero=3, and that of a single microbatch"
        if plan.pp > 1:
            raise UserError(f"{asked}: {why} is not known with a pipeline. Try pp=1, or 0 here.")
        if plan.is_compressed:
            raise UserError(f"{asked}: {why} would be compressed as well. Try sync=exact, or 0 here.")
        if plan.microbatches(run.train.global_batch) == 1:
            raise UserError(f"{asked}: {why} is that of the whole batch. Try a smaller microbatch, or 0 here.")
    if run.train.objective != "pretrain":
        raise UserError(f"{asked}: it compares parts that have as many tokens, and answers differ. Set 0 here.")
    if plan.pp > 1 and plan.schedule in SPLITTING:
        raise UserError(f"{asked}: {plan.schedule} splits backward. Try schedule=1f1b, or 0 here.")
    if plan.dp == 1 and plan.microbatches(run.train.global_batch) == 1:
        raise UserError(
            f"{asked}: it takes two parts of a batch, and there is one rank with one microbatch. Try a smaller "
            "microbatch, or 0 here."
        )


def words_of(text: str, named: str = "plan =") -> dict[str, str]:
    """Split `"auto,precision=fp32"` into {"auto": "", "precision": "fp32"}; `named`: the key or option that says so.

    Raises: UserError for a word without =, or for a key that occurs twice.
    """
    words: dict[str, str] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals and key != "auto":
            raise UserError(f'{named} "{text}": {word!r} is neither "auto" nor KEY=VALUE, such as tp=2.')
        if equals and key == "auto":
            raise UserError(f'{named} "{text}": auto takes no value. Write "auto".')
        if key in words:
            raise UserError(f'{named} "{text}": {key} is given twice. Keep one.')
        words[key] = value
    return words


class ParsedPlan(NamedTuple):
    """A plan as a run file has it: what it says, and what it leaves open."""

    words: dict[str, str]
    """Keys and values."""
    is_auto: bool
    """True if it says `auto`: the planner chooses all other keys but `sync`."""
    sync_is_open: bool
    """True if it says `sync=auto`: the planner chooses how replicas, or sites, agree."""


def said_in(text: str) -> ParsedPlan:
    """Read what `"auto,sync=auto,tp=2"` says. Raises: UserError, as `words_of`."""
    words = words_of(text)
    is_auto, sync_is_open = words.pop("auto", None) is not None, words.get("sync") == "auto"
    return ParsedPlan(
        {key: word for key, word in words.items() if key != "sync" or not sync_is_open}, is_auto, sync_is_open
    )


def with_sync(text: str, word: str) -> str:
    """Return a plan's text with `word` in place of `sync=auto`. Raises: UserError, as `words_of`."""
    said = said_in(text)
    if not said.sync_is_open:
        return text
    words = [f"{key}={value}" for key, value in said.words.items()]
    return ",".join([*(["auto"] if said.is_auto else []), *words, f"sync={word}"])


def way_of_sites(plan: str) -> str:
    """Return the word by which sites agree under a plan, as a run file has it. Raises: UserError, as `words_of`."""
    return said_in(plan).words.get("sync", USUAL_OF_SITES)


def is_asynchronous(plan: str) -> bool:
    """Return True if a plan, as a run file has it, says sync=async. Raises: UserError if it is none."""
    return words_of(plan).get("sync") in WITH_SERVERS


def has_workers(run: RunConfig) -> bool:
    """Return True if the run's [[sites]] are workers of asynchronous training. Raises: UserError, as `words_of`."""
    return bool(run.sites) and is_asynchronous(run.plan)


def _number(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


def word_of(value: object) -> str:
    """Return a value as the text of a plan has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else word_of(value)
