"""Rates of the disk and the loader."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import argosy
from argosy.config.data import PrepareConfig
from argosy.config.schema import RunConfig
from argosy.data.loader import OpenData, open_data
from argosy.data.prepare import prepare
from argosy.errors import UserError
from argosy.files import sync
from argosy.parallel.world import World
from argosy.probe.compute import total

FILE_BYTES = 2**26
"""Bytes of each process's file, a multiple of BLOCK_BYTES."""
BLOCK_BYTES = 2**22
ROWS, SEQ_LEN = 64, 512
"""Batch and sequence length of the steps that are loaded if no run gives them."""


@dataclass(frozen=True)
class DiskRates:
    """Speed of the disk, all processes together."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def measure_disk(world: World, folder: Path, file_bytes: int) -> DiskRates:
    """Write a file in `folder` from each process at once, wait until the disk has it, and read it again.

    The system is asked to forget the file before it is read; if it keeps it (a disk in memory), memory is measured.
    """
    block = os.urandom(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        world.barrier()
        began = time.perf_counter()
        for _ in range(file_bytes // BLOCK_BYTES):
            file.write(block)
        sync(file)
        write_s = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        world.barrier()
        began = time.perf_counter()
        while file.read(BLOCK_BYTES):
            pass
        read_s = time.perf_counter() - began
    return DiskRates(total(world, file_bytes / write_s), total(world, file_bytes / read_s))


def measure_loader(world: World, run: RunConfig | None, budget_s: float) -> float:
    """Return the tokens per second of one loader on the first process, alone; the same number on all processes.

    The run's data if they are prepared, else this package's sources, prepared in a temporary folder.
    """
    rate = 0.0
    if world.is_first:
        rate = _rate_of_run(run, budget_s) or _rate_of_own_sources(budget_s)
    return total(world, rate)


def _rate_of_run(run: RunConfig | None, budget_s: float) -> float | None:
    if run is None:
        return None
    try:
        return _rate(open_data(run.data, run.seed, run.train.batches), budget_s)
    except UserError:  # not prepared yet: no reason to end a probe
        return None


def _rate_of_own_sources(budget_s: float) -> float:
    with tempfile.TemporaryDirectory(prefix="argosy-probe-") as folder:
        text = (str(Path(argosy.__file__).parent),)
        prepared = PrepareConfig(input=text, out=Path(folder), vocab_size=400, validation_fraction=0.1, processes=1)
        prepare(prepared)
        data = RunConfig.model_validate({"data": {"sources": {folder: 1.0}, "seq_len": SEQ_LEN}}).data
        return _rate(open_data(data, 0, ROWS), budget_s)


def _rate(data: OpenData, budget_s: float) -> float:
    loader = data.loader(slice(0, data.global_batch))
    loader.batch(0)  # the first steps open files and look up samples
    began, tokens, step = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < budget_s or not step:
        step += 1
        tokens += loader.batch(step).size
    loader.close()
    return tokens / elapsed
