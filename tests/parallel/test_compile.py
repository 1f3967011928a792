"""Compiled blocks compute what eager ones do."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from argosy import compiler
from argosy.models.decoder import Decoder
from argosy.models.microbatch import Microbatch, microbatches
from argosy.parallel.apply import compile_blocks
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from tiny import decoder, train_step

EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16}}
WINDOW = {"attention": {"layers": ["sliding", "full"], "window": 16}}


def batch(documents: int) -> Microbatch:
    """Four rows; the first is cut into `documents`."""
    rows = np.random.default_rng(documents).integers(1, 400, (4, 33))
    rows[0, 1:documents] = 0
    (micro,) = microbatches(rows, 4, end_of_document=0, device=torch.device("cpu"))
    return micro


def loss_and_gradients(model: Decoder, micro: Microbatch) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents) / micro.targets_BT.numel()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def test_compiled_blocks_give_the_losses_and_gradients_of_eager_ones_and_are_not_compiled_for_each_batch():
    compiled, eager = decoder(layers=1), decoder(layers=1)
    compile_blocks(compiled, enabled=True)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        compiled(batch(1).tokens_BT)  # or the blocks would not be compiled at all
    for documents in (1, 5):  # none starts inside a row, and some do
        _compare(loss_and_gradients(compiled, batch(documents)), loss_and_gradients(eager, batch(documents)))
    with torch.compiler.set_stance("fail_on_recompile"):
        _compare(loss_and_gradients(compiled, batch(9)), loss_and_gradients(eager, batch(9)))


def test_what_a_compiled_step_gives_does_not_depend_on_what_its_process_has_met_before():
    """A process that takes a run up in its middle meets its batches in another order than the one that began it."""
    found = []
    for order in ([1, 5, 6], [5, 6, 1], [6, 1, 5]):
        torch.compiler.reset()
        model = decoder(layers=1)
        compile_blocks(model, enabled=True)
        met = {documents: loss_and_gradients(model, batch(documents)) for documents in order}
        found.append([met[documents] for documents in sorted(order)])
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=0, atol=0)


def _compare(found: tuple[float, list[torch.Tensor]], expected: tuple[float, list[torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_blocks_of_any_number_of_kinds_are_compiled() -> None:
    torch.compiler.reset()
    model, graphs = decoder(layers=9, ffn_widths=[8 * layer for layer in range(1, 10)]), list[torch.fx.GraphModule]()

    def traced(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with patch("torch._inductor.compile_fx.compile_fx", traced):
        compile_blocks(model, enabled=True)
        model(batch(1).tokens_BT)
    assert len(graphs) == 9 + 1  # the last norm


def test_a_plan_without_compile_leaves_the_blocks_alone():
    model = decoder()
    compile_blocks(model, enabled=False)
    with torch.compiler.set_stance("fail_on_recompile"):
        loss_and_gradients(model, batch(1))


def graphs_by_step(world: World, plan: str, sections: dict[str, Any]) -> list[int]:
    """The graphs that each step gives to the compiler, whose own work is left out: rows have ever other documents."""
    torch.compiler.reset()
    compiler.load()
    graphs: list[torch.fx.GraphModule] = []

    def traced(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layout, found = Plan.parse(plan), []
    with patch("torch._inductor.compile_fx.compile_fx", traced):
        step = train_step(world, layout, **sections)
        for documents in (5, 6, 9, 3):
            before = len(graphs)
            rows = np.random.default_rng(documents).integers(1, 400, (8, 33)).astype(np.int32)
            rows[:, np.linspace(1, 30, documents - 1).astype(int)] = 0
            mine = rows[step.state.model.dp_rank * 8 // layout.dp :][: 8 // layout.dp]
            batch = microbatches(mine, layout.microbatch, 0, torch.device("cpu"))
            step.apply(step.update(step.exchange(step.forward_backward(batch)), learning_rate=1e-2))
            found.append(len(graphs) - before)
    return found


@pytest.mark.parametrize(
    ("plan", "sections"),
    [
        ("microbatch=4", {"model": WINDOW}),
        pytest.param("microbatch=4,recompute=full", {"lora": {"rank": 4}}, marks=pytest.mark.slow),
        ("tp=2,microbatch=4", {}),
        pytest.param("tp=2,microbatch=4,async_tp=true", {}, marks=pytest.mark.slow),
        ("pp=2,microbatch=2", {}),
        ("cp=2,microbatch=2", {}),
        ("dp_shard=2,zero=3,microbatch=2,recompute=full", {}),
        ("dp_shard=2,ep=2,microbatch=2", {"model": EXPERTS}),
    ],
)
def test_nothing_is_compiled_after_the_second_step(workers, plan, sections):
    for first, *_, third, fourth in workers.run(Plan.parse(plan).world_size, graphs_by_step, plan, sections):
        assert first > 0
        assert third == fourth == 0
