"""How fast the planner is: plans a second on one core, in columns and one at a time, and whole answers with imports.

    python benchmarks/planner/speed.py [--json]

Plans are all that the search lists for Llama 3 70B on 256 H100. Each gets its rules checked, its memory and its time,
whether it fits or not, and seconds are of processor time. Answers are whole commands, imports and printing included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.rules import breaks_any, first_problem
from argosy.plan.search.search import search

BAR_PER_S = 100_000
"""Fewest plans a second and core."""
BAR_S = 1.0
"""Most seconds of an answer."""
ONE_AT_A_TIME = 200
REPEATS = 3
ANSWERS = {
    "llama3-70b on 256 H100": "--model llama3-70b --cluster 256xh100 --global-batch 1024 --seq-len 8192",
    "llama3.1-405b on 16,384 H100": "--model llama3.1-405b --cluster 16384xh100 --global-batch 2048 --seq-len 8192",
    "deepseek-v3 on 2,048 H800": "--model deepseek-v3 --cluster 2048xh800 --global-batch 4096 --seq-len 4096",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    run = load(None, {"model.preset": "llama3-70b", "data.seq_len": 8192, "train.global_batch": 1024})
    costs = CostModel.of(run, Cluster.parse("256xh100"))
    plans = search(costs, {}).plans
    some = [plans.plan(row) for row in range(ONE_AT_A_TIME)]
    found = {
        "plans": len(plans),
        "plans_per_s": rate(len(plans), lambda: evaluate(costs, plans)),
        "plans_per_s_one_at_a_time": rate(len(some), lambda: evaluate_each(costs, some)),
        "search_plans_per_s": search_rate(costs),
        "answers_s": {name: answer_s(words) for name, words in ANSWERS.items()},
    }
    print(json.dumps(found, indent=2) if as_json else in_words(found))


def evaluate(costs: CostModel, plans: Layouts) -> None:
    """Compute rules, memory and time of all plans."""
    legal = ~np.broadcast_to(breaks_any(plans, costs.run), len(plans))
    assert legal.all()
    assert np.asarray(costs.predict_memory(plans).total).shape == legal.shape
    assert np.asarray(costs.predict_time(plans).total).shape == legal.shape


def evaluate_each(costs: CostModel, plans: Sequence[Plan]) -> None:
    """Compute the same for one plan at a time."""
    for plan in plans:
        assert first_problem(plan, costs.run) is None
        evaluate(costs, Layouts.of([plan]))


def rate(plans: int, work: Callable[[], object]) -> float:
    """Return plans a second of processor time, the best of some repeats."""
    return plans / min(processor_s(work) for _ in range(REPEATS))


def search_rate(costs: CostModel) -> float:
    """Return the plans that a whole search looks at in a second: listed, checked, memory; time of those that fit."""
    looked_at = search(costs, {}).looked_at
    return rate(looked_at, lambda: search(costs, {}))


def processor_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def answer_s(words: str) -> dict[str, float]:
    """Return the seconds of `argosy plan`, from the start of the process to its end, the best of some repeats.

    They are those on the clock, and those of the processor, which tell more on a busy machine.
    """
    command = [sys.executable, "-m", "argosy", "plan", *words.split()]

    def once() -> tuple[float, float]:
        began, used = time.perf_counter(), sum(os.times()[2:4])
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - began, sum(os.times()[2:4]) - used

    wall, processor = zip(*(once() for _ in range(REPEATS)), strict=True)
    return {"wall": min(wall), "processor": min(processor)}


def in_words(found: dict[str, Any]) -> str:
    lines = [
        f"{found['plans_per_s']:>12,.0f} plans a second and core: rules, memory, time (bar: {BAR_PER_S:,})",
        f"{found['plans_per_s_one_at_a_time']:>12,.0f} the same one at a time",
        f"{found['search_plans_per_s']:>12,.0f} in a search: listed and checked, and time only where memory allows",
        *(
            f"{s['wall']:>12.2f} s  argosy plan, {name} (bar: {BAR_S:g} s); {s['processor']:.2f} s of the processor"
            for name, s in found["answers_s"].items()
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
