"""Find the best plan for a model on a cluster, its costs, and the reasons. All plans are predicted; nothing is run.

A cluster is NxDEVICE (256xh100; 32x8xh100 also gives the nodes; join several with +), a preset, or a .toml file, such
as the one that `argosy probe` writes. Every figure is a prediction with an interval that holds nine times of ten.

Examples:
  argosy plan --model llama3-70b --cluster 256xh100 --global-batch 1024
  argosy plan run.toml                                          this run on this machine
  argosy plan run.toml --cluster 8xh100                         the same run elsewhere
  argosy plan --model deepseek-v3 --cluster 2048xh800 --tokens 14.8T
  argosy plan --model llama3-8b --cluster 8xh100 --fix "tp=2|4,compile=true"
  argosy plan --model llama3-8b --cluster 64xh100+64xa100 --html plan.html
  argosy plan --model llama3-70b --cluster 8xh100 --inference --global-batch 16
  argosy plan --learn runs/a runs/b                  correct ./cluster.toml, or --cluster FILE, by finished runs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from argosy.cli.options import parse
from argosy.config.counts import Count, WholeCount
from argosy.errors import UserError
from argosy.plan.search.candidates import Objective

if TYPE_CHECKING:
    from argosy.plan.report.report import PlanReport


@dataclass(frozen=True)
class Options:
    """Options of `argosy plan`."""

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run file, or the name of a run preset; or use --model."""
    model: str | None = None
    """A model preset (`argosy config presets` lists them)."""
    cluster: str | None = None
    """NxDEVICE, a preset, or a file; default with a run: this machine."""
    global_batch: WholeCount | None = None
    """Sequences in a step; default with a model: by DeepSeek's scaling law."""
    seq_len: WholeCount | None = None
    """Tokens in a sequence; default with a model: 8192, or the model's longest sequence if that is shorter."""
    tokens: Count | None = None
    """Tokens to train on, e.g. 15T; default: the run's, or 20 for each active parameter."""
    objective: Objective = "time"
    """Quantity to rank plans by; cost and energy may choose fewer devices, goodput counts failures."""
    fix: str = ""
    """Fix a part of the plan: KEY=VALUE,... with | between values to choose from."""
    top: int = 10
    """Number of plans to show."""
    inference: bool = False
    """Plan inference, not training: prefill and decode of --global-batch sequences of --seq-len tokens at a time."""
    learn: tuple[Path, ...] = ()
    """Folders of all finished runs to learn from: factors from them are written into the cluster's file."""
    json: bool = False
    """Print everything as one JSON object."""
    html: Path | None = None
    """Write a page with charts to this file."""


def main(argv: list[str]) -> None:
    """Run `argosy plan [RUN] --model NAME --cluster CLUSTER ...`."""
    options = parse(argv, "argosy plan", Options)
    _check(options)
    if options.learn:
        _learn(options)
        return
    from argosy.plan.report.request import plan_request

    request = plan_request(
        source=options.run,
        model=options.model,
        cluster=options.cluster,
        global_batch=options.global_batch,
        seq_len=options.seq_len,
        tokens=options.tokens,
        objective=options.objective,
        fix=options.fix,
        top=options.top,
        serving=options.inference,
    )
    if options.inference:
        from argosy.plan.report.inference_report import in_words, inference_report

        found = inference_report(request)
        print(_json(found) if options.json else in_words(found))
        return
    from argosy.plan.report.report import plan_report

    _print(plan_report(request), options)


def _learn(options: Options) -> None:
    from argosy.plan.calibration.learn import cluster_file, in_words, learn
    from argosy.plan.hardware.clusters import Cluster

    path = cluster_file(options.cluster)
    before = Cluster.load(path)
    after = learn(options.learn, before)
    after.save(path)
    print(_json(after.factors) if options.json else f"{path}: {in_words(before, after, len(options.learn))}")


def _print(found: PlanReport, options: Options) -> None:
    if options.html is not None:
        from argosy.files import atomic_write
        from argosy.plan.report.html import page

        try:
            with atomic_write(options.html) as file:
                file.write(page(found).encode())
        except OSError as error:
            raise UserError(
                f"--html {options.html}: cannot be written: {error.strerror}. Name a file in a folder that exists."
            ) from None
    if options.json:
        print(_json(found))
        return
    from argosy.plan.report.terminal import show

    show(found)
    if options.html is not None:
        print(f"\n{options.html}")


def _check(options: Options) -> None:
    for name in ("global_batch", "seq_len", "tokens", "top"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0.")
    if options.learn and (options.run or options.model):
        raise UserError("--learn only corrects a cluster's file. Ask for a plan in another command.")
    if options.html is not None and options.inference:
        raise UserError("--html is for training plans. Leave out --inference, or take --json.")


def _json(found: object) -> str:
    from pydantic_core import to_json

    return to_json(found, indent=2, inf_nan_mode="null").decode()
