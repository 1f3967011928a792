"""Initial weights are a function of seed, name and place: whoever makes a part makes what the whole has there."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # there is no public way to see every tensor made

from argosy.config.model import ModelConfig
from argosy.models import initialize
from argosy.models.decoder import Decoder
from argosy.models.initialize import fill_initial, materialize, offset_of
from argosy.plan.parameters import Parameter

CONFIG = ModelConfig(
    layers=8, width=128, heads=4, kv_heads=2, head_width=32, ffn_width=256, vocab_size=512,
    family="qwen3", qk_norm=True, attention_bias=True,
)  # fmt: skip
UNIT = CONFIG.model_copy(update={"init_std": 1.0})
Q = "blocks.0.attention.q.weight"


def built(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole(name: str, shape: tuple[int, ...], seed: int = 0, config: ModelConfig = UNIT) -> Tensor:
    return box(name, shape, (0,) * len(shape), shape, seed, config)


def box(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], seed: int = 0, config=UNIT
) -> Tensor:
    part = torch.full(size, torch.nan)
    fill_initial(part, name, Parameter(shape), offset, config, seed)
    return part


def split_mix_64(state: int, index: int) -> int:
    """The `index`-th number after `state`, as Steele, Lea & Flood 2014 (figure 17) write it down."""
    mask = 2**64 - 1
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def by_hand(name: str, seed: int, index: int) -> float:
    """One standard normal number in double precision."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    bits = split_mix_64(key, index)
    return math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32)) * math.cos(2 * math.pi * (bits % 2**32) / 2**32)


def test_the_reference_generator_gives_the_published_numbers():
    """SplitMix64 from 1234567, as in the Java and the C program."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [split_mix_64(1234567, i) for i in range(4)] == published


@pytest.mark.parametrize(("name", "seed"), [(Q, 0), (Q, 123456789), ("head.weight", 3)])
def test_values_are_the_normal_numbers_of_the_reference_generator(name, seed):
    """A checkpoint of nothing but a seed: if these move, old seeds mean other models."""
    expected = [by_hand(name, seed, index) for index in range(400)]
    torch.testing.assert_close(whole(name, (10, 40), seed).flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_values_far_into_a_large_parameter_are_those_of_the_reference_too():
    shape, offset = (2**40, 2**20), (2**39 + 5, 77)
    expected = [[by_hand(Q, 0, row * 2**20 + column) for column in (77, 78)] for row in (2**39 + 5, 2**39 + 6)]
    torch.testing.assert_close(box(Q, shape, offset, (2, 2)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """A shape, and where in it a box begins and how large it is; empty ones too."""
    shape = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    begins = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - begin)) for size, begin in zip(shape, begins, strict=True)]
    return tuple(shape), tuple(begins), tuple(sizes)


@settings(max_examples=80, deadline=None)
@given(boxes(), st.sampled_from([2**20, 64, 7, 1]), st.integers(0, 2**64))
def test_any_part_is_bit_for_bit_what_the_whole_has_there_however_much_is_made_at_once(place, at_once, seed):
    shape, begins, sizes = place
    expected = whole("w.weight", shape, seed)
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        expected = expected.narrow(dim, begin, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialize, "ELEMENTS_AT_ONCE", at_once)
        assert torch.equal(box("w.weight", shape, begins, sizes, seed), expected)


def test_a_part_that_is_not_contiguous_is_filled_as_well():
    buffer = torch.zeros(6, 20)
    fill_initial(buffer[1:5, ::2], Q, Parameter((4, 10)), (0, 0), UNIT, 0)
    assert torch.equal(buffer[1:5, ::2], whole(Q, (4, 10)))
    assert not buffer[:, 1::2].any() and not buffer[::5].any()


def test_all_that_one_process_has_begins_at_the_start():
    assert offset_of(torch.empty(3, 4, device="meta")) == (0, 0)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made, `memory` and its parts aside."""

    def __init__(self, memory: Tensor):
        super().__init__()
        self.elements, self._address = 0, memory.data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != self._address:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("part", [(512, 40), (32, 16, 40), (2, 9000)], ids=str)
def test_no_more_is_made_at_once_than_a_little(part, monkeypatch):
    monkeypatch.setattr(initialize, "ELEMENTS_AT_ONCE", 1000)
    memory = torch.empty(part)
    with LargestTensor(memory) as largest:
        fill_initial(memory, "w.weight", Parameter(tuple(2 * size for size in part)), (0,) * len(part), UNIT, 0)
    assert 0 < largest.elements <= 1000


def test_the_same_seed_gives_the_same_bits_whatever_the_global_generator_holds():
    torch.manual_seed(1)
    first = built()
    torch.manual_seed(2)
    assert all(torch.equal(value, first[name]) for name, value in built().items())


def test_seeds_names_and_neighbours_are_not_correlated():
    names = (Q, "blocks.1.attention.q.weight", "blocks.0.attention.k.weight")
    values = [whole(name, (257, 256), seed) for name in names for seed in (0, 1)]
    values = [*(v[:256] for v in values), values[0][1:], values[0][:256].roll(1, dims=1)]  # rows and columns beside it
    correlations = torch.corrcoef(torch.stack([v.flatten() for v in values])) - torch.eye(len(values))
    assert correlations.abs().max() < 5 / 256


def test_values_are_normal():
    """Moments, and the share in each of 64 equally likely classes (chi-squared with 63 degrees, 1 in 10 000)."""
    values = whole(Q, (1000, 1000)).double().flatten()
    n = values.numel()
    assert abs(values.mean()) < 4 / n**0.5
    assert values.var().item() == pytest.approx(1, abs=4 * (2 / n) ** 0.5)
    assert (values**3).mean().item() == pytest.approx(0, abs=4 * (15 / n) ** 0.5)
    assert (values**4).mean().item() == pytest.approx(3, abs=4 * (96 / n) ** 0.5)
    classes = torch.histc(torch.special.ndtr(values), bins=64, min=0, max=1)
    assert ((classes - n / 64) ** 2 / (n / 64)).sum() < 110
    assert 4.2 < values.abs().max() < 6.8


def test_other_layers_do_not_change_a_weight():
    fewer = built(CONFIG.model_copy(update={"layers": 1, "vocab_size": 100}))
    assert torch.equal(fewer[Q], built()[Q])
    assert torch.equal(fewer["embedding.weight"], built()["embedding.weight"][:100])


BUILT = built()


@pytest.mark.parametrize("name", BUILT)
def test_each_weight_has_its_distribution(name):
    value = BUILT[name]
    if name.endswith("norm.weight"):
        assert (value == 1).all()
    elif name.endswith(".bias"):
        assert (value == 0).all()
    else:
        into_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
        std = CONFIG.init_std / (2 * CONFIG.layers) ** 0.5 if into_residual else CONFIG.init_std
        assert float(value.std()) == pytest.approx(std, rel=0.05)
        assert abs(float(value.mean())) < 4 * std / value.numel() ** 0.5


def test_every_parameter_gets_memory_and_a_finite_value_and_ties_hold():
    config = CONFIG.model_copy(update={"tie_embeddings": True})
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in model.parameters())
    logits = model(torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():
        model.embedding.weight[7] = 0
    assert logits[0, 0, 7] != 0 and model(torch.zeros(1, 1, dtype=torch.int64))[0, 0, 7] == 0
