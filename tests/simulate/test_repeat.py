"""What stands for repetitions that were not traced is what tracing them gives, to the last event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.plan.plan import Plan
from argosy.simulate import simulate as module
from argosy.simulate.record import (
    Change,
    Event,
    ForwardBegins,
    MemoryBlock,
    Operation,
    SendEvent,
    StepPlace,
    Trace,
    WaitEvent,
)
from argosy.simulate.repeat import grown, layers_alike
from argosy.simulate.simulate import simulate_rank
from tiny import LATENT, run_config

DENSE: dict[str, Any] = {"vocab_size": 403}
MOE = {"experts": 4, "expert_ffn_width": 16, "shared_experts": 1, "first_dense_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": {**DENSE, "tie_embeddings": True, "attention_bias": True, "qk_norm": True, "kv_heads": 1},
    "experts": {**DENSE, "moe": MOE},
    "unlike": {**DENSE, "attention": {"layers": ["sliding", "sliding", "full"], "window": 9, "kv_heads": [2, 2, 4]}},
    "latent": {**DENSE, **LATENT},
}


def content(trace: Trace) -> list[Any]:
    """All that happens; of memory, what it is for."""
    events = [(*e[:1], e.memory.category, e.where) if isinstance(e, Change) else (type(e), *e) for e in trace.events]
    return [dict(trace.before), *events]


@dataclass
class Made:
    """A step of n layers and m microbatches that is made by hand."""

    layers: int
    microbatches: int = 1
    events: list[Event] = field(default_factory=list)

    def trace(self) -> Trace:
        for _ in range(self.microbatches):
            self.events.append(ForwardBegins())
            for layer in range(self.layers):
                self.work("mm", "forward", layer, flops=100)
                self.events.append(Change(64, MemoryBlock("activations"), StepPlace("forward", layer)))
            for layer in reversed(range(self.layers)):
                self.work("mm", "backward", layer, flops=200)
                self.events.append(
                    SendEvent("reduce_scatter", "shard", 2, 32, 64, 1, None, StepPlace("backward", layer))
                )
        for layer in range(self.layers):
            self.events.append(WaitEvent(self.layers - 1 - layer, StepPlace("communication", None)))
            self.events.append(Change(4, MemoryBlock(), StepPlace("optimizer", None)))
        self.work("stack", "optimizer", None, moved_bytes=8 * self.layers)
        return Trace(Counter({"parameters": 10 + 7 * self.layers}), self.events)

    def work(self, name: str, phase: Any, layer: int | None, flops: int = 0, moved_bytes: int = 0) -> None:
        self.events.append(Operation(name, flops, moved_bytes, torch.float32, StepPlace(phase, layer)))


def test_layers_bytes_and_distances_grow_with_their_number() -> None:
    found = grown(Made(2).trace(), Made(3).trace(), more=6)
    assert found is not None and content(found) == content(Made(9).trace())


def test_what_does_not_repeat_is_not_guessed() -> None:
    longer = Made(3).trace()
    strange = Operation("surprise", 1, 1, torch.float32, StepPlace("forward", 1))
    assert grown(Made(2).trace(), Trace(longer.before, [*longer.events[:4], strange, *longer.events[4:]]), 5) is None
    other = [e._replace(flops=101) if isinstance(e, Operation) and e.where.layer == 2 else e for e in longer.events]
    found = grown(Made(2).trace(), Trace(longer.before, other), 5)
    assert found is None or content(found) != content(Made(8).trace())


QUICK = [("dense", "dp_shard=2,zero=1", 1, 1)]
SLOW = [
    ("dense", "dp_shard=2,zero=3", 1, 5),
    ("experts", "pp=2,zero=1", 0, 12),
    ("dense", "microbatch=2,recompute=full", 0, 5),
    ("dense", "recompute=selective,recompute_every=2", 0, 2),
    ("dense", "offload=all", 0, 2),
    ("dense", "dp_shard=2,zero=1,weights=bf16,reduce=bf16", 1, 2),
    ("dense", "dp_replicate=2,dp_shard=2,zero=3,recompute=full,precision=bf16", 0, 2),
    ("dense", "cp=2,tp=2,zero=0,recompute=full", 3, 2),
    ("dense", "cp=4,context=ulysses", 1, 1),
    ("dense", "pp=2", 0, 12),
    ("dense", "pp=2,dp_shard=2,zero=3", 3, 2),
    ("dense", "pp=2,tp=2,schedule=gpipe", 0, 8),
    ("dense", "pp=2,schedule=zbv", 0, 18),
    ("dense", "pp=2,schedule=dualpipev", 1, 18),
    ("dense", "pp=2,schedule=interleaved_1f1b", 1, 4),
    ("tied", "pp=2,tp=2,recompute=selective", 3, 2),
    ("experts", "dp_shard=4,ep=2", 1, 2),
    ("experts", "dp_shard=2,ep=2,tp=2,zero=2,recompute=full", 2, 2),
    ("latent", "dp_shard=2,tp=2,zero=3", 1, 2),
    ("unlike", "microbatch=2", 0, 2),
    ("unlike", "dp_shard=2,zero=3,recompute=full", 1, 2),
]


@pytest.mark.parametrize(
    ("model", "plan", "rank", "microbatches"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_a_few_layers_and_microbatches_give_the_trace_of_all(
    model: str, plan: str, rank: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Plan.parse(plan)
    monkeypatch.setattr(module, "WORTH_IT", 0)
    layers = 5 * layout.recompute_every * layout.pp * (3 if model == "unlike" else 1) + (model == "experts")
    run = run_config(
        Path("no data"),
        model={**MODELS[model], "layers": layers},
        train={"global_batch": microbatches * layout.dp * layout.microbatch},
    )
    traced: list[Any] = []
    really = module.traced

    def noted(plan: Plan, run: Any, rank: int, microbatches: int | None, layers: Any = None) -> Trace:
        traced.append(layers)
        return really(plan, run, rank, microbatches, layers)

    monkeypatch.setattr(module, "traced", noted)
    few, all_ = simulate_rank(layout, run, rank), really(layout, run, rank)
    assert content(few) == content(all_)
    if layers_alike(layout, run, rank) is not None:
        assert None not in traced, "it traced all layers"


def test_layers_that_may_differ_are_not_taken_for_alike() -> None:
    run = run_config(Path("no data"), model={**DENSE, "layers": 8})
    assert layers_alike(Plan(), run, 0) is not None
    assert layers_alike(Plan.parse("pp=2,schedule=zbv"), run, 0) is None
    assert layers_alike(Plan(), run_config(Path("no data"), optimizer={"kind": "muon"}), 0) is None


def test_layers_of_two_kinds_repeat_with_their_cycle() -> None:
    windows = {"layers": ["sliding", "sliding", "sliding", "full"], "window": 9}
    run = run_config(Path("no data"), model={**DENSE, "layers": 22, "attention": windows})
    found = layers_alike(Plan(), run, 0)
    assert found is not None and (found.first, found.period, found.times) == (0, 4, 5)
    experts = run_config(Path("no data"), model={**DENSE, "layers": 12, "moe": MOE | {"every": 2}})
    found = layers_alike(Plan(), experts, 0)
    assert found is not None and (found.first, found.period, found.times) == (0, 2, 6)


def test_layers_are_alike_where_each_fills_a_bucket_or_all_share_one() -> None:
    wide = {**DENSE, "layers": 8, "width": 256, "heads": 4, "head_width": 64, "kv_heads": 4}
    for ffn_width, bucket_mb, alike in ((64, 64, True), (64, 2, False), (2048, 1, True)):
        run = run_config(Path("no data"), model={**wide, "ffn_width": ffn_width})
        plan = Plan.parse(f"dp_replicate=2,bucket_mb={bucket_mb}")
        assert (layers_alike(plan, run, 0) is not None) == alike, (ffn_width, bucket_mb)
