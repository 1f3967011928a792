"""The report of `argosy plan --serve`: latency against throughput, the plans on that front, and devices for a rate."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.load import model_name
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import Estimate, count, gib, percent, seconds, within
from argosy.plan.quantities import evenly
from argosy.plan.report.report import PlanRequest, describe
from argosy.plan.search.serving import Serving, ServingQuestion, ServingSearch, SizedFleet, pareto

SPENT_ON = {
    "weights": "reading weights and multiplying",
    "attention": "attention and its cache",
    "exchange": "sums over ranks",
    "overhead": "launches, scheduling, sampling",
    "draft": "drafting",
    "prefill": "other requests' prompts",
}
"""Parts of the time of a token, in words."""


@dataclass(frozen=True)
class ServingReport:
    """The report."""

    model: str
    cluster: str
    prompt: int
    output: int
    engine: str
    assumed: tuple[str, ...]
    choices: tuple[Serving, ...]
    """The Pareto front, the way with the shortest time per token first; of it at most as many as asked for."""
    curve: tuple[Serving, ...]
    """All ways that fit."""
    rate: float | None
    sized: tuple[SizedFleet, ...]
    """Devices for the rate, fewest first; empty if none was asked for."""
    currency: str
    devices: int
    worse: tuple[str, ...]
    """In words, the limit from which these devices, good for training, are worse for serving."""


def serving_report(request: PlanRequest, question: ServingQuestion) -> ServingReport:
    """Return the ways to serve a model on the cluster, and with a rate the devices for it.

    Raises: UserError if nothing fits, a pin does not apply, or no way keeps the latencies.
    """
    run, cluster = request.run, request.cluster
    costs = CostModel.of(run, cluster)
    search = ServingSearch(costs, cluster, question, request.pins)
    found = search.found()
    front = pareto(found)
    return ServingReport(
        model=model_name(run.model, run.name),
        cluster=describe(cluster),
        prompt=question.prompt,
        output=question.output,
        engine=search.engine.label or "the mean of all engines",
        assumed=(*request.assumed, *cluster.device.caveats),
        choices=tuple(evenly(front, request.top)),
        curve=tuple(found),
        rate=question.rate,
        sized=tuple(search.sized()[: request.top]) if question.rate else (),
        currency=cluster.currency,
        devices=cluster.devices,
        worse=tuple(_worse(costs, front)),
    )


def _worse(costs: CostModel, front: list[Serving]) -> list[str]:
    rates = costs.rates
    peak = float(rates.half)
    intensity = peak / float(rates.memory_bytes_per_s)
    first, last = front[0], front[-1]
    flops = 2 * float(costs.workload.matmul_parameters)
    used = [flops * way.tokens_per_s_device / peak for way in (first, last)]
    lines = [
        f"Of the FLOP/s that training uses, decoding uses {percent(used[0])} at the shortest time per token and "
        f"{percent(used[1])} at the highest throughput: until about {intensity:.0f} tokens are in a pass, reading the "
        "weights takes longer than multiplying with them, and only more memory bandwidth helps."
    ]
    overhead = first.parts["overhead"] + first.parts["exchange"]
    whole = sum(first.parts.values())
    if overhead > 0.25 * whole:
        lines.append(
            f"At the shortest time per token, {percent(overhead / whole)} of it are launches and small sums, which no "
            "faster device shortens."
        )
    if last.sequences >= last.most_sequences:
        lines.append("The highest throughput ends where the cache fills memory, not where FLOP/s do.")
    return lines


def in_words(report: ServingReport) -> str:
    lines = [
        f"{report.model} on {report.cluster}: prompts of {report.prompt} tokens, answers of {report.output}, with "
        f"{report.engine}",
        *report.assumed,
        "",
        f"{len(report.curve)} ways and numbers of requests fit; the front of time per token against throughput:",
        f"{'tp':>4}{'pp':>4}{'weights':>9}{'cache':>7}{'replicas':>10}{'prefill':>9}{'at once':>9}{'GiB':>7}"
        f"{'first token':>14}{'per token':>12}{'tokens/s':>10}{'a device':>10}{report.currency + '/M':>9}{'kWh/M':>8}",
    ]
    for way in report.choices:
        apart = str(way.prefill_devices) if way.prefill_devices else "-"
        lines.append(
            f"{way.tp:>4}{way.pp:>4}{way.weights:>9}{way.cache:>7}{way.replicas:>10}{apart:>9}{way.sequences:>9}"
            f"{gib(way.memory_bytes):>7}{seconds(way.ttft_s.mid):>14}{seconds(way.tpot_s.mid):>12}"
            f"{count(way.tokens_per_s.mid):>10}{count(way.tokens_per_s_device):>10}"
            f"{_plain(way.money_per_million):>9}{_plain(way.kwh_per_million):>8}"
        )
    middle = report.choices[len(report.choices) // 2]
    lines += [
        "prefill: devices that do nothing else; at once: requests of each replica at a time.",
        "",
        f"tp={middle.tp},pp={middle.pp} with {middle.sequences} at once, 90 % intervals: first token "
        f"{within(middle.ttft_s, seconds)}; per token {within(middle.tpot_s, seconds)}",
    ]
    whole = sum(middle.parts.values())
    lines += [
        f"{seconds(spent):>10}{percent(spent / whole):>9}  {SPENT_ON[name]}"
        for name, spent in middle.parts.items()
        if spent > 0.005 * whole
    ]
    lines += ["", *report.worse]
    if report.sized:
        lines += ["", *_sized_in_words(report)]
    return "\n".join(lines)


def _sized_in_words(report: ServingReport) -> list[str]:
    best = report.sized[0]
    lines = [
        f"For {report.rate:g} requests a second, 95 of 100 in time (a scheduler simulated with requests at random):",
        f"{'devices':>9}{'tp':>4}{'pp':>4}{'weights':>9}{'cache':>7}{'replicas':>10}{'prefill':>9}{'a replica':>12}"
        f"{'first, p95':>12}{'token, p95':>12}{report.currency + '/M':>9}{'kWh/M':>8}",
    ]
    for way in report.sized:
        apart = str(way.prefill_devices) if way.prefill_devices else "-"
        lines.append(
            f"{way.devices:>9} {way.tp:>3}{way.pp:>4}{way.weights:>9}{way.cache:>7} {way.replicas:>9} {apart:>8} "
            f"{way.rate_per_replica:>9.3g}/s{seconds(way.ttft_p95_s):>12}{seconds(way.tpot_p95_s):>12}"
            f"{_number(way.money_per_million):>9}{_number(way.kwh_per_million):>8}"
        )
    together = min((way.devices for way in report.sized if not way.prefill_devices), default=None)
    apart_devices = min((way.devices for way in report.sized if way.prefill_devices), default=None)
    if together and apart_devices:
        better = (
            "Prefill on devices of its own takes fewer"
            if apart_devices < together
            else "Prefill on the same takes no more"
        )
        lines.append(f"{better}: {min(together, apart_devices)} devices against {max(together, apart_devices)}.")
    if best.devices > report.devices:
        lines.append(f"The cluster has {report.devices}: it is too small by {best.devices - report.devices}.")
    return lines


def _plain(estimate: Estimate | None) -> str:
    return "-" if estimate is None else count(estimate.mid)


def _number(value: float | None) -> str:
    return "-" if value is None else count(value)
