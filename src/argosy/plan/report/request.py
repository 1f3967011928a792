"""The planner's request, from what a user typed: run and cluster, with defaults filled in and named."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from typing import Literal

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import cluster_of, device_named, resized
from argosy.plan.plan import Plan, words_of
from argosy.plan.report.report import PlanRequest, usual_batch
from argosy.plan.search.auto import Devices, choose_plan, processes_of
from argosy.plan.search.candidates import Objective
from argosy.plan.search.space import Pins, parse_pins

USUAL_SEQ_LEN = 8192
CHANGE_NUMBERS = ("precision", "weights", "reduce")
"""Keys of a plan that change what training computes."""
SMALL_VOCABULARY = 4096
"""Assumed vocabulary of a model preset that takes its tokenizer's, until there is a tokenizer."""


def plan_request(
    *,
    source: str | None = None,
    model: str | None = None,
    cluster: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    tokens: float | None = None,
    objective: Objective = "time",
    fix: str = "",
    top: int = 10,
    serving: bool = False,
) -> PlanRequest:
    """Return the request about a run file, or about a model and a cluster. Raises: UserError.

    serving: it is about inference; by default, each device answers one sequence at a time.
    """
    if (source is None) == (model is None):
        raise UserError("say either a run file or --model NAME, e.g. argosy plan --model llama3-8b --cluster 8xh100.")
    if model is not None and cluster is None:
        raise UserError(
            f"--model {model} needs --cluster, e.g. --cluster 8xh100 (nodes in a file: see docs/planning.md)."
        )
    pins = dict(parse_pins(fix))
    if model is not None:
        place = Cluster.parse(str(cluster))
        _check_precisions(pins, place)
        run, assumed = _of_model(model, global_batch, seq_len, place.devices if serving else None)
        return PlanRequest(run, place, tokens, objective, pins, top, assumed=tuple(assumed))
    run, assumed = _of_run(str(source), global_batch, seq_len)
    if not tokens and run.train.steps:
        tokens = float(run.train.steps * run.tokens_per_step)
    place = Cluster.parse(cluster) if cluster else this_machine(run)
    if cluster is None and place.measured is None:
        assumed.append(
            "The machine's rates are those of the catalogue; `argosy probe` measures them and writes a cluster file."
        )
    given = None if pins or cluster else _the_trainer_s(run, place)
    pins = _numbers(run.plan) | pins
    _check_precisions(pins, place)
    return PlanRequest(run, place, tokens, objective, pins, top, given, tuple(assumed))


def _check_precisions(pins: Pins, place: Cluster) -> None:
    for precision in pins.get("precision", ()):
        place.check_precision(precision)


def _numbers(plan: str) -> dict[str, tuple[object, ...]]:
    """Return the number formats that a run's plan fixes: plans that compute other numbers are no choice."""
    words = {key: value for key, value in words_of(plan).items() if key in CHANGE_NUMBERS}
    return {key: (getattr(Plan.from_words({key: value}), key),) for key, value in words.items()}


def _of_model(
    model: str, global_batch: int | None, seq_len: int | None, usual: int | None
) -> tuple[RunConfig, list[str]]:
    """Return the run, and what was assumed; usual: the default batch, None: by the scaling law."""
    assumed = []
    run = load(None, {"model.preset": model, "data.seq_len": 1}, overrides_mark="--")
    if seq_len is None:
        seq_len = min(USUAL_SEQ_LEN, run.model.max_seq_len)
        assumed.append(f"Assumed: --seq-len {seq_len}.")
    run, more = _with_vocabulary(run)
    if global_batch is None:
        global_batch = usual or usual_batch(run, seq_len)
        why = "one for each device" if usual else "DeepSeek's scaling law"
        assumed.append(f"Assumed: --global-batch {global_batch} ({why}).")
    sizes = {"data.seq_len": seq_len, "train.global_batch": global_batch, "model.vocab_size": run.model.vocab_size}
    return load(None, {"model.preset": model, **sizes}, overrides_mark="--"), assumed + more


def _of_run(source: str, global_batch: int | None, seq_len: int | None) -> tuple[RunConfig, list[str]]:
    given = {"train.global_batch": global_batch, "data.seq_len": seq_len}
    run = load(source, {key: value for key, value in given.items() if value is not None}, overrides_mark="--")
    return _with_vocabulary(run)


def _with_vocabulary(run: RunConfig) -> tuple[RunConfig, list[str]]:
    if run.model.vocab_size:
        return run, []
    model = run.model.model_copy(update={"vocab_size": SMALL_VOCABULARY})
    return run.model_copy(update={"model": model}), [
        f"Assumed: a vocabulary of {SMALL_VOCABULARY} tokens, as it is not known yet."
    ]


def this_machine(run: RunConfig) -> Cluster:
    """Return the devices that a run would take here.

    They are those of the cluster that describes this machine (`plan.hardware.local_machine`), if there is one; else
    the GPUs that nvidia-smi lists, else one process or more on CPU cores.

    Raises: UserError for a GPU that is not in the catalogue, or GPUs of several kinds.
    """
    wanted = run.launch.processes or processes_of(run.plan)
    if (described := cluster_of(run)) is not None:
        return resized(described, wanted or (1 if described.device.kind == "cpu" else described.devices))
    gpus = [] if run.launch.device == "cpu" else _gpu_names()
    if not gpus:
        return Cluster.parse(f"{wanted or 1}xcpu")
    names = Counter(gpus)
    if len(names) > 1:
        raise UserError(f"this machine has GPUs of several kinds ({', '.join(names)}). Give --cluster.")
    return Cluster.parse(f"{wanted or len(gpus)}x{device_named(gpus[0])}")


def _gpu_names() -> list[str]:
    """Return the driver's names of this machine's GPUs that CUDA may see, e.g. NVIDIA H100 80GB HBM3."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    names = [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([v for v in visible.split(",") if v.strip()])]


def _the_trainer_s(run: RunConfig, place: Cluster) -> Plan:
    """Return the plan that `argosy train` would take."""
    kind: Literal["cpu", "cuda"] = "cpu" if place.device.kind == "cpu" else "cuda"
    fast = CostModel.of(run, place).precision
    return choose_plan(run, Devices(place.devices, kind, fast == "bf16", fast_fp16=fast == "fp16"), place)
