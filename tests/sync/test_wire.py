"""What travels between sites is what was meant, to the precision of its format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.sync.wire import WIRE_BLOCK, Flat, WireFormat, flats_of


def numbers(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(0, 1e-3, n).astype(np.float32)


@pytest.mark.parametrize("n", [1, WIRE_BLOCK, WIRE_BLOCK + 1, 10 * WIRE_BLOCK - 7])
@pytest.mark.parametrize(("name", "levels"), [("fp32", None), ("bf16", None), ("int8", 127), ("int4", 7)])
def test_each_number_comes_back_within_half_a_level(name: str, levels: int | None, n: int) -> None:
    wire, given = WireFormat(name), numbers(n)
    data = wire.encode(given)
    assert len(data) == wire.blocks(n) * wire.block_bytes
    back = wire.decode(data)[:n]
    if name == "fp32":
        assert np.array_equal(back, given)
    elif name == "bf16":
        assert np.array_equal(back, torch.from_numpy(given).bfloat16().float().numpy())
    else:
        padded = np.zeros(wire.blocks(n) * WIRE_BLOCK, np.float32)
        padded[:n] = np.abs(given)
        level = np.repeat(padded.reshape(-1, WIRE_BLOCK).max(axis=1) / levels, WIRE_BLOCK)[:n]
        assert (np.abs(back - given) <= 0.501 * level).all()
        assert np.array_equal(wire.decode(wire.encode(wire.decode(data)))[:n], back)


def test_int8_sends_a_quarter_and_int4_an_eighth() -> None:
    given = numbers(100 * WIRE_BLOCK)
    sizes = {name: len(WireFormat(name).encode(given)) for name in ("fp32", "bf16", "int8", "int4")}
    assert sizes["fp32"] / sizes["bf16"] == 2
    assert sizes["fp32"] / sizes["int8"] > 3.9
    assert sizes["fp32"] / sizes["int4"] > 7.7


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_what_is_no_number_does_not_become_one(name: str) -> None:
    given = numbers(2 * WIRE_BLOCK)
    given[3] = np.nan
    back = WireFormat(name).decode(WireFormat(name).encode(given))
    assert not np.isfinite(back[:WIRE_BLOCK]).all() and np.isfinite(back[WIRE_BLOCK:]).all()


def test_any_box_is_read_from_its_place() -> None:
    shapes = {"a": (7, 90), "b": (33,), "blocks.0.c": (5, 4, 60)}
    flat = Flat(shapes)
    vector = np.arange(flat.elements, dtype=np.float32)
    wire = WireFormat("fp32")
    blob = wire.encode(vector)
    for name, offset, shape in [
        ("a", (0, 0), (7, 90)), ("a", (3, 10), (2, 50)), ("b", (30,), (3,)), ("blocks.0.c", (1, 2, 7), (4, 1, 9)),
    ]:  # fmt: skip
        assert np.array_equal(flat.read(blob, wire, name, offset, shape), flat.part(vector, name, offset, shape))


def test_fragments_hold_each_parameter_once() -> None:
    shapes = {"embedding.weight": (4, 4), **{f"blocks.{i}.w": (2, 2) for i in range(5)}, "norm.weight": (4,)}
    parts = flats_of(shapes, 3)
    assert sorted(name for part in parts for name in part.shapes) == sorted(shapes)
    assert set(parts[1].shapes) >= {"blocks.1.w", "blocks.4.w"}
    assert flats_of(shapes, 1)[0].shapes == shapes
