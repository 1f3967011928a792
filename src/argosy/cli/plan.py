"""Find the best plan for a model on a cluster, its costs, and the reasons. All plans are predicted; nothing is run.

A cluster is NxDEVICE (256xh100; 32x8xh100 also gives the nodes; join several with +), a preset, or a .toml file, such
as the one that `argosy probe` writes. Every figure is a prediction with a 90 % interval.

Examples:
  argosy plan --model llama3-70b --cluster 256xh100 --global-batch 1024
  argosy plan run.toml                                          this run on this machine
  argosy plan run.toml --cluster 8xh100                         the same run elsewhere
  argosy plan --model deepseek-v3 --cluster 2048xh800 --tokens 14.8T
  argosy plan --model llama3-8b --cluster 8xh100 --cluster 16xa100 --price 2.49 --price 1.29
      side by side, at your prices
  argosy plan --model Qwen3-8B/ --cluster 8xh100 --finetune 50M
      a Hugging Face folder (its config.json is enough)
  argosy plan --model llama3-8b --cluster 1xrtx-4090 --finetune 50M --lora 16
      an adapter on one card
  argosy plan --model llama3-8b --cluster 8xh100 --fix "tp=2|4,compile=true"
  argosy plan --model llama3-8b --cluster 64xh100+64xa100 --html plan.html
  argosy plan --model llama3-70b --cluster 8xh100 --serve --prompt-len 2048 --output-len 512
  argosy plan --model llama3-70b --cluster 64xh100 --serve --rate 20 --ttft-ms 1000 --tpot-ms 50 --weights "bf16|fp8"
      serving: latency against throughput, and the devices that answer 20 requests a second in time
  argosy plan --model llama3-8b --tokens 1T --within 30d --cluster h100 --cluster a100
      how many of each train this in 30 days, and for what
  argosy plan --model llama3-70b --cluster ours.toml --rank-map ranks.txt --slurm-topology topology.conf
      which machine has which ranks, on a network whose topology the file says (docs/networks.md)
  argosy plan runs/mine --within 2d --cluster 16xh200         a run under way: stay, up, down or sideways
  argosy plan --jobs jobs.toml                       several runs on the clusters that you have: who, where, when
  argosy plan --learn runs/a runs/b                  correct ./cluster.toml, or --cluster FILE, by finished runs
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from argosy.cli.documents import answer, write, write_file
from argosy.cli.options import parse
from argosy.config.load import load, model_name
from argosy.config.section import Count, WholeCount, seconds_of
from argosy.config.train import LoraBase
from argosy.errors import UserError
from argosy.files import expanded
from argosy.observe.terminal import told_if_long
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Objective, Plan

if TYPE_CHECKING:
    from argosy.config.schema import RunConfig
    from argosy.plan.report.jobs_file import ClusterSpec, JobSpec
    from argosy.plan.report.report import PlanReport, PlanRequest
    from argosy.plan.report.request import Question
    from argosy.plan.search.serving import ServingQuestion


PROMPT_LEN, OUTPUT_LEN = 2048, 512
"""Tokens of prompts and answers where nobody says: those of published benchmarks of chat."""
SERVING_ONLY = ("prompt_len", "output_len", "rate", "ttft_ms", "tpot_ms", "engine", "weights", "kv_cache", "draft")
"""Options that say something with --serve only."""
ABOUT_RANKS = "is about the ranks of a training plan", ("within", "serve", "learn")
ALONE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "jobs": ("is a file of runs, each with options of its own", ("json", "html")),
    "learn": ("only corrects a cluster's file", ("cluster", "engine", "json")),
    "run": ("is a run under way, whose other keys are as they were", ("cluster", "price", "within", "json")),
}
"""Option -> what it does, and the only options that go with that; run: of a run's folder."""
APART: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tokens": ("says how much to train on, as --finetune does", ("finetune",)),
    "within": ("asks how many devices train a run in time", ("html", "serve", "learn", "objective")),
    "seq_len": ("is for training; serving has --prompt-len and --output-len", ("serve",)),
    "serve": ("plans serving, not training", ("tokens", "finetune", "lora", "lora_base", "objective", "html")),
    "rank_map": ABOUT_RANKS,
    "slurm_topology": ABOUT_RANKS,
}
"""Option -> what it does, and the options that do not go with that."""
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run file, or the name of a run preset; or use --model. A run's folder: what is left of it, on fewer devices, on
    more, or on each --cluster."""
    model: str | None = None
    """A preset (`argosy config presets`), a Hugging Face folder, its URL (hf://OWNER/NAME) or its config.json."""
    cluster: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NxDEVICE, a preset, or a file; default with a run: this machine. Given several times: side by side."""
    global_batch: WholeCount | None = None
    """Batch size: sequences in a step; default with a model: by DeepSeek's scaling law. Serving: requests at a time."""
    seq_len: WholeCount | None = None
    """Sequence length, in tokens; default with a model: 8192, or the model's longest sequence if that is shorter."""
    tokens: Count | None = None
    """Tokens to train on, e.g. 15T; default: the run's, or 20 for each active parameter."""
    finetune: Count | None = None
    """Plan fine-tuning on this many tokens, e.g. 50M: 2 epochs; with a model 128 sequences of 4096 tokens a step."""
    lora: WholeCount | None = None
    """Plan an adapter (LoRA) of this rank on all linear layers, beside frozen weights."""
    lora_base: LoraBase | None = None
    """Format in which these weights are held (`lora.base`): nf4 as QLoRA does."""
    price: tyro.conf.UseAppendAction[tuple[float, ...]] = ()
    """Price of an hour of one device, e.g. 2.49, in USD or the cluster file's currency; default: the range in
    the catalogue. One for all clusters, or one for each."""
    within: str | None = None
    """The fewest devices of each --cluster that train this in time: 30d, 12h, 2w. A cluster may then be a DEVICE alone,
    as h100: as many as it takes."""
    objective: Objective = "time"
    """Quantity to rank plans by; cost and energy may choose fewer devices, goodput counts failures."""
    fix: str = ""
    """Fix a part of the plan: KEY=VALUE,... with | between values to choose from."""
    top: int = 10
    """Number of plans to show."""
    serve: Annotated[bool, tyro.conf.arg(aliases=["--inference"])] = False
    """Plan serving, not training: latency against throughput, cost and energy of tokens, devices for a --rate."""
    prompt_len: WholeCount | None = None
    """Serving: tokens of a prompt; default: 2048."""
    output_len: WholeCount | None = None
    """Serving: tokens of an answer; default: 512."""
    rate: float | None = None
    """Serving: requests a second to find the devices for."""
    ttft_ms: float | None = None
    """Serving: milliseconds to the first token that 95 of 100 requests keep at that rate."""
    tpot_ms: float | None = None
    """Serving: milliseconds between two tokens that 95 of 100 requests keep at that rate."""
    engine: str = ""
    """Serving: engine and release, e.g. "vLLM 0.10", SGLang or TensorRT-LLM; default: the mean of all."""
    weights: str = ""
    """Serving: number format of weights, e.g. fp8, int4 or fp4, with | between formats to choose from."""
    kv_cache: str = "16"
    """Serving: bits of the cache's numbers, 16 or fp8, with | between."""
    draft: str = ""
    """Serving: speculative or multi-token decoding: TOKENS:ACCEPTED[:COST], e.g. 3:0.7 guesses 3 tokens a pass, each
    right with probability 0.7, at 0.05 of a pass each."""
    learn: tuple[Path, ...] = ()
    """Folders of all finished runs to learn from: factors from them are written into the cluster's file. Or a .csv file
    with measurements of serving, of --engine."""
    jobs: Path | None = None
    """A file of runs with deadlines and priorities, and of the clusters that you have: who runs where and when, and the
    commands for the clusters' schedulers."""
    json: bool = False
    """Print JSON; of several clusters, a cluster a line."""
    html: Path | None = None
    """Write a page with charts to this file."""
    rank_map: Path | None = None
    """Write the names of the machines to this file, one a line, in the order of the plan's ranks, for launch.rank_map
    and SLURM_HOSTFILE; the cluster's file has a table topology with hosts."""
    slurm_topology: Path | None = None
    """Write SLURM's topology.conf of the cluster to this file."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy plan", Options)
    _check(options)
    if options.jobs is not None:
        with told_if_long("argosy plan: scheduling jobs"):
            _schedule(options, options.jobs)
        return
    if options.learn:
        with told_if_long("argosy plan: learning from runs"):
            _learn(options)
        return
    try:
        with told_if_long("argosy plan: computing plans"):
            _answer(options)
    except UserError as error:
        raise UserError(_by_option(str(error), options)) from None


def _answer(options: Options) -> None:
    from argosy.plan.report.report import plan_report

    if options.run is not None and (Path(options.run) / "run.toml").is_file():
        _resize(options, Path(options.run))
        return
    if options.within is not None:
        _within(options, _limit_s(options.within))
        return
    if len(options.cluster) > 1:
        _side_by_side(options)
        return
    request = _request(options, options.cluster[0] if options.cluster else None, *options.price)
    if options.serve:
        from argosy.plan.report.serving_report import in_words, serving_report

        served = serving_report(request, _serving_question(options))
        answer(options.json, "plan-serve", in_words(served), served)
        return
    slurm = _slurm_topology(request, options)
    found = plan_report(request)
    if options.rank_map is not None:
        write_file(options.rank_map, _rank_map(request, found), "--rank-map")
    if options.slurm_topology is not None:
        write_file(options.slurm_topology, slurm, "--slurm-topology")
    from argosy.plan.report import html, terminal

    _print(options, "plan", found, html.page, terminal.show)


def _slurm_topology(request: PlanRequest, options: Options) -> str:
    """Return SLURM's topology.conf, if it is asked for. Raises: UserError if the machines of its network, or of that of
    a rank map, have no names."""
    from argosy.plan.report.network import slurm_topology, with_names

    if options.rank_map is not None:
        with_names(request.cluster, "--rank-map")
    return slurm_topology(request.cluster) if options.slurm_topology is not None else ""


def _rank_map(request: PlanRequest, found: PlanReport) -> str:
    from argosy.plan.cost.cost_model import CostModel
    from argosy.plan.report.network import rank_map

    plan = Plan.parse(found.explanation.choice.plan)
    names = rank_map(CostModel.of(request.run, request.cluster), request.cluster, plan)
    return "".join(f"{name}\n" for name in names)


def _request(options: Options, cluster: str | None, price: float | None = None) -> PlanRequest:
    """Return the request about one cluster, or without one about this machine. Raises: UserError."""
    from argosy.plan.report.request import Question, of_model, of_run

    names = ("global_batch", "seq_len", "tokens", "finetune", "lora", "lora_base", "objective", "fix", "top")
    given = {name: getattr(options, name) for name in names}
    if options.serve:
        given["seq_len"] = (options.prompt_len or PROMPT_LEN) + (options.output_len or OUTPUT_LEN)
    question = Question(**given, serving=options.serve, price=price)
    if options.model is None:
        from argosy.launch.devices import devices_of_run

        run = _run(str(options.run), replace(question, seq_len=options.seq_len))
        return of_run(run, Cluster.parse(cluster) if cluster else devices_of_run(run), question)
    if cluster is None:
        raise UserError(
            f"--model {options.model} needs --cluster, e.g. --cluster 8xh100 (nodes in a file: see docs/planning.md)."
        )
    path = expanded(options.model)
    if not (path.is_dir() or path.suffix == ".json" or "/" in options.model):
        return of_model(options.model, cluster, question)
    from argosy.models.hf import import_config  # takes seconds: it imports torch

    named = (path.parent if path.suffix == ".json" else path).resolve().name
    return of_model(import_config(path), cluster, question, named)


def _serving_question(options: Options) -> ServingQuestion:
    """Return what is asked about serving. Raises: UserError for a --draft that says nothing."""
    from argosy.plan.cost.inference import MOST_GUESSES, Draft
    from argosy.plan.search.serving import ServingQuestion

    draft = Draft()
    if given := options.draft:
        try:
            tokens, *shares = given.split(":")
            draft = Draft(int(tokens), *map(float, shares))
        except (ValueError, TypeError):
            draft = Draft(-1)
        if not (1 <= draft.tokens <= MOST_GUESSES and 0 < draft.accepted < 1 and 0 <= draft.cost < 1):
            raise UserError(f"--draft {given}: is not TOKENS:ACCEPTED[:COST] of 1 to {MOST_GUESSES} TOKENS. Try 3:0.7.")
    latencies = {"ttft_s": options.ttft_ms, "tpot_s": options.tpot_ms}
    return ServingQuestion(
        prompt=options.prompt_len or PROMPT_LEN,
        output=options.output_len or OUTPUT_LEN,
        engine=options.engine,
        weights=_words(options.weights),
        caches=_words(options.kv_cache),
        draft=draft,
        sequences=options.global_batch,
        rate=options.rate,
        **{name: limit / 1000 for name, limit in latencies.items() if limit is not None},
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split("|") if word.strip()) or (text,) * bool(text)


def _run(source: str, question: Question) -> RunConfig:
    """Return the run as `argosy train` would have it, as far as that is known before it has prepared its data."""
    from argosy.launch.resolve import with_known_length, with_known_sizes

    return with_known_length(with_known_sizes(load(source, question.keys)))


def _priced(options: Options) -> list[tuple[str, float | None]]:
    """Return each cluster as the user named it, with its price."""
    prices = options.price * len(options.cluster) if len(options.price) == 1 else options.price
    return list(zip(options.cluster, prices or [None] * len(options.cluster), strict=True))


def _limit_s(limit: str) -> float:
    try:
        return seconds_of(limit)
    except ValueError as error:
        raise UserError(f"--within {error}.") from None


def _resize(options: Options, folder: Path) -> None:
    from argosy.watch.reader import RunReader
    from argosy.watch.resize import resizing_of, show

    limit_s = None if options.within is None else _limit_s(options.within)
    others = [
        (named, Cluster.parse(named).model_copy(update={} if price is None else {"price_per_device_h": price}))
        for named, price in _priced(options)
    ]
    found = resizing_of(RunReader.read(folder), others, limit_s)
    if options.json:
        write("plan-run", found)
    else:
        show(found, folder)


def _within(options: Options, limit_s: float) -> None:
    from argosy.plan.report.within import of_each, show_within

    requests = []
    for named, price in _priced(options) or [(None, *(options.price or [None]))]:
        cluster, is_open = _nodes_of(named)
        requests.append((named or "this machine", _request(options, cluster, price), is_open))
    found = of_each(requests, limit_s)
    if options.json:
        write("plan-within", *found)
        return
    run, assumed = requests[0][1].run, list(dict.fromkeys(line for each in found for line in each.assumed))
    show_within(found, model_name(run.model, run.name), assumed)


def _nodes_of(named: str | None) -> tuple[str | None, bool]:
    """Return the cluster, and True if it is one node of a device named alone: as many as it takes."""
    from argosy.plan.hardware.devices import device_names, find_device

    if named is None or named.lower() not in device_names():
        return named, False
    return f"{find_device(named.lower()).devices_per_node}x{named}", True


def _side_by_side(options: Options) -> None:
    from argosy.plan.report.terminal import compare, show_side_by_side

    found = compare([(cluster, _request(options, cluster, price)) for cluster, price in _priced(options)])
    if options.json:
        write("plan-clusters", *found)
    else:
        show_side_by_side(found)


def _schedule(options: Options, path: Path) -> None:
    from argosy.plan.report import gantt
    from argosy.plan.report.jobs import scheduled
    from argosy.plan.report.jobs_file import JobsFile

    def request_of(job: JobSpec, place: ClusterSpec) -> PlanRequest:
        about = Options(job.run or None, job.model or None, (), job.global_batch, job.seq_len, job.tokens)
        return _request(about, place.cluster)

    _print(options, "plan-jobs", scheduled(JobsFile.load(path), request_of, path), gantt.page, gantt.show)


def _learn(options: Options) -> None:
    from argosy.plan.calibration import LearntFactors, cluster_file, in_words, learn

    path = cluster_file(options.cluster[0] if options.cluster else None)
    before = Cluster.load(path)
    if options.learn[0].suffix == ".csv":
        from argosy.plan import serving_calibration

        if len(options.learn) > 1:
            raise UserError("--learn takes one .csv file of serving, or folders of runs. Put the rows into one file.")
        after, rows = serving_calibration.learn_from_file(options.learn[0], before, options.engine)
        factors, said = after.serving, serving_calibration.in_words(after, rows)
    else:
        after = learn(options.learn, before)
        factors = {str(key): each for key, each in after.factors.items()}
        said = in_words(before, after, len(options.learn))
    after.save(path)
    answer(options.json, "plan-learn", f"{path}: {said}", LearntFactors(path, factors))


def _print(options: Options, name: str, found: T, page: Callable[[T], str], show: Callable[[T], None]) -> None:
    if options.html is not None:
        write_file(options.html, page(found), "--html")
    if options.json:
        write(name, found)
        return
    show(found)
    if options.html is not None:
        print(f"\n{options.html}")


def _check(options: Options) -> None:
    """Raise UserError for options that do not go together, and for numbers that are not above 0."""
    given = {field.name: value for field in fields(options) if (value := getattr(options, field.name)) != field.default}
    for name, value in given.items():
        for number in value if name == "price" else (value,):
            if isinstance(number, int | float) and not 0 < number < math.inf:
                raise UserError(f"{_option(name, options)} {number:g}: must be above 0.")
    _check_apart(list(given), options)
    if options.within is not None:
        _limit_s(options.within)  # of two words, "30 days", the second is taken for a run
    if options.jobs is not None:
        return
    if not options.learn and (options.run is None) == (options.model is None):
        raise UserError("say either a run file or --model NAME, e.g. argosy plan --model llama3-8b --cluster 8xh100.")
    of_serving = [name for name in SERVING_ONLY if name in given]
    if of_serving and not options.serve and not (options.learn and of_serving == ["engine"]):
        raise UserError(
            f"{_option(of_serving[0], options)} says something about serving. Add --serve, or leave it out."
        )
    if options.rate is None and (options.ttft_ms is not None or options.tpot_ms is not None):
        raise UserError("--ttft-ms and --tpot-ms are limits at a rate of requests. Add --rate, e.g. --rate 10.")
    clusters = len(options.cluster)
    if len(options.price) not in (0, 1, max(1, clusters)):
        raise UserError(f"{len(options.price)} --price for {clusters} --cluster. Give one, or one for each.")
    if clusters != 1 and (about_ranks := next((n for n in ("rank_map", "slurm_topology") if n in given), None)):
        option = _option(about_ranks, options)
        raise UserError(f"{option} takes one --cluster, whose file has a table topology (docs/networks.md).")
    if clusters > 1 and (single := next((n for n in ("html", "serve", "learn") if n in given), None)):
        raise UserError(
            f"{_option(single, options)} takes one --cluster. Several are compared side by side, for training."
        )


def _check_apart(given: list[str], options: Options) -> None:
    is_folder = options.run is not None and (Path(options.run) / "run.toml").is_file()
    rules = dict(APART)
    for name, (does, beside) in ALONE.items():
        if name != "run" or is_folder:
            rules[name] = does, tuple(other for other in given if other not in (name, *beside))
    for name, (does, others) in rules.items():
        if name in given and (other := next((each for each in others if each in given), None)):
            raise UserError(f"{_option(name, options)} {does}. Leave out {_option(other, options)}.")


def _option(name: str, options: Options) -> str:
    return str(options.run) if name == "run" else f"--{name.replace('_', '-')}"


def _by_option(text: str, options: Options) -> str:
    """Return the message with this command's options in place of keys of a run file that the user did not write."""
    names = {"model.preset": "model", "train.global_batch": "global_batch", "data.seq_len": "seq_len"}
    for key, name in (names | {"lora.rank": "lora", "lora.base": "lora_base"}).items():
        if options.model is not None or getattr(options, name) is not None:
            text = re.sub(rf"(overrides: |--)?\b{re.escape(key)}\b", _option(name, options), text)
    return re.sub(r"\bplan\.(?=\w+ = )", "--fix ", text) if options.fix else text
