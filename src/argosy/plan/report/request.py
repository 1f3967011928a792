"""The planner's request, from what a user asked: run and cluster, with defaults filled in and named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from argosy.config.layers import preset_layer, preset_names, preset_path
from argosy.config.load import build, load
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import count
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.parameters import active_parameters
from argosy.plan.plan import Objective, Plan, said_in
from argosy.plan.report.report import TOKENS_PER_PARAMETER, PlanReport, PlanRequest, plan_report, usual_batch
from argosy.plan.search.agreement import choose_rounds, choose_word
from argosy.plan.search.auto import Devices, choose_with_reasons, fast_precision, machine_for
from argosy.plan.search.space import Pins, parse_pins

USUAL_SEQ_LEN = 8192
FINETUNE_EPOCHS, FINETUNE_BATCH, FINETUNE_SEQ_LEN = 2, 128, 4096
"""Supervised fine-tuning as in Tulu 3 (Lambert et al. 2024, table 10)."""
CHANGE_NUMBERS = ("precision", "weights", "reduce", "sync")
"""Keys of a plan that change what training computes."""
SAME_SIZE_KEYS = ("layers", "width", "heads", "kv_heads", "ffn_width", "moe")
"""Keys of models that are as large and as fast as each other."""
SMALL_VOCABULARY = 4096
"""Assumed vocabulary of a model preset that takes its tokenizer's, until there is a tokenizer."""


@dataclass(frozen=True)
class Question:
    """A question about a run, or about a model."""

    global_batch: int | None = None
    """Sequences in a step; None: by DeepSeek's scaling law."""
    seq_len: int | None = None
    """Tokens in a sequence; None: `USUAL_SEQ_LEN`, or the model's longest if that is shorter."""
    tokens: float | None = None
    """Tokens to train on; None: 20 for each active parameter."""
    finetune: float | None = None
    """Tokens of a data set to fine-tune on, in place of `tokens`."""
    lora: int | None = None
    """Rank of an adapter that is trained beside the weights."""
    lora_base: str | None = None
    """Format of these: `lora.base`."""
    objective: Objective = "time"
    fix: str = ""
    top: int = 10
    serving: bool = False
    """True for a question about serving, where the batch has no meaning."""
    price: float | None = None
    """Price of an hour of one device, in the cluster's currency; None: the cluster's, or the catalogue's."""

    @property
    def keys(self) -> dict[str, object]:
        """Keys of the run file that are asked for, with their values."""
        values = {
            "data.seq_len": self.seq_len,
            "train.global_batch": self.global_batch,
            "lora.rank": self.lora,
            "lora.base": self.lora_base,
        }
        return {key: value for key, value in values.items() if value is not None}


KEY_OF_OPTION = {
    "--model.preset": "model",
    "--seq-len": "seq_len",
    "--global-batch": "global_batch",
    "--prompt-len": "prompt",
    "--output-len": "output",
}
"""Option of `argosy plan` -> key of a file that asks for the same work, of jobs or of designs."""


def in_keys(text: str, prefix: str = "") -> str:
    """Return a message of the planner with a file's keys, after `prefix`, in place of options."""
    for option, key in KEY_OF_OPTION.items():
        text = text.replace(option, prefix + key)
    return text


def of_model(model: str | ModelConfig, cluster: str | Cluster, question: Question, name: str = "") -> PlanRequest:
    """Return the request about a model on a cluster.

    model: the name of a preset, or a model that is called `name`. Raises: UserError.
    """
    place = _priced(cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster), question)
    pins = dict(parse_pins(question.fix))
    run, assumed, of_batch = _run_of_model(model, name, question, place.devices)
    _check_precisions(pins, place, run)
    tokens, more = _tokens(question, run)
    assumed = [*assumed, *of_batch, *more]
    batch = "" if question.serving else "".join(of_batch)
    tunes = question.finetune is not None
    return PlanRequest(run, place, tokens, question.objective, pins, question.top, None, tuple(assumed), batch, tunes)


def of_run(run: RunConfig, place: Cluster | Devices, question: Question) -> PlanRequest:
    """Return the request about a run, on a cluster or on the devices at hand as `argosy train` finds them.

    Of `question`, batch and length of a sequence are the run's already. Raises: UserError.
    """
    run, assumed = _with_vocabulary(run)
    if question.serving and question.seq_len is not None:
        run = _of_length(run, question.seq_len)
    tokens, more = _tokens(question, run, run.train.steps)
    pins = dict(parse_pins(question.fix))
    if isinstance(place, Cluster):
        cluster, given, numbers = place, None, _numbers(run.plan)
    else:
        cluster = machine_for(run, place)
        given = None
        if not pins and not run.sites:
            given, reasons = choose_with_reasons(run, place)
            more += [reasons] if reasons else []
        numbers = {"precision": (fast_precision(place),)} | _numbers(run.plan)
        if cluster.measured is None:
            more.append(
                "The machine's rates are those of the catalogue; `argosy probe` measures them and writes a cluster "
                "file."
            )
    pins = numbers | pins
    _check_precisions(pins, cluster, run)
    if not said_in(run.plan).sync_is_open or "sync" in pins:
        pass
    elif given is not None:
        pins = {**pins, "sync": (given.sync,)}
    elif run.sites:
        chosen = choose_rounds(run, cluster, run.sync.model_fields_set)
        run, more = run.model_copy(update={"sync": chosen.sync}), [*more, chosen.in_words()]
    else:
        agreed = choose_word(CostModel.of(run, cluster), pins)
        pins, more = {**pins, "sync": (agreed.word,)}, [*more, agreed.in_words()]
    cluster = _priced(cluster, question)
    return PlanRequest(run, cluster, tokens, question.objective, pins, question.top, given, (*assumed, *more))


def _check_precisions(pins: Pins, place: Cluster, run: RunConfig) -> None:
    for precision in pins.get("precision", ()):
        place.check_precision(str(precision), has_experts=run.model.moe.experts > 0)


def _priced(cluster: Cluster, question: Question) -> Cluster:
    return cluster if question.price is None else cluster.model_copy(update={"price_per_device_h": question.price})


def _tokens(question: Question, run: RunConfig, steps: int = 0) -> tuple[float | None, list[str]]:
    """Return the tokens to train on, those of `steps` if they are not asked for, and what was assumed."""
    if question.finetune is not None:
        words = f"Assumed: {FINETUNE_EPOCHS} epochs of the data set (else: --tokens)."
        return FINETUNE_EPOCHS * question.finetune, [words]
    if question.tokens is not None or question.serving:
        return question.tokens, []
    if steps:
        return float(run.tokens_before(steps)), []
    each = TOKENS_PER_PARAMETER
    return None, [f"Assumed: --tokens {count(each * active_parameters(run.model))} ({each} for each active parameter)."]


def _numbers(plan: str) -> dict[str, tuple[object, ...]]:
    """Return the number formats that a run's plan fixes: plans that compute other numbers are no choice."""
    words = {key: value for key, value in said_in(plan).words.items() if key in CHANGE_NUMBERS}
    return {key: (getattr(Plan.from_words({key: value}), key),) for key, value in words.items()}


def _run_of_model(
    model: str | ModelConfig, name: str, question: Question, devices: int
) -> tuple[RunConfig, list[str], list[str]]:
    """Return the run, what was assumed, and what was assumed of its batch."""
    assumed, of_batch = [], []
    chosen: dict[str, object] = {"model.preset": model}
    if isinstance(model, ModelConfig):
        named = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
        chosen = {"model": model.model_dump(mode="json"), "name": named}
    run = load(None, chosen | {"data.seq_len": 1}, overrides_mark="--")
    longest, seq_len, batch = run.model.max_seq_len, question.seq_len, question.global_batch
    if seq_len is None:
        seq_len = min(USUAL_SEQ_LEN if question.finetune is None else FINETUNE_SEQ_LEN, longest)
        assumed.append(f"Assumed: --seq-len {seq_len}.")
    if seq_len > longest and seq_len <= _stretched(run.model):
        chosen |= {"model.max_seq_len": seq_len}
        run = run.with_keys(model={"max_seq_len": seq_len})
        assumed.append(f"Assumed: model.max_seq_len = {seq_len}, to which YaRN stretches the model's {longest} tokens.")
    elif seq_len > longest:
        raise UserError(_too_long(seq_len, run.model, question.serving))
    run, more = _with_vocabulary(run)
    if batch is None:
        law, why = usual_batch(run, seq_len), "DeepSeek's scaling law"
        if question.finetune is not None:
            law, why = FINETUNE_BATCH, "usual for fine-tuning"
        batch = devices if question.serving else law
        if not question.serving:
            of_batch.append(f"Assumed: --global-batch {batch} ({why}).")
    sizes = {"data.seq_len": seq_len, "train.global_batch": batch}
    whole = load(None, chosen | question.keys | sizes, overrides_mark="--")
    return whole.model_copy(update={"model": run.model}), assumed + more, of_batch


def _of_length(run: RunConfig, tokens: int) -> RunConfig:
    """Return the run with sequences of so many tokens, which its model is to serve. Raises: UserError if it cannot."""
    if tokens > max(run.model.max_seq_len, _stretched(run.model)):
        raise UserError(_too_long(tokens, run.model, serving=True))
    return run.model_copy(update={"data": run.data.model_copy(update={"seq_len": tokens})})


def _stretched(model: ModelConfig) -> float:
    """Return the longest sequence that the model's YaRN is for, whatever `max_seq_len` says: configs leave it as is."""
    yarn = model.rope_scaling
    return yarn.factor * yarn.original_max_seq_len if yarn.kind == "yarn" else 0


def _too_long(seq_len: int, model: ModelConfig, serving: bool) -> str:
    """Say which presets of the same sizes take so long a sequence."""
    said = f"--prompt-len and --output-len: {seq_len} tokens together are" if serving else f"--seq-len {seq_len} is"
    problem = f"{said} more than the model's longest sequence, {model.max_seq_len} tokens."
    others = {
        name: build(RunConfig, preset_layer(preset_path("models", name))).model for name in preset_names("models")
    }
    alike = [
        name
        for name, other in others.items()
        if other.max_seq_len >= seq_len and all(getattr(other, key) == getattr(model, key) for key in SAME_SIZE_KEYS)
    ]
    if alike:
        near = " or ".join(f"--model {name} (up to {others[name].max_seq_len} tokens)" for name in alike)
        return f"{problem} Models of the same size that take it: {near}."
    if serving:
        return f"{problem} Give less of either, or a model that takes more."
    return f"{problem} Try --seq-len {model.max_seq_len}."


def _with_vocabulary(run: RunConfig) -> tuple[RunConfig, list[str]]:
    if run.model.vocab_size:
        return run, []
    return run.with_keys(model={"vocab_size": SMALL_VOCABULARY}), [
        f"Assumed: a vocabulary of {SMALL_VOCABULARY} tokens, as it is not known yet."
    ]


def best_plans(what: RunConfig | str, cluster: str, **asked: Any) -> PlanReport:
    """Rank the plans for a run, or for the model preset of this name, on a cluster such as "8xh100" or a cluster file.

    asked: fields of `Question`, such as seq_len=8192, objective="cost", fix="tp=2" or top=3.
    The best plan is `report.choices[0].plan`, which can be a run's `plan`.

    Raises: UserError if nothing is legal or nothing fits, or for an unknown model or cluster.
    """
    question = Question(**asked)
    request = (
        of_run(what, Cluster.parse(cluster), question)
        if isinstance(what, RunConfig)
        else of_model(what, cluster, question)
    )
    return plan_report(request)
