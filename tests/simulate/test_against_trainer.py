"""A simulated step is the trainer's: under default settings the same operations and messages, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy.config.schema import RunConfig
from argosy.models.experts import Router
from argosy.parallel.world import World
from argosy.simulate.record import Operation, Recorder, SendEvent, Trace
from argosy.simulate.simulate import even_choice, traced
from argosy.training.step import Step
from tiny import SOURCES, eager, prepare_corpus, run_config, train_in
from workers import WorkerPool

EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16, "balance": "bias"}}
STEP = 2
"""The first whose moments were there in the step before."""

Operator = tuple[Any, ...]


VOTES = {("aten.zeros", 0, 4), ("aten.mul", 0, 12)}
"""A pipeline's ranks tell each other in their first step, which is the simulated one, what they will send."""


def operations(trace: Trace) -> list[Operator]:
    """What the device does and what is sent, in order, without what is gloo's own or a pipeline's first step's."""
    found: list[Operator] = []
    for event in trace.events:
        if isinstance(event, Operation):
            is_gloo = event.name == "aten.copy_" and bool(found) and found[-1][0] == "reduce_scatter"
            work = (event.name, event.flops, event.moved_bytes)
            found += [] if is_gloo or work in VOTES else [work]
        elif isinstance(event, SendEvent):
            found.append((event.kind, event.axis, event.sent_bytes, event.message_bytes))
    return found


@contextmanager
def recorded(recorder: Recorder, traces: list[Trace]) -> Iterator[None]:
    """The trainer's step number `STEP` is written down, from the batch to the end of its update."""
    forward_backward, apply = Step.forward_backward, Step.apply

    def begin(step: Step, batch: Any) -> Any:
        if step.state.step == STEP:
            recorder.begin(step.state.model.meshes.axis_of_groups())
        return forward_backward(step, batch)

    def end(step: Step, update: Any, norms: Any = None) -> None:
        apply(step, update, norms)
        if update.step == STEP:
            traces.append(recorder.end())

    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(Step, "forward_backward", begin)
        patch.setattr(Step, "apply", end)
        yield


def trained(world: World, plan: str, run: RunConfig, folder: Path) -> list[Operator]:
    """The operations of a real step on this rank, whose experts get as many tokens each."""
    traces: list[Trace] = []
    with pytest.MonkeyPatch.context() as patch, recorded(Recorder(), traces):
        patch.setattr(Router, "choose", lambda router, scores: even_choice(run.model.moe.experts_per_token, scores))
        train_in(world, run, eager(plan), folder)
    return operations(traces[0])


@pytest.fixture(scope="module")
def one_document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of which no sample has the end of a document: what attention does depends on where they are."""
    folder = tmp_path_factory.mktemp("one")
    text = "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.py"))[:8])
    (folder / "all.txt").write_text(text)
    return prepare_corpus(folder / "prepared", input=(str(folder / "all.txt"),))


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({}, "dp_replicate=2"),
        pytest.param(EXPERTS, "dp_shard=2,ep=2", marks=pytest.mark.slow),
        pytest.param({}, "dp_shard=2", marks=pytest.mark.slow),
        pytest.param({}, "", marks=pytest.mark.slow),
        pytest.param(EXPERTS, "pp=2,zero=1", marks=pytest.mark.slow),
        pytest.param({}, "dp_replicate=2,precision=fp16", marks=pytest.mark.slow),
        pytest.param({}, "tp=2", marks=pytest.mark.slow),
    ],
)
def test_a_simulated_step_does_what_the_trainer_does(
    workers: WorkerPool, one_document: Path, tmp_path: Path, model: dict[str, Any], plan: str
) -> None:
    run = run_config(one_document, model=model, train={"steps": STEP + 1}, evaluate={"every_steps": 0, "tokens": 600})
    layout = eager(plan)
    found = workers.run(layout.world_size, trained, plan, run, tmp_path)
    for rank, expected in enumerate(found):
        assert operations(traced(layout, run, rank)) == expected, f"rank {rank}"
