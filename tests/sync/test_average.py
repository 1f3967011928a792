"""Changes are encoded and summed piece by piece, as if at once; slices are dealt out evenly.

What is kept of past rounds.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from argosy.sync import average
from argosy.sync.average import RetainedAverages, Slices, encode_file, reduce_slice
from argosy.sync.layout import LeftChange, write_record
from argosy.sync.wire import WireFormat
from simulated_sites import Country


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_a_file_is_encoded_as_its_numbers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(average, "CHUNK_BLOCKS", 2)
    numbers = np.random.default_rng(0).standard_normal(5 * 256 + 7).astype(np.float32)
    numbers.tofile(tmp_path / "change")
    wire = WireFormat(name)
    encode_file(tmp_path / "change", wire, tmp_path / "sent")
    assert (tmp_path / "sent").read_bytes() == wire.encode(numbers).tobytes()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_the_mean_is_weighted_and_so_are_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(average, "CHUNK_BLOCKS", 2)
    wire = WireFormat(name)
    changes = np.random.default_rng(0).standard_normal((2, 5 * 256)).astype(np.float32)
    encoded = [wire.encode(change) for change in changes]
    found = reduce_slice(encoded, [1, 3], wire, tmp_path / "slice")
    data = (tmp_path / "slice").read_bytes()
    assert found.checksum == zlib.crc32(data)
    sent = np.stack([wire.decode(one) for one in encoded])
    mean = wire.decode(np.frombuffer(data, np.uint8))
    np.testing.assert_allclose(mean, (sent[0] + 3 * sent[1]) / 4, atol=0.02 if name == "int8" else 1e-6)
    np.testing.assert_allclose(found.products, sent @ sent.T, rtol=1e-5)


@pytest.mark.parametrize(("blocks", "sites", "each"), [(1, 3, 1), (3 << 10, 2, 1), (1 << 13, 2, 4), (1 << 20, 3, 8)])
def test_a_site_has_several_slices_of_what_is_large(blocks: int, sites: int, each: int) -> None:
    slices = Slices(blocks, 1024, sites)
    assert slices.parts == sites * each
    bounds = [slices.of(part) for part in range(slices.parts)]
    assert bounds[0][0] == 0 and bounds[-1][1] == blocks * 1024
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert [slices.owner(part) for part in range(slices.parts)].count(0) == each


def test_averages_are_kept_for_checkpoints_and_for_who_reads_them(country: Callable[..., Country]) -> None:
    run = country(names="AB", patience_s=5.0)
    run.start("A")
    sites = run.sites["A"].sites
    for number in range(10):
        sites.average(number).touch()
        sites.sent(number).touch()
    sites.state(7).touch()

    def averages() -> list[int]:
        return [number for number in range(10) if sites.average(number).exists()]

    kept = RetainedAverages(sites)
    kept.sweep(8)  # it did not take part: nothing is known
    assert averages() == list(range(10))
    assert [n for n in range(10) if sites.sent(n).exists()] == [9] and not sites.state(7).exists()
    write_record(sites.about(8), LeftChange(tokens=1, skipped=[], needs_round=6))
    kept.read("B", 4)
    sites.state(5).touch()
    kept.sweep(8)
    assert averages() == [4, 5, 6, 7, 8, 9] and sites.state(5).exists()
    run.now_s += 6.0  # nothing was read for sync.patience_s
    write_record(sites.about(8), LeftChange(tokens=1, skipped=[], needs_round=6))
    kept.sweep(8)
    assert averages() == [6, 7, 8, 9] and not sites.state(5).exists()
