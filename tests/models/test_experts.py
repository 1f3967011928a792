"""Experts: the same as each token's own sum, balance losses as published, and the load counted once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from argosy import compiler
from argosy.config.model import ModelConfig, MoEConfig
from argosy.matmul import dense_by_group
from argosy.models import experts as experts_module
from argosy.models.experts import (
    Load,
    MoE,
    counts_by_row,
    grouped_matmul,
    inverse,
    places_in_row,
    take_rows,
)

WIDTH, ROWS, TOKENS = 24, 3, 10
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3-moe": {"experts": 12, "experts_per_token": 5},
    "weights as scored": {"normalize_weights": False},
    "one expert a token": {"experts_per_token": 1, "normalize_weights": False},
    "all experts": {"experts_per_token": 8},
    "deepseek-v3": {
        "router": "sigmoid", "shared_experts": 2, "groups": 4, "top_groups": 2, "routed_scale": 2.5, "balance": "bias",
    },
}  # fmt: skip


def layer(seed: int = 0, **moe: Any) -> MoE:
    """A layer with weights large enough that a mistake shows, and biases that change who is chosen."""
    settings = {"experts": 8, "experts_per_token": 2, "expert_ffn_width": 16, "balance": "none"}
    settings |= {"aux_coefficient": 0.0} | moe
    module = MoE(ModelConfig(width=WIDTH, moe=MoEConfig.model_validate(settings)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
        if module.router.bias is not None:
            module.router.bias.normal_(std=0.2, generator=generator)
    return module


def inputs(rows: int = ROWS, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def scores(module: MoE, x_BTD: Tensor) -> Tensor:
    logits = x_BTD @ module.router.weight.T
    return logits.softmax(-1) if module.config.router == "softmax" else logits.sigmoid()


def chosen(module: MoE, scores_E: Tensor) -> list[int]:
    """The experts of one token, by sorting in Python."""
    moe = module.config
    by = (scores_E if module.router.bias is None else scores_E + module.router.bias).tolist()
    groups = [range(i, i + moe.experts // moe.groups) for i in range(0, moe.experts, moe.experts // moe.groups)]
    if moe.groups > 1:
        groups.sort(key=lambda group: -sum(sorted(by[i] for i in group)[-2:]))
    allowed = [i for group in groups[: moe.top_groups] for i in group]
    return sorted(allowed, key=lambda i: -by[i])[: moe.experts_per_token]


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (F.silu(gate @ x) * (up @ x))


def by_hand(module: MoE, x_BTD: Tensor, dropped: set[tuple[int, int, int]] = frozenset()) -> Tensor:  # type: ignore[assignment]
    """Token by token; `dropped`: (row, token, expert) that do not count."""
    moe, experts = module.config, module.experts
    y_BTD = torch.zeros_like(x_BTD)
    for b, t in torch.cartesian_prod(torch.arange(x_BTD.shape[0]), torch.arange(x_BTD.shape[1])).tolist():
        x, scores_E = x_BTD[b, t], scores(module, x_BTD[b, t])
        mine = chosen(module, scores_E.detach())
        total = scores_E[mine].sum() if moe.normalize_weights else 1.0
        parts = [
            moe.routed_scale * scores_E[i] / total * swiglu(x, experts.gate[i], experts.up[i], experts.down[i])
            for i in mine
            if (b, t, i) not in dropped
        ]
        if module.shared is not None:
            parts.append(swiglu(x, module.shared.gate.weight, module.shared.up.weight, module.shared.down.weight))
        if parts:
            y_BTD = y_BTD.index_put((torch.tensor(b), torch.tensor(t)), torch.stack(parts).sum(0))
    return y_BTD


def gradients(y: Tensor, module: MoE, x: Tensor) -> tuple[Tensor, ...]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    return torch.autograd.grad((y * weights).sum(), [x, *module.parameters()], materialize_grads=True)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_token_gets_the_weighted_sum_of_its_experts(kind):
    module, x = layer(**kind), inputs()
    y, expected = module(x), by_hand(module, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, module, x), gradients(expected, module, x), rtol=1e-4, atol=1e-5)


def test_experts_without_tokens_get_a_gradient_of_zero():
    module, x = layer(), inputs(rows=1, tokens=1)
    module(x).sum().backward()
    idle = [i for i in range(8) if not module.experts.down.grad[i].any()]
    assert len(idle) == 6 and all(weight.grad is not None for weight in module.parameters())


def test_the_router_computes_in_fp32_and_experts_in_the_inputs_dtype():
    module, x = layer(), inputs()
    x_bf16 = x.detach().bfloat16()
    exact, rounded = module.router(x_bf16.float()), module.router(x_bf16)
    assert torch.equal(exact.logits_BTE, rounded.logits_BTE) and torch.equal(exact.experts_BTK, rounded.experts_BTK)
    y = module(x_bf16)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x_bf16.float()), rtol=0.05, atol=0.1)
    y.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in module.parameters())


def test_a_tokens_result_does_not_depend_on_what_it_is_computed_with():
    module, x = layer(balance="aux", aux_coefficient=0.5, z_coefficient=0.1, capacity_factor=0.7), inputs()
    alone = torch.cat([module(row[None]) for row in x])
    torch.testing.assert_close(module(x), alone)
    together, apart = gradients(module(x), module, x), gradients(alone, module, x)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [{}, KINDS["deepseek-v3"], {"experts_per_token": 1}], ids=["top-2", "deepseek", "top-1"]
)
@pytest.mark.parametrize("factor", [0.1, 0.6, 1.0])
def test_a_capacity_drops_the_later_tokens_of_each_row(factor, kind):
    module, x = layer(**kind, capacity_factor=factor), inputs()
    moe = module.config
    capacity = math.ceil(factor * TOKENS * moe.experts_per_token / moe.experts)
    dropped, taken = set(), dict.fromkeys(((b, i) for b in range(ROWS) for i in range(moe.experts)), 0)
    for b in range(ROWS):
        for t in range(TOKENS):
            for i in chosen(module, scores(module, x[b, t]).detach()):
                taken[b, i] += 1
                if taken[b, i] > capacity:
                    dropped.add((b, t, i))
    assert dropped
    y, expected = module(x), by_hand(module, x, dropped)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, module, x), gradients(expected, module, x), rtol=1e-4, atol=1e-5)
    pairs = ROWS * TOKENS * moe.experts_per_token
    assert Load.of(module.take_load()).dropped_fraction == pytest.approx(len(dropped) / pairs)


def test_evaluation_drops_nothing():
    module, x = layer(capacity_factor=0.1), inputs()
    with torch.no_grad():
        torch.testing.assert_close(module(x), by_hand(module, x))


def balance_losses(module: MoE, x_BTD: Tensor) -> Tensor:
    """DeepSeek-V3's equations 17 to 20 for each row, times its tokens; and ST-MoE's z-loss for each token."""
    moe, total = module.config, torch.zeros(())
    for row in x_BTD:
        T, scores_TE = len(row), scores(module, row)
        f_E = torch.zeros(moe.experts)
        for scores_E in scores_TE.detach():
            f_E[chosen(module, scores_E)] += moe.experts / (moe.experts_per_token * T)
        P_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)
        total = total + T * moe.aux_coefficient * (f_E * P_E).sum()
        total = total + moe.z_coefficient * (row @ module.router.weight.T).logsumexp(-1).square().sum()
    return total


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        {"balance": "aux", "aux_coefficient": 0.5},
        {"z_coefficient": 0.3},
        {**KINDS["deepseek-v3"], "aux_coefficient": 0.5, "z_coefficient": 0.2},
    ],
    ids=["aux", "z", "both, deepseek"],
)
def test_balance_losses_join_the_gradients_with_the_factor_of_the_models_loss(kind, recomputed):
    module, x = layer(**kind), inputs()
    module.loss_weight = factor = 1 / 64
    expected = gradients(by_hand(module, x) * factor, module, x)
    balance = torch.autograd.grad(balance_losses(module, x) * factor, [x, *module.parameters()], materialize_grads=True)
    y = checkpoint(module, x, use_reentrant=False) if recomputed else module(x)
    joined = gradients(y * factor, module, x)
    assert max(float(g.abs().max()) for g in balance) > 1e-3
    expected = tuple(a + b for a, b in zip(expected, balance, strict=True))
    torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_load_is_counted_once_a_backward_and_not_in_evaluation(recomputed):
    module, counts_E = layer(balance="bias"), torch.zeros(8, dtype=torch.int64)
    for seed in (1, 2):
        x = inputs(seed=seed)
        y = checkpoint(module, x, use_reentrant=False) if recomputed else module(x)
        y.sum().backward()
        counts_E += module.router(x).experts_BTK.flatten().bincount(minlength=8)
        with torch.no_grad():
            module(x)
    load = Load.of(module.take_load())
    assert load.counts_E.tolist() == counts_E.tolist()
    mean_E = torch.stack([scores(module, inputs(seed=s)).detach().mean((0, 1)) for s in (1, 2)]).mean(0).double()
    torch.testing.assert_close(load.mean_scores_E, mean_E, rtol=1e-6, atol=1e-7)
    assert load.entropy == pytest.approx(float(-(mean_E * mean_E.log()).sum()), rel=1e-5)
    assert load.imbalance == pytest.approx(int(counts_E.max()) / (counts_E.sum().item() / 8))
    assert not module.take_load().any()


def test_compiled_parts_leave_the_load_and_the_gradients_as_they_are():
    module, x = layer(**KINDS["deepseek-v3"], z_coefficient=0.1), inputs()
    expected, load = gradients(module(x), module, x), module.take_load()
    compiler.load()
    y = torch.compile(module, backend="aot_eager")(x)
    torch.testing.assert_close(gradients(y, module, x), expected)
    torch.testing.assert_close(module.take_load(), load)


def test_biases_move_against_the_load_by_the_sign_alone():
    module = layer(balance="bias", bias_rate=0.25)
    module.router.bias.zero_()
    module.update_bias(torch.tensor([5.0, 3, 4, 4, 4, 4, 0, 8], dtype=torch.float64))
    assert module.router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0.25, -0.25]
    layer(balance="aux").update_bias(torch.ones(8))  # has none to move


def test_biases_make_an_uneven_load_even():
    module, x = layer(balance="bias", bias_rate=0.01), inputs(rows=8, tokens=64).detach() + 0.5
    module.router.bias.zero_()

    def imbalance() -> float:
        module(x.requires_grad_()).sum().backward()
        flat = module.take_load()
        module.update_bias(flat[:8])
        return Load.of(flat).imbalance

    before = imbalance()
    for _ in range(100):
        after = imbalance()
    assert before > 2 and after < 1.25


def test_biases_are_saved():
    assert "router.bias" in layer(balance="bias").state_dict()
    assert "router.bias" not in layer(balance="aux").state_dict()


def test_places_and_counts_are_those_of_a_walk_through_each_row():
    experts_BTK = torch.rand(4, 9, 6, generator=torch.Generator().manual_seed(0)).topk(3).indices
    places, counts = places_in_row(experts_BTK), counts_by_row(experts_BTK, 6)
    for b, row in enumerate(experts_BTK.flatten(1).tolist()):
        assert places[b].flatten().tolist() == [row[:i].count(expert) for i, expert in enumerate(row)]
        assert counts[b].tolist() == [row.count(expert) for expert in range(6)]


def test_taken_rows_bring_their_gradients_back():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([7, 2, 9, 0, 4, 1, 3, 5, 8, 6])  # each row twice; pairs 8 and 6 are left out below
    copies = inverse(order).view(5, 2)
    torch.testing.assert_close(take_rows(x, order // 2, copies), x[order // 2])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, order // 2, copies), x)
    assert torch.autograd.gradcheck(lambda x: take_rows(x, order[:8] // 2, copies, True), x)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 10], [10, 0, 0, 0]], ids=str)
def test_one_kernel_for_all_experts_is_the_same_as_one_after_the_other(counts):
    """On a CPU the kernel exists for bf16 alone, as here; the layer takes it on CUDA."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(10, 16), (4, 24, 16)]
    leaves = [(torch.randn(s, generator=generator) * 0.5).bfloat16().requires_grad_() for s in shapes]
    one, other = grouped_matmul(*leaves, torch.tensor(counts)), dense_by_group(*leaves, counts)
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(y.float().square().sum(), leaves) for y in (one, other)]
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token = 9 is more than experts = 8; try 8 or less"),
        ({"groups": 3}, r"groups = 3 does not divide experts = 8; try one of \[1, 2, 4, 8\]"),
        ({"groups": 2, "top_groups": 3}, "top_groups = 3 is more than groups = 2; try 2"),
        ({"groups": 8, "top_groups": 2}, "groups = 8 leaves 1 expert in a group.*try 4 or less"),
        ({"groups": 4, "experts_per_token": 3}, "experts_per_token = 3 is more than the 2.*try top_groups = 2"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_do(settings, message):
    with pytest.raises(ValidationError, match=message):
        MoEConfig.model_validate({"experts": 8} | settings)
    MoEConfig.model_validate(settings | {"experts": 0})


def test_a_model_without_a_layer_for_its_experts_is_refused():
    with pytest.raises(ValidationError, match=r"moe.first_dense_layers = 4 leaves none of layers = 4.*try 3 or less"):
        ModelConfig(layers=4, moe=MoEConfig(experts=8, first_dense_layers=4))


def test_a_capacity_drops_the_same_pairs_where_the_host_does_not_ask_how_many(monkeypatch):
    """On an accelerator they go to the last expert and count for nothing; here it does so on a CPU."""
    found = []
    for is_accelerator in (False, True):
        monkeypatch.setattr(experts_module, "is_accelerator", lambda _, answer=is_accelerator: answer)
        moe = layer(capacity_factor=0.6)
        x = inputs()
        y = moe(x)
        y.square().sum().backward()
        load = moe.take_load()
        assert load[-1] > 0, "something is dropped"
        found.append([y.detach(), x.grad, load, *(p.grad for p in moe.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
