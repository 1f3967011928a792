"""Eight-bit moments and stochastic rounding: close, without bias, the same however rows are dealt."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from argosy.config.layers import preset_names
from argosy.errors import UserError
from argosy.models.experts import Experts
from argosy.models.layers import FeedForward, Linear
from argosy.models.microbatch import microbatches
from argosy.parallel import apply
from argosy.parallel.world import World
from argosy.plan.cost.exact_state import INT8_BLOCK
from argosy.plan.hardware.devices import find_device
from argosy.plan.parameters import feed_forward_table
from argosy.plan.plan import FP8, Plan
from argosy.precision import (
    SIGNED,
    UNSIGNED,
    LossScaler,
    check_fp8,
    dequantize,
    noise,
    places,
    quantize,
    round_to_bf16,
    takes_fp8,
    use_fp8,
)
from argosy.training.step import Step
from tiny import decoder, eager, gradients, laid_out, made_step, train_step

CPU = torch.device("cpu")


def whole(*shape: int) -> tuple[torch.Tensor, ...]:
    return places(shape, lambda tensor: tensor, CPU)


def lowbias32(x: int, before: int, midway: int) -> int:
    """The hash in plain integers."""
    x = (x ^ before) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = (x ^ midway) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_noise_is_the_hash_of_the_place(monkeypatch):
    monkeypatch.setattr("hashlib.blake2b", lambda *_, **__: FixedDigest)
    FixedDigest.value = (123).to_bytes(4, "little") + (2**31 + 5).to_bytes(4, "little")
    expected = [lowbias32(i, 123, 2**31 + 5) >> 12 for i in range(35)]
    assert noise(whole(5, 7), 20).flatten().tolist() == expected


class FixedDigest:
    value = b""

    @classmethod
    def digest(cls) -> bytes:
        return cls.value


@pytest.mark.parametrize(
    "cut", [lambda t: t[3:6], lambda t: t[:, 2:5], lambda t: t[1:3, 4:], lambda t: t[6:6], lambda t: t[:, :, 1:]]
)
def test_a_part_has_the_noise_of_its_place_in_the_whole(cut):
    shape = (6, 8, 3)
    assert torch.equal(noise(places(shape, cut, CPU), 16, 0, "w"), cut(noise(whole(*shape), 16, 0, "w")))


def test_places_beyond_32_bits_wrap_around():
    shape = (2**18, 2**16)
    rows, columns = places(shape, lambda t: t[-2:, -2:], CPU)
    expected = [(row * 2**16 + column) % 2**32 for row in (2**18 - 2, 2**18 - 1) for column in (2**16 - 2, 2**16 - 1)]
    assert ((rows + columns).flatten().to(torch.int64) % 2**32).tolist() == expected


def test_noise_is_uniform_and_another_key_gives_other_noise():
    first, second = (noise(whole(1000, 1000), 16, 7, step, "weight").float() for step in (1, 2))
    assert first.min() >= 0 and first.max() < 2**16
    counts = torch.histc(first, 64, 0, 2**16)
    assert ((counts - 1e6 / 64) ** 2 / (1e6 / 64)).sum() < 120  # chi squared of 63 degrees: 1 in 10^5
    for a, b in ((first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 5e-3


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-30, 0.0, 65504.0, 1.5])
def test_rounding_keeps_the_mean_and_takes_a_neighbour(value):
    x = torch.full((200_000,), value)
    rounded = round_to_bf16(x, noise(whole(200_000), 16, value)).float()
    assert rounded.double().mean().item() == pytest.approx(x[0].item(), rel=3e-5)
    below, above = (x.view(torch.int32) & ~0xFFFF).view(torch.float32), x.bfloat16().float()
    assert len(rounded.unique()) == (1 if torch.equal(below, x) else 2)
    assert (rounded - x).abs().max() <= 2**-7 * abs(value) and above[0] in rounded


CODES = pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])


def sample(code, *shape: int) -> torch.Tensor:
    """Numbers over seven orders of magnitude, as moments are, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 7 - 9)
    x[..., ::17] = 0
    return x if code.dtype.is_signed else x.square()


@CODES
@pytest.mark.parametrize("shape", [(5, 256), (3, 300), (2, 4, 1000), (4, 8), (0, 64), (64,), (3, 0), (1, 257)])
def test_what_was_saved_comes_back_bit_for_bit(code, shape):
    first = quantize(sample(code, *shape), code)
    again = quantize(dequantize(first), code)
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
    assert first.codes.shape == shape and dequantize(first).shape == shape


@CODES
def test_errors_are_small_next_to_the_number_or_to_the_block(code):
    x = sample(code, 64, 512)
    largest = x.view(64, 2, INT8_BLOCK).abs().amax(-1, keepdim=True).expand(64, 2, INT8_BLOCK).reshape_as(x)
    error = (dequantize(quantize(x, code)) - x).abs()
    assert torch.all(error <= x.abs() / 15 + largest * code.offset / 8)
    assert torch.equal(dequantize(quantize(x, code)).abs().view(64, 2, INT8_BLOCK).amax(-1), largest[:, ::INT8_BLOCK])


@CODES
def test_random_rounding_keeps_the_mean(code):
    x = sample(code, 1, 256)
    draws = 4000
    at = places((draws, 256), lambda tensor: tensor, x.device)
    many = dequantize(quantize(x.expand(draws, 256), code, noise(at, 20, 1))).double()
    spread = many.std(0) / draws**0.5
    off = (many.mean(0) - x.double()).abs()[0]
    if not code.dtype.is_signed:  # what is below the least code is lifted to it
        least = x.max() * code.offset / 8
        off = off * (x[0] > 2 * least)
    assert torch.all(off <= 5 * spread + 1e-6 * x.abs()[0])


def test_small_steps_of_a_mean_are_not_lost():
    """With beta2 = 0.999, rounding to the nearest would leave the second moment where it began for ever."""
    v = {random: torch.full((16, 256), 1.0) for random in (False, True)}
    at = places((16, 256), lambda tensor: tensor, torch.device("cpu"))
    for step in range(1000):
        for random, value in v.items():
            value[:, 0] = 1.0  # keeps the scale
            value[:, 1:] *= 0.999
            v[random] = dequantize(quantize(value, UNSIGNED, noise(at, 20, step) if random else None))
    assert v[True][:, 1:].mean().item() == pytest.approx(0.999**1000, rel=0.02)
    assert v[False][0, 1] == 1.0


def test_second_moments_never_become_zero_beside_larger_ones():
    v = torch.tensor([[1.0, 1e-9, 1e-20, 0.0]])
    least = dequantize(quantize(v, UNSIGNED)).sqrt().min().item()
    quantum = SIGNED.offset / 8
    assert least > quantum, "a first moment that was rounded up must not meet a second moment much below it"


@CODES
def test_zeros_stay_zeros(code):
    assert not dequantize(quantize(torch.zeros(3, 300), code)).any()


@CODES
def test_rows_have_the_codes_of_the_whole(code):
    x = sample(code, 8, 700)
    parts = [dequantize(quantize(part, code)) for part in x.split([3, 0, 5])]
    assert torch.equal(torch.cat(parts), dequantize(quantize(x, code)))


def test_memory_is_a_byte_for_each_element_and_a_scale_for_each_block():
    assert quantize(torch.ones(4, 512), SIGNED).nbytes == 4 * 512 + 4 * 2 * 4


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_overflow_halves_the_scale_and_drops_the_step(norm):
    scaler = LossScaler(scale=8.0)
    assert not scaler.update(norm)
    assert scaler.scale == 4.0


def test_scale_grows_after_as_many_good_steps_in_a_row():
    scaler = LossScaler(scale=8.0, growth_steps=3)
    for norm in (1.0, 1.0, float("inf"), 1.0, 1.0):
        scaler.update(norm)
    assert scaler.scale == 4.0
    assert scaler.update(1.0)
    assert scaler.scale == 8.0


def test_scale_does_not_fall_below_its_floor():
    scaler = LossScaler(scale=4.0, floor=2.0)
    assert not scaler.is_at_floor
    for _ in range(5):
        scaler.update(float("inf"))
    assert scaler.scale == 2.0 and scaler.is_at_floor


def test_scale_does_not_rise_above_its_ceiling_nor_resume_there():
    higher, scaler = (LossScaler(4.0, growth_steps=1, ceiling=ceiling) for ceiling in (64.0, 16.0))
    for _ in range(9):
        higher.update(1.0)
        scaler.update(1.0)
    assert (higher.scale, scaler.scale) == (64.0, 16.0)
    scaler.load_state(higher.state())
    assert scaler.scale == 16.0


def test_resumed_scaler_grows_when_the_first_would_have():
    first, resumed = LossScaler(growth_steps=4), LossScaler(growth_steps=4)
    for _ in range(3):
        first.update(1.0)
    resumed.load_state(first.state())
    for scaler in (first, resumed):
        scaler.update(1.0)
    assert first.scale == resumed.scale == 2.0**17


CUDA = torch.device("cuda", 0)


def pretend(monkeypatch, capability: tuple[int, int], torchao: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if torchao else None)


def test_cpu_is_refused():
    with pytest.raises(UserError, match=r"this one is cpu\. Try precision=bf16"):
        check_fp8(torch.device("cpu"))


@pytest.mark.parametrize("precision", FP8)
def test_older_gpu_is_refused_by_name(monkeypatch, precision):
    pretend(monkeypatch, (8, 0), torchao=True)
    with pytest.raises(UserError, match=rf"precision = {precision} needs .* NVIDIA A100 \(compute capability 8\.0\)"):
        check_fp8(CUDA, precision)


def test_missing_package_is_named_with_its_extra(monkeypatch):
    pretend(monkeypatch, (9, 0), torchao=False)
    with pytest.raises(UserError, match=r"argosy\[fp8\]"):
        check_fp8(CUDA)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_newer_gpu_with_the_package_is_taken(monkeypatch, capability):
    pretend(monkeypatch, capability, torchao=True)
    check_fp8(CUDA)


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_mxfp8_is_refused_where_no_matmul_takes_its_scales(monkeypatch, capability):
    pretend(monkeypatch, capability, torchao=True)
    with pytest.raises(UserError, match=r"mxfp8 needs .* compute capability 10 .* Try precision=fp8_rowwise"):
        check_fp8(CUDA, "mxfp8")


@pytest.mark.parametrize("name", preset_names("devices"))
def test_the_planner_and_the_start_refuse_alike(monkeypatch, name):
    device, experts = find_device(name), decoder(**BLOCKS, moe=EXPERTS["moe"] | {"expert_ffn_width": 128})
    if device.compute_capability is None:
        pytest.skip("the driver gives no compute capability")
    pretend(monkeypatch, divmod(round(10 * device.compute_capability), 10), torchao=True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device.name)
    monkeypatch.setattr("argosy.precision.fp8_product", lambda *_: None)
    monkeypatch.setattr("argosy.precision.mxfp8_product", lambda *_: None)
    for model, has_experts in ((nn.Sequential(Linear(128, 128)), False), (experts, True)):
        for precision in FP8:
            predicted = device.why_not_in(precision, has_experts)
            try:
                use_fp8(model, CUDA, precision)
            except UserError as error:
                assert predicted is not None and predicted.startswith(str(error).rpartition(" Try ")[0])
            else:
                assert predicted is None


def test_rows_that_fill_no_blocks_are_multiplied_in_bf16():
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    layer = nn.Sequential(Linear(64, 32, bias=False))
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = layer(x)
    use_fp8(layer, CPU, "mxfp8", emulate=True)
    assert torch.equal(layer(x), expected) and not torch.equal(layer(x[:32]), expected[:32])


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_experts_are_refused_where_torch_has_no_product_for_them(monkeypatch, capability):
    pretend(monkeypatch, capability, torchao=True)
    with pytest.raises(UserError, match=r"fp8_rowwise with experts needs .* 9\.0 \(Hopper\).*Try precision=bf16"):
        use_fp8(decoder(**EXPERTS), CUDA, "fp8_rowwise")


def test_experts_of_other_sizes_stay_as_they_are():
    for width, taken in ((64, True), (24, False)):
        model = decoder(**EXPERTS | {"moe": EXPERTS["moe"] | {"expert_ffn_width": width}})
        experts = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
        assert experts and all(takes_fp8(module, name) is taken for name, module in experts.items())


@pytest.mark.parametrize(
    ("name", "module", "taken"),
    [
        ("blocks.0.mlp.up", Linear(32, 64), True),
        ("blocks.0.mlp.up", Linear(32, 60), False),
        ("blocks.0.mlp.up", Linear(30, 64), False),
        ("blocks.0.mlp.router", Linear(32, 64), False),
        ("head", Linear(32, 64), False),
        ("blocks.0.mlp.up", nn.Linear(32, 64), False),  # its product cannot be replaced
        ("blocks.0.norm", nn.LayerNorm(32), False),
    ],
)
def test_hidden_linear_layers_of_fitting_sizes_take_fp8(name, module, taken):
    assert takes_fp8(module, name) is taken


def test_model_without_such_layers_is_refused():
    with pytest.raises(UserError, match="multiples of 16"):
        use_fp8(nn.Sequential(Linear(3, 5)), torch.device("cpu"), emulate=True)


def test_the_part_of_a_rank_must_fit(workers):
    for said in workers.run(4, refusal_of_tp, {"ffn_width": 32, "kv_heads": 4}):
        assert said.startswith("plan.precision = fp8 finds no linear layer whose sizes on a rank are multiples of 16.")


def refusal_of_tp(world: World, model: dict[str, Any]) -> str:
    with mock.patch.object(apply, "use_fp8", partial(use_fp8, emulate=True)), pytest.raises(UserError) as refused:
        laid_out(world, eager(f"tp={world.size},precision=fp8"), model=model)
    return str(refused.value)


@pytest.mark.parametrize("precision", FP8)
def test_converted_layers_round_and_keep_their_parameters(precision):
    if precision != "fp8_blockwise":
        pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    layer = FeedForward(feed_forward_table(128, 256))
    before = dict(layer.named_parameters())
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = layer(x).detach()
    use_fp8(layer, torch.device("cpu"), precision, emulate=True)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert 1e-3 < (y - expected).norm() / expected.norm() < 0.15
    y.sum().backward()
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert all(parameter.grad.dtype == torch.float32 for parameter in after.values())


def test_scales_of_rows_keep_small_rows_that_one_scale_loses():
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=generator).bfloat16()
    x[0] *= 1e7
    errors = []
    for precision in ("fp8", "fp8_rowwise"):
        layer = nn.Sequential(Linear(64, 32, bias=False))
        layer[0].weight.data = torch.randn(32, 64, generator=generator.manual_seed(1)).bfloat16()
        expected = layer(x)[1:]
        use_fp8(layer, CPU, precision, emulate=True)
        errors.append(((layer(x)[1:] - expected).norm() / expected.norm()).item())
    assert errors[0] > 0.9 and errors[1] < 0.06


SPLIT = {"width": 64, "ffn_width": 128, "head_width": 16, "qkv_bias": True, "ffn_bias": True}
"""Sizes of which two ranks have multiples of 16 each; matrices cut by outputs and by inputs have biases."""
BLOCKS = {"width": 128, "ffn_width": 256, "heads": 4, "kv_heads": 4, "head_width": 64}
"""Sizes of which two ranks have multiples of 128 each."""
EXPERTS = SPLIT | {"moe": {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 64, "shared_experts": 1}}
ROWS = np.sort(np.random.default_rng(0).integers(0, 400, (4, 33)).astype(np.int32), axis=1)


def emulated(
    world: World, precision: str, model: dict[str, Any] = SPLIT, steps: int = 10
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of steps in emulated fp8, split over the ranks, and the gradients of the first."""
    step = emulated_step(world, f"tp={world.size},precision={precision}", model)
    batch = list(microbatches(ROWS, 2, 0, CPU))
    step.forward_backward(batch)
    first = gradients(step.state.model)
    step.state.model.zero_gradients()
    return [made_step(step, batch, 0.2 / model["width"])[0] for _ in range(steps)], first


def emulated_step(world: World, plan: str, model: dict[str, Any]) -> Step:
    with mock.patch.object(apply, "use_fp8", partial(use_fp8, emulate=True)):
        return train_step(world, eager(plan), model=model)


@pytest.mark.parametrize(
    ("precision", "model"),
    [("fp8", SPLIT), ("fp8_rowwise", SPLIT), ("fp8_rowwise", EXPERTS), ("mxfp8", SPLIT), ("fp8_blockwise", BLOCKS)],
    ids=["whole", "rows", "experts", "parts of rows", "blocks"],
)
def test_layers_split_over_ranks_round_as_whole_ones_do(workers, precision, model):
    if precision != "fp8_blockwise":
        pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    ((_, exact),) = workers.run(1, emulated, "fp32", model, 0)
    ((whole_losses, whole),) = workers.run(1, emulated, precision, model)
    split_losses, split = workers.run(2, emulated, precision, model)[0]
    assert whole_losses[-1] < 0.7 * whole_losses[0]
    assert split_losses == pytest.approx(whole_losses, rel=5e-3)
    for name in (name for name, gradient in exact.items() if gradient.ndim >= 2):
        of_whole, of_split = ((g[name] - exact[name]).norm() / exact[name].norm() for g in (whole, split))
        assert 0.015 < of_split < 1.1 * of_whole, name  # in bf16 all are below 0.01


def losses_of(world: World, plan: str, model: dict[str, Any] = EXPERTS) -> list[float]:
    """The losses of ten steps on the same rows, which the ranks share."""
    step = emulated_step(world, plan, model)
    mine = ROWS[step.state.model.dp_rank :: Plan.parse(plan).dp]
    return [
        made_step(step, list(microbatches(mine, len(mine) // 2, 0, CPU)), 0.2 / model["width"])[0] for _ in range(10)
    ]


def test_experts_in_fp8_train_as_in_bf16(workers):
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    wide, narrow = (workers.run(1, losses_of, f"precision={precision}")[0] for precision in ("bf16", "fp8_rowwise"))
    assert wide[-1] < 0.7 * wide[0]
    assert narrow == pytest.approx(wide, rel=5e-3) and narrow != pytest.approx(wide, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("precision=mxfp8", SPLIT),
        ("dp_shard=2,zero=3,precision=mxfp8", SPLIT),
        ("dp_shard=2,zero=3,recompute=full,precision=fp8_blockwise", BLOCKS),
    ],
)
def test_dense_layers_with_scales_of_blocks_train_as_in_bf16(workers, plan, model):
    if model is not BLOCKS:
        pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    wide = workers.run(1, losses_of, "precision=bf16", model)[0]
    narrow = workers.run(Plan.parse(plan).world_size, losses_of, plan, model)[0]
    assert wide[-1] < 0.7 * wide[0]
    assert narrow == pytest.approx(wide, rel=5e-3) and narrow != pytest.approx(wide, rel=1e-5)


@pytest.mark.parametrize("plan", ["dp_shard=2", "dp_shard=2,ep=2", "dp_shard=2,tp=2,recompute=full", "dp_shard=2,pp=2"])
def test_weights_gathered_in_fp8_are_rounded_once(workers, plan):
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    plan, size = f"{plan},zero=3,microbatch=1,precision=fp8_rowwise", Plan.parse(plan).world_size
    wide, narrow = (workers.run(size, losses_of, f"{plan}{more}")[0] for more in ("", ",fp8_gather=true"))
    assert narrow[0] == wide[0]  # what only differs is too small for fp8
    assert narrow == pytest.approx(wide, rel=1e-3)


@pytest.mark.parametrize("zero", [1, 3])
def test_experts_on_several_ranks_are_in_fp8_as_on_one(workers, zero):
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    alone = workers.run(1, losses_of, "precision=fp8_rowwise")[0]
    shared = workers.run(2, losses_of, f"dp_shard=2,ep=2,zero={zero},precision=fp8_rowwise")[0]
    assert shared == pytest.approx(alone, rel=5e-3)
