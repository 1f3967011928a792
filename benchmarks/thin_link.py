"""Sites behind a thin link: tokens a second and bytes at the interfaces, for each way to agree, beside the prediction.

    python benchmarks/thin_link.py [--rate 100mbit] [--sites 2] [--ways int8,diloco] [--json FILE]

Each site is a network namespace whose link to the others is throttled with `tc tbf`; needs root and iproute2. The same
model and batch train with each way of `WAYS`: sums in every step, with PyTorch's DDP and its own hooks beside them;
rounds of sites, as `argosy train` runs them, with torchft's DiLoCo beside them (`--torchft PYTHON`, an interpreter that
has it). Bytes are those that the interface of the first site sent, headers and acknowledgements included; the formulas
count numbers and scales, so they are held against the interface's bytes without headers.

The prediction is the planner's, for a cluster that parts of `argosy probe` measured in the same run, over this link.
What it cannot know of this machine is learnt from one way of each kind, which is left out of the comparison: factors
for compute and optimizer from the first one, for sums in every step, and a site's own step from the first of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.config.sync import SiteConfig
from argosy.plan.calibration import reconcile
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.prediction import predict
from argosy.plan.cost.sites import bytes_of_step, exchange_s, updates_of
from argosy.plan.hardware.clusters import Cluster, Factor, SiteLink
from argosy.plan.plan import Plan
from thin_link_model import MODEL, ROWS, TOKENS, configuration
from thin_link_namespaces import (
    UNLIMITED,
    address,
    check_that_this_machine_can,
    inside,
    inside_by_name,
    sent,
    sites,
)

HERE = Path(__file__).parent
PORT, SERVER_PORT = 7100, 7200


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    kind: str
    """sync: a plan's words; hook: one of DDP's; sites: rounds of `argosy train`; async: its updates, with a parameter
    server at the first site, where a step is an update of each site; torchft."""
    words: str = ""
    """Of the plan; of a hook its name."""
    sync: dict[str, Any] = field(default_factory=dict)
    """Keys of the run file's `[sync]`."""
    rounds: int = 0
    ranks: int = 1
    """Processes of each site; they share its batch."""


STREAMING = {"every_steps": 50, "fragments": 5, "overlap_steps": 8, "wire": "int8"}

WAYS = {
    "exact": Way("sync", "sync=exact"),
    "bf16": Way("sync", "sync=bf16"),
    "int8": Way("sync", "sync=int8"),
    "int4": Way("sync", "sync=int4"),
    "sign": Way("sync", "sync=sign"),
    "topk 1 %": Way("sync", "sync=topk"),
    "powersgd rank 4": Way("sync", "sync=powersgd"),
    "exact, 2 ranks a site": Way("sync", "sync=exact", ranks=2),
    "tiers, 2 ranks a site": Way("sync", "sync=exact,sum_inside=2", ranks=2),
    "tiers int8, 2 ranks a site": Way("sync", "sync=int8,sum_inside=2", ranks=2),
    "DDP fp32": Way("hook", "none"),
    "DDP fp16 hook": Way("hook", "fp16"),
    "DDP PowerSGD hook": Way("hook", "powersgd"),
    "DiLoCo H=10": Way("sites", "sync=diloco", {"every_steps": 10}, rounds=4),
    "DiLoCo H=50": Way("sites", "sync=diloco", {"every_steps": 50}, rounds=2),
    "DiLoCo H=50, int8": Way("sites", "sync=diloco", {"every_steps": 50, "wire": "int8"}, rounds=2),
    "DiLoCo H=50, int4": Way("sites", "sync=diloco", {"every_steps": 50, "wire": "int4"}, rounds=2),
    "streaming DiLoCo H=50, int8": Way("sites", "sync=diloco", STREAMING, rounds=3),
    "DiLoCo H=250": Way("sites", "sync=diloco", {"every_steps": 250}, rounds=1),
    "asynchronous": Way("async", "sync=async", {"servers": [f"{address(0)}:{SERVER_PORT}"]}, rounds=20),
    "asynchronous, int8": Way(
        "async", "sync=async", {"servers": [f"{address(0)}:{SERVER_PORT}"], "wire": "int8"}, rounds=20
    ),
    "torchft DiLoCo H=50": Way("torchft", sync={"every_steps": 50}, rounds=2),
}
IN_EVERY_STEP = ("sync", "hook")
BEFORE_ROUNDS = 5
"""First steps of a run of sites that do not count, if it has one round only."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help=f"as tc has it, or {UNLIMITED}")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", default=",".join(WAYS).replace(", ", "+"), help="in an int8 round, + for the comma")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="an interpreter that has torchft")
    parser.add_argument("--json", type=Path, default=None, help="where all figures are written")
    options = parser.parse_args()
    check_that_this_machine_can()
    chosen = [name.replace("+", ", ") for name in options.ways.split(",")]
    if unknown := [name for name in chosen if name not in WAYS]:
        sys.exit(f"--ways: no way is called {unknown[0]!r}; there are: {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as folder, sites(options.sites, options.rate):
        lines = run_all(chosen, options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps({"rate": options.rate, "sites": options.sites, "ways": lines}, indent=1))
    print(table(lines, options))


def run_all(chosen: list[str], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure each way, and add what the planner says of it."""
    cluster = folder / "cluster.toml"
    lines = []
    for ranks in (1, 2):
        names = [name for name in chosen if WAYS[name].kind in IN_EVERY_STEP and WAYS[name].ranks == ranks]
        lines += in_every_step(names, options, cluster if ranks == 1 else None, ranks)
    rounds = [name for name in chosen if WAYS[name].kind in ("sites", "async")]
    if rounds:
        prepare(folder)
    for name in rounds:
        lines.append((of_rounds if WAYS[name].kind == "sites" else of_updates)(name, options, folder))
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    for name in chosen:
        if WAYS[name].kind == "torchft" and options.torchft:
            lines.append(of_torchft(name, options))
    if cluster.exists() and lines[0]["way"] == "exact":
        predict_all(lines, Cluster.load(cluster), options)
    return lines


def in_every_step(
    names: list[str], options: argparse.Namespace, cluster: Path | None, ranks: int
) -> list[dict[str, Any]]:
    if not names:
        return []
    ways = ";".join(f"{name}={WAYS[name].kind}:{WAYS[name].words}" for name in names)
    workers = [
        subprocess.Popen(
            inside(
                rank // ranks, sys.executable, str(HERE / "thin_link_worker.py"), "--rank", str(rank), "--ways", ways,
                "--size", str(ranks * options.sites), "--ranks", str(ranks), "--steps", str(options.steps),
                *(["--cluster", str(cluster)] if cluster else []),
            ),
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks * options.sites)
    ]  # fmt: skip
    lines = told_by(workers)
    if len(lines) < len(names):
        sys.exit(f"only {len(lines)} of {len(names)} ways were measured")
    return lines


def told_by(workers: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Return the lines of JSON that the first process prints; wait for all."""
    assert workers[0].stdout is not None
    lines = []
    for text in workers[0].stdout:
        print(text, end="", file=sys.stderr, flush=True)
        if text.startswith("{"):
            lines.append(json.loads(text))
    for worker in workers:
        worker.wait()
    return lines


# ---- rounds of sites ----------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Prepare text, and the secret that the sites share."""
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_text(secrets.token_hex(32))
    keys = {"vocab_size": MODEL["vocab_size"], "max_text_bytes": 4_000_000, "processes": 1}
    options = [word for key, value in keys.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    argosy = [sys.executable, "-m", "argosy"]
    subprocess.run([*argosy, "prepare", "builtin:python", "--out", "data", *options], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip


def of_rounds(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with `argosy train` at each site; steps are timed from the end of the first round, or of a few steps."""
    way, many = WAYS[name], options.sites
    run = f"run{abs(hash(name))}"
    steps = way.rounds * way.sync["every_steps"]
    (folder / f"{run}.toml").write_text(run_file(run, way, steps, many))
    before = sent(0)
    trains = [
        subprocess.Popen(
            inside(site, sys.executable, "-m", "argosy", "train", f"{run}.toml", "--site", f"site{site}"),
            cwd=folder, stdout=subprocess.DEVNULL, env=os.environ | {"ARGOSY_SECRET_FILE": str(folder / "secret")},
        )
        for site in range(many)
    ]  # fmt: skip
    codes = [train.wait() for train in trains]
    if any(codes):
        sys.exit(f"{name}: argosy train failed")
    crossed = sent(0).since(before, steps)
    metrics = (folder / "runs" / run / "sites/site0/metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if "loss" in line]
    first = way.sync["every_steps"] - 1 if way.rounds > 1 else BEFORE_ROUNDS
    step_s = (lines[-1]["time_s"] - lines[first]["time_s"]) / (len(lines) - 1 - first)
    inner_s = sorted(line["step_time_s"] for line in lines if "sites" not in line)[len(lines) // 2]
    waits = [line["sites"]["seconds"] for line in lines if "sites" in line][1 if way.rounds > 1 else 0 :]
    return {
        "way": name, "step_s": step_s, "sent_bytes": crossed.whole, "payload_bytes": crossed.payload,
        "inner_s": inner_s, "round_s": sum(waits) / len(waits),
    }  # fmt: skip


def of_updates(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train asynchronously; the first updates, of which each site makes one, do not count.

    A step is as many updates as there are sites; `pulled` says how often workers of other sites than the servers' took
    all weights in one: once before they begin, and after each of their updates.
    """
    way, many = WAYS[name], options.sites
    run, updates = f"run{abs(hash(name))}", (way.rounds + 1) * many
    (folder / f"{run}.toml").write_text(run_file(run, way, updates, many))
    before = sent(0)
    train = (sys.executable, "-m", "argosy", "train", f"{run}.toml", "--site")
    environment = os.environ | {"ARGOSY_SECRET_FILE": str(folder / "secret")}
    parts = [(0, "server-1"), *((site, f"site{site}") for site in range(many))]
    trains = [
        subprocess.Popen(inside(site, *train, part), cwd=folder, stdout=subprocess.DEVNULL, env=environment)
        for site, part in parts
    ]
    codes = [train.wait() for train in trains]
    if any(codes):
        sys.exit(f"{name}: argosy train failed")
    crossed = sent(0).since(before, way.rounds + 1)
    metrics = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if "loss" in line]
    took_s = lines[-1]["time_s"] - lines[many - 1]["time_s"]
    of_others = sum(line["sites"]["site"] != "site0" for line in lines)
    return {
        "way": name, "step_s": took_s / (len(lines) - many) * many, "sent_bytes": crossed.whole,
        "payload_bytes": crossed.payload, "pulled": (of_others + many - 1) / (way.rounds + 1),
    }  # fmt: skip


def run_file(name: str, way: Way, steps: int, many: int) -> str:
    is_async = way.kind == "async"
    tables = {
        "model": MODEL,
        "data": {"seq_len": TOKENS},
        "train": {"steps": steps, "global_batch": ROWS if is_async else ROWS * many},
        "evaluate": {"every_steps": 0, "tokens": 1000},
        "checkpoint": {"every_minutes": 0},
        "launch": {"processes": 1, "threads": 1},
        "resilience": {"node_check_s": 0},
        "sync": way.sync,
    }
    plan = f"microbatch={ROWS},compile=false,precision=fp32,{way.words}"
    lines = [f'name = "{name}"', f'plan = "{plan}"']
    for table_name, keys in tables.items():
        lines += [f"[{table_name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    lines += ["[data.sources]", "data = 1.0"]
    for at in range(many):
        lines += ["[[sites]]", f'name = "site{at}"']
        lines += [] if is_async else [f'address = "{address(at)}:{PORT}"']
    return "\n".join(lines) + "\n"


def of_torchft(name: str, options: argparse.Namespace) -> dict[str, Any]:
    way, before = WAYS[name], sent(0)
    workers = [
        subprocess.Popen(
            inside_by_name(
                site, options.torchft, str(HERE / "thin_link_torchft.py"), "--rank", str(site), "--sites",
                str(options.sites), "--every", str(way.sync["every_steps"]), "--rounds", str(way.rounds),
            ),
            stdout=subprocess.PIPE if site == 0 else subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parent / "src")},
        )
        for site in range(options.sites)
    ]  # fmt: skip
    lines = told_by(workers)
    if not lines:
        sys.exit(f"{name}: its process failed; does {options.torchft} have torchft, torch and pydantic?")
    return {"way": name, "step_s": lines[0]["step_s"], "sent_bytes": sent(0).since(before, lines[0]["steps"]).whole}


# ---- the planner ----------------------------------------------------------------------------------------------------


def predict_all(lines: list[dict[str, Any]], cluster: Cluster, options: argparse.Namespace) -> None:
    """Add the predicted step of each way, with factors learnt from the first."""
    run = configuration(options.sites)
    exact = plan_of(options.sites, WAYS["exact"].words)
    told = reconcile(predict(exact, run, cluster), exact, lines[0]["seconds"], 1.0, with_reserve=True).seconds
    parts = {"compute": "forward_backward", "optimizer": "optimizer", "rest": "rest"}
    ratios = {category: told[part].ratio or 1.0 for category, part in parts.items()}
    factors = {category: Factor(value=max(ratio, 1e-6), std=0.05 * ratio) for category, ratio in ratios.items()}
    learnt = cluster.model_copy(update={"factors": factors})
    of_rounds = next((line for line in lines if "inner_s" in line), None)
    for line in lines:
        line["is_learnt_from"] = line is lines[0] or line is of_rounds
        way = WAYS[line["way"]]
        if way.kind == "sync" and way.ranks == 1:
            line["predicted_s"] = float(predict(plan_of(options.sites, way.words), run, learnt).step_s.mid)
        elif way.kind == "sites":
            assert of_rounds is not None
            found = predicted_rounds(way, learnt, options.sites, of_rounds["inner_s"])
            line["predicted_s"], line["predicted_bytes"] = found
        elif way.kind == "async":
            line["predicted_s"], bytes_of_weights = predicted_updates(way, learnt, options.sites)
            line["predicted_bytes"] = line["pulled"] * bytes_of_weights


def predicted_rounds(way: Way, cluster: Cluster, many: int, step_s: float) -> tuple[float, float]:
    """Return the predicted step with its part of a round, and the bytes of numbers in it. step_s: of a site alone."""
    _, joined = at_sites(cluster, many)
    base = configuration(many)
    train = base.train.model_copy(update={"steps": way.rounds * way.sync["every_steps"]})
    sync = base.sync.model_copy(update=way.sync)
    run = base.model_copy(update={"sync": sync, "train": train, "sites": workers_of(joined)})
    return step_s + float(exchange_s(CostModel.of(run, joined), joined, step_s)), bytes_of_step(run)


def predicted_updates(way: Way, cluster: Cluster, many: int) -> tuple[float, float]:
    """Return the predicted time of `many` updates, and the bytes of the weights that a worker is sent for one."""
    here, joined = at_sites(cluster, many)
    base = configuration(1)
    sync = base.sync.model_copy(update=way.sync)
    run = base.model_copy(update={"sync": sync, "sites": workers_of(joined), "plan": way.words})
    found = updates_of(run, joined, float(predict(plan_of(1, ""), base, here).step_s.mid))
    return many * float(found.interval_s), found.received_bytes


def workers_of(cluster: Cluster) -> tuple[SiteConfig, ...]:
    return tuple(SiteConfig(name=name) for name in cluster.sites)


def at_sites(cluster: Cluster, many: int) -> tuple[Cluster, Cluster]:
    """Return one process of the cluster alone, and so many sites of one process each over its link."""
    group = cluster.groups[0]
    names = [f"site{at}" for at in range(many)]
    one = group.model_copy(update={"nodes": 1, "devices_per_node": 1})
    link = SiteLink(sites=(names[0], names[1]), bandwidth_bytes_per_s=group.link_bytes_per_s,
                    latency_s=group.device.link_latency_s)  # fmt: skip
    links = [link.model_copy(update={"sites": (names[0], other)}) for other in names[1:]]
    joined = cluster.model_copy(
        update={"groups": tuple(one.model_copy(update={"site": site}) for site in names), "links": tuple(links)}
    )
    return cluster.model_copy(update={"groups": (one,), "links": ()}), joined


def plan_of(replicas: int, words: str) -> Plan:
    head = f"dp_replicate={replicas}," if replicas > 1 else ""
    return Plan.parse(f"{head}microbatch={ROWS},compile=false,precision=fp32{',' if words else ''}{words}")


# ---- the table ------------------------------------------------------------------------------------------------------


def table(lines: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the Markdown of all figures."""
    first = lines[0]
    rows = [
        f"## {options.rate}, {options.sites} sites",
        "",
        "| | ms a step | tokens/s | MB sent | fewer bytes | speed | of an unlimited link | bytes against the formula "
        "| predicted ms | predicted against measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        step_s, crossed = line["step_s"], line["sent_bytes"]
        bytes_off = f"{line['payload_bytes'] / line['predicted_bytes'] - 1:+.1%}" if line.get("predicted_bytes") else ""
        predicted = line.get("predicted_s")
        off = f"{predicted / step_s - 1:+.0%}" if predicted and not line["is_learnt_from"] else ""
        cells = [
            line["way"],
            f"{step_s * 1e3:.0f}",
            f"{ROWS * TOKENS * options.sites / step_s:.0f}",
            f"{crossed / 1e6:.2f}",
            f"{first['sent_bytes'] / crossed:.1f}",
            f"{first['step_s'] / step_s:.1f}",
            f"{line['inner_s'] / step_s:.0%}" if "inner_s" in line else "",
            bytes_off,
            f"{predicted * 1e3:.0f}" if predicted else "",
            off,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
