"""Published measurements, read into what the cost model takes: the job, the machine, the software, the layout.

A row leaves cells empty where its source does not say. What the note or the system's documentation says is filled in
here; a layout that nobody published is the best that the planner finds. Rows that cannot be read so are skipped, each
with the reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from systems import system_of

from argosy.errors import UserError
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.rates import Rates, System
from argosy.plan.cost.step_time import StepModel
from argosy.plan.hardware.devices import Device, Format, find_device
from argosy.plan.layouts import Layouts
from argosy.plan.pipeline import Schedule
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload

COLUMNS = (
    "id", "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "moe_experts", "moe_topk", "moe_ffn", "gpu", "n_gpus", "precision", "tp", "sp", "pp", "interleave", "cp",
    "ep", "dp", "zero_stage", "micro_batch", "global_batch", "recompute", "metric", "value", "notes",
)  # fmt: skip
COMPARABLE = ("source", "model", "gpu", "n_gpus", "precision", "global_batch", "seq_len", "metric")
"""Rows that have all of these in common differ in their layout."""
COUNTS_CAUSAL = ("megatron-bridge", "megatron-moe-modelzoo")
"""Sources whose TFLOPS count half of the attention (the latter's step times and TFLOPS agree so)."""
HEAD_WIDTHS = (("gpt-oss", 64.0), ("qwen3", 128.0))
"""Head widths of models whose heads together are not as wide as the hidden state, by the beginning of their names."""
METRICS = ("tokens_per_s_per_gpu", "step_time_s", "tflops_per_gpu", "mfu", "peak_mem_gb")
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement."""

    id: str
    source: str
    model: str
    family: str
    """The publisher: sources of one repository or paper measure alike."""
    group: str
    """Rows of one group differ in layout alone."""
    work: Workload
    device: str
    gpus: int
    narrow: Format
    """The narrow number format in use."""
    nic_bytes_per_s: float | None
    """Network bandwidth of a device, if the source gives it."""
    system: System
    plan: Plan
    open: tuple[str, ...]
    """Keys of the plan that the source leaves open."""
    is_moe: bool
    metric: str
    value: float
    """Seconds of a step, or bytes of peak memory."""
    batch: float
    """Sequences of a step."""
    notes: str

    @property
    def shared(self) -> tuple[str, str]:
        """Keys that a row's error may have in common with others: its source, device and kind of model; its model."""
        return f"{self.source}|{self.device}|{self.section}", f"{self.family}|{self.model}|{self.section}"

    @property
    def job(self) -> str:
        """The job, whatever the release of the software."""
        return f"{self.model}|{self.device}|{self.gpus}|{self.work.seq_len}|{self.batch}|{self.narrow}|{self.plan}"

    @property
    def section(self) -> str:
        """The section that the row is scored in."""
        return "memory" if self.metric == "memory" else "moe_time" if self.is_moe else "dense_time"


def read(path: Path, recipes: bool = True) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return rows, and (id, why) of those that are skipped.

    recipes: fill in what sources say outside of these rows, in recipes and code; without, a row is what its publisher
    would tell a stranger: its cells, its notes, and its framework.
    Raises: UserError for a file that is not in this format.
    """
    try:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (table.fieldnames or [])]
            if missing:
                raise UserError(f"{path}: line 1: no column {', '.join(missing)}. The columns are {','.join(COLUMNS)}.")
            cells = list(table)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}. Give a CSV file of published measurements.") from None
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    for line, cell in enumerate(cells, start=2):
        try:
            rows.append(completed(row_of(cell, recipes), recipes))
        except Skip as why:
            skipped.append((cell["id"], str(why)))
        except (BadCell, UserError) as bad:  # a UserError says that the catalogue lacks the device
            raise UserError(f"{path}: line {line} (id {cell['id']}): {bad}") from None
    return rows, skipped


class Skip(Exception):
    """The row says too little, or contradicts itself."""


class BadCell(Exception):
    """The row is not in the format."""


def row_of(cell: dict[str, str], recipes: bool = True) -> Row:
    if None in cell or any(value is None for value in cell.values()):
        raise BadCell(f"has not {len(COLUMNS)} cells; quote those with commas")
    metric = cell["metric"]
    if metric not in METRICS:
        raise BadCell(f"metric = {metric!r} is none of {', '.join(METRICS)}")
    if recipes:
        cell = _documented(cell, _numbers(cell))
    number = _numbers(cell)
    value = number["value"]
    if value is None or value <= 0:
        raise BadCell(f"value = {cell['value']!r} must be a number above 0")
    device = find_device(cell["gpu"])
    for key in ("layers", "hidden", "heads", "ffn_hidden", "seq_len", "n_gpus"):
        if number[key] is None:
            raise Skip(f"{key} is not known")
    if not cell["precision"]:
        cell = {**cell, "precision": "fp8" if "Megatron-Bridge" in cell["source"] else "bf16"}
    if number["global_batch"] is None:  # a speed does not depend on it much
        counted = re.search(r"micro_num (\d+)", cell["notes"])
        microbatches = int(counted[1]) if counted else 8 * pp if (pp := number["pp"] or 1) > 1 else 1
        number["global_batch"] = (number["dp"] or number["n_gpus"] or 1) * (number["micro_batch"] or 1) * microbatches
    work = _workload(cell, number)
    system = system_of(cell, recipes)
    plan, open_keys = _plan(cell, number, system)
    return Row(
        id=cell["id"],
        source=cell["source"],
        model=cell["model"],
        family=re.split(r"[ ,(]", cell["source"])[0],
        group="|".join(cell[key] for key in COMPARABLE),
        work=work,
        device=cell["gpu"],
        gpus=int(number["n_gpus"] or 0),
        narrow="fp4" if "fp4" in cell["precision"] else "fp8",
        nic_bytes_per_s=_nic(cell["notes"] + cell["source"]),
        system=system,
        plan=plan,
        open=open_keys,
        is_moe=bool(number["moe_experts"]),
        metric="memory" if metric == "peak_mem_gb" else "time",
        value=_measured(value, work, number, cell, device),
        batch=float(work.global_batch),
        notes=cell["notes"],
    )


def _documented(cell: dict[str, str], number: dict[str, float | None]) -> dict[str, str]:
    """Return the row with what its source says elsewhere of all such rows."""
    batch, chips = number["global_batch"], number["n_gpus"]
    if "tpu-recipes" not in cell["source"] or not batch or not chips:
        return cell
    # `run_recipe.sh`: FSDP alone, one microbatch, a long sequence shared, layers recomputed from their inputs.
    cp, microbatch = max(1, round(chips / batch)), max(1, int(batch / chips))
    says = {"tp": 1, "pp": 1, "cp": cp, "ep": 1, "zero_stage": 3, "micro_batch": microbatch, "recompute": "full"}
    return cell | {key: str(word) for key, word in says.items() if not cell[key]}


def _numbers(cell: dict[str, str]) -> dict[str, float | None]:
    words = {"id", "source", "model", "gpu", "precision", "sp", "recompute", "metric", "notes"}
    found: dict[str, float | None] = {}
    for key in COLUMNS:
        if key in words:
            continue
        try:
            found[key] = float(cell[key]) if cell[key].strip() else None
        except ValueError:
            raise BadCell(f"{key} = {cell[key]!r} is not a number") from None
    return found


def _workload(cell: dict[str, str], number: dict[str, float | None]) -> Workload:
    def given(key: str, otherwise: float = 0.0) -> float:
        return otherwise if number[key] is None else float(number[key])  # type: ignore[arg-type]

    name = cell["model"]
    layers, width, heads = given("layers"), given("hidden"), given("heads")
    latent = name.startswith(("deepseek-v3", "kimi"))
    gated = given("ffn_hidden") != 4 * width or name == "palm-540b"  # GPT's are four times as wide, and have no gate
    head_width = next((known for start, known in HEAD_WIDTHS if name.startswith(start)), width / heads)
    seq_len = given("seq_len")
    experts = given("moe_experts")
    moe_layers = 0.0 if not experts else layers - {"deepseek-v3": 3, "kimi-k2": 1}.get(name, 0)
    span = seq_len / 2
    biased = name.startswith("gpt-oss")
    if biased:  # every other layer sees a window of 128 tokens
        span = (span + 128) / 2
    return Workload(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=given("kv_heads", heads) if "kv_heads" in number else heads,
        key_width=192.0 if latent else head_width,
        value_width=128.0 if latent else head_width,
        kv_width=320.0 if latent else 2 * head_width,
        core_width=192.0 if latent else head_width,
        ffn_width=given("ffn_hidden"),
        widest_ffn=given("ffn_hidden"),
        ffn_matrices=3.0 if gated else 2.0,
        vocab_size=given("vocab", 51200.0),
        tied=0.0 if gated else 1.0,
        seq_len=seq_len,
        global_batch=given("global_batch"),
        attention_span=span,
        moe_layers=moe_layers,
        experts=experts,
        experts_per_token=given("moe_topk"),
        expert_ffn_width=given("moe_ffn"),
        shared_ffn_width=given("moe_ffn") if latent else 0.0,
        expert_matrices=3.0 if gated else 2.0,
        expert_biases=float(biased),
        q_rank=1536.0 if latent else 0.0,
        kv_rank=512.0 if latent else 0.0,
        rope_width=64.0 if latent else 0.0,
    )


def _plan(cell: dict[str, str], number: dict[str, float | None], system: System) -> tuple[Plan, tuple[str, ...]]:
    gpus = int(number["n_gpus"] or 0)
    open_keys = [key for key in ("tp", "pp", "micro_batch", "recompute") if not cell[key]]
    tp, pp, cp = (int(number[k] or 1) for k in ("tp", "pp", "cp"))
    if (tp * pp * cp > gpus or gpus % (tp * pp * cp)) and cell["tp"] and cell["pp"]:
        raise Skip(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    said = number["dp"]
    if said is not None and int(said) != dp and "does not always equal" not in cell["notes"]:
        raise Skip(f"tp {tp} x pp {pp} x cp {cp} x dp {int(said)} is not {gpus} GPUs")
    batch = number["global_batch"]
    if batch and dp > batch:
        raise Skip(f"{dp} data-parallel ranks, and a batch of {int(batch)}")
    zero = int(number["zero_stage"] or 0) if cell["zero_stage"] else 1
    interleave = int(number["interleave"] or (2 if "interleaved" in cell["notes"].lower() else 1))
    hybrid = "hsdp" in cell["notes"].lower() and dp % 8 == 0
    precision = "fp8" if "fp8" in cell["precision"] or "fp4" in cell["precision"] else cell["precision"]
    if precision not in ("fp32", "bf16", "fp16", "fp8"):
        raise BadCell(f"precision = {precision!r} is none of fp32, bf16, fp16, fp8, nvfp4")
    microbatch = int(number["micro_batch"] or 1)
    if not cell["micro_batch"] and "torchtitan" in cell["source"] and pp > 1:  # its default: as many as ranks
        microbatch = int((number["global_batch"] or 0) // dp // pp) or 1
        open_keys.remove("micro_batch")
    experts = int(number["moe_experts"] or 0)
    ep = int(number["ep"] or 1) if experts else 1
    if zero == 0:
        replicate, shard = dp, 1
    else:
        replicate, shard = (dp // 8, 8) if hybrid else (1, dp)
    return (
        Plan(
            pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, zero=zero,
            schedule=_schedule(cell, interleave if pp > 1 else 1),
            stages_per_rank=max(1, interleave),
            recompute=cell["recompute"] or "none",
            compile=bool(system.fused),
            microbatch=microbatch,
            precision=precision,
        ),
        tuple(open_keys),
    )  # fmt: skip


def rates_of(row: Row) -> Rates:
    """Return the device of a row, in the network that its source names."""
    return Rates.of_device(find_device(row.device), row.narrow, row.nic_bytes_per_s)


def completed(row: Row, recipes: bool = True) -> Row:
    """Return the row with its open keys chosen as the planner would: the fastest that fits."""
    if not row.open:
        return row
    said, rates = row.plan, rates_of(row)
    choices: dict[str, list[Any]] = {
        "tp": [1, 2, 4, 8] if "tp" in row.open else [said.tp],
        "pp": [1, 2, 4, 8, 16] if "pp" in row.open else [said.pp],
        "micro_batch": [1, 2, 4, 8, 16] if "micro_batch" in row.open else [said.microbatch],
        "recompute": _recomputes(row, recipes) if "recompute" in row.open else [said.recompute],
        "ep": [1, 4, 8, 16, 32, 64] if "tp" in row.open and row.is_moe else [said.ep],
        "zero": [1, 3] if "tp" in row.open else [said.zero],
    }
    plans = []
    for tp, pp, microbatch, recompute, ep, zero in product(*choices.values()):
        dp, left = divmod(row.gpus, tp * pp * said.cp)
        fits_batch = dp and row.batch % (dp * microbatch) == 0
        if left or not (fits_batch or dp == said.dp) or (ep > 1 and (dp % ep or row.work.experts % ep)):
            continue
        mesh = {"dp_replicate": dp, "dp_shard": 1} if zero == 0 else {"dp_replicate": 1, "dp_shard": dp}
        mesh = {"dp_replicate": said.dp_replicate, "dp_shard": said.dp_shard} if dp == said.dp else mesh
        changes = {"tp": tp, "pp": pp, "microbatch": microbatch, "recompute": recompute, "ep": ep, "zero": zero}
        plans.append(said.model_copy(update=changes | mesh))
    if not plans:
        return row
    layouts = Layouts.of(plans)
    time = StepModel(layouts, row.work, rates, row.system, Constants()).predict().total
    memory = MemoryModel(layouts, row.work, row.system, Constants()).predict().total
    too_much = np.maximum(0, memory / (0.94 * rates.memory_bytes) - 1)
    return replace(row, plan=plans[int(np.lexsort((np.asarray(time), too_much))[0])])


def _schedule(cell: dict[str, str], interleave: int) -> Schedule:
    if "deepseek" in cell["source"].lower():  # DualPipe
        return "dualpipev"
    return "interleaved_1f1b" if interleave > 1 else "1f1b"


def _recomputes(row: Row, recipes: bool) -> list[str]:
    """Return the kinds of recompute: NVIDIA's recipes and DeepSeek recompute chosen modules, never all of a layer."""
    chosen = recipes and any(name in row.source for name in ("Megatron-Bridge", "Megatron-MoE-ModelZoo", "DeepSeek"))
    return ["none", "selective"] if chosen else ["none", "selective", "full"]


def _nic(text: str) -> float | None:
    """Return the bytes/s of a device, from "inter-node 800 Gb/s per node" and the like; eight devices to a node."""
    found = re.search(r"(\d+) ?Gb(?:/s|ps)(?: per node|/node| node-node)", text)
    return float(found[1]) / 8 / 8 * 1e9 if found else None


def _measured(
    value: float, work: Workload, number: dict[str, float | None], cell: dict[str, str], device: Device
) -> float:
    """Return the value as seconds of a step, or bytes."""
    metric = cell["metric"]
    if metric == "peak_mem_gb":
        return value * (GIB if "gib" in cell["notes"].lower() else 1e9)
    if metric == "step_time_s":
        return value
    gpus = float(number["n_gpus"] or 1)
    tokens = float(work.global_batch * work.seq_len) / gpus
    if metric == "tokens_per_s_per_gpu":
        return tokens / value
    flops = _flops_per_token(work, cell)
    if metric == "tflops_per_gpu":
        return tokens * flops / (value * 1e12)
    return tokens * flops / (value * _peak_of_half(device))


def _peak_of_half(device: Device) -> float:
    """Return the FLOP/s that published shares of the peak refer to: those of bf16, or of fp16 before there was bf16."""
    return device.peak("bf16" if "bf16" in device.formats else "fp16")


def _flops_per_token(work: Workload, cell: dict[str, str]) -> float:
    """Return the FLOPs of a token, counted as the source counts them."""
    notes = cell["notes"].lower()
    matmuls, scores = 6 * work.matmul_parameters, work.train_flops_per_token - 6 * work.matmul_parameters
    causal = "causal" in notes or any(name in cell["source"].lower() for name in COUNTS_CAUSAL)
    flops = matmuls + scores * (1 if causal else 2)
    hardware = ("hardware flops" in notes and cell["recompute"] == "full") or "percent of peak" in notes
    hardware = hardware or "150 tflops" in notes
    if hardware:  # forward is computed twice; the head is not
        flops = 8 / 6 * (flops - 6 * work.vocabulary_parameters) + 6 * work.vocabulary_parameters
    return float(flops)
