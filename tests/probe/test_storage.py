"""Disk and loader are measured where the run would use them, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

from argosy.parallel.world import World
from argosy.probe.storage import BLOCK_BYTES, measure_disk, measure_loader
from tiny import run_config


def test_the_disk_has_rates_and_keeps_no_file(tmp_path: Path) -> None:
    rates = measure_disk(World(), tmp_path, 2 * BLOCK_BYTES)
    assert 1e5 < rates.write_bytes_per_s < 1e12 and 1e5 < rates.read_bytes_per_s < 1e12
    assert not list(tmp_path.iterdir())


def test_the_loader_reads_the_run_s_data(corpus: Path) -> None:
    assert 1e4 < measure_loader(World(), run_config(corpus), 0.05) < 1e11


def test_without_prepared_data_it_reads_text_of_its_own(tmp_path: Path) -> None:
    assert 1e4 < measure_loader(World(), run_config(tmp_path / "none"), 0.1) < 1e11
    assert not list(tmp_path.iterdir())
