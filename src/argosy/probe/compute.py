"""Rates of a device (matmuls, attention, memory, compression), of the host that launches its work, disk and loader.

All processes measure the same at the same time, as they would in training, and each figure is the mean over them.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

import argosy
from argosy import compiler
from argosy.accelerator import kind_of, synchronize
from argosy.config.data import PrepareConfig
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.config.sync import SyncConfig
from argosy.data.loader import OpenData, open_data
from argosy.data.prepare import prepare
from argosy.errors import UserError
from argosy.files import sync
from argosy.matmul import dense
from argosy.models.attention import Documents, packed_attention
from argosy.models.attention_kernels import products_are_faster
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.rope import place_table
from argosy.parallel.world import World
from argosy.plan.hardware.measurements import AttentionRate, CompressionRate, MatmulRate, four_digits
from argosy.plan.layer_spec import layer_spec
from argosy.plan.parameters import block_table
from argosy.plan.sync import COMPRESSED
from argosy.precision import FLOAT_DTYPES
from argosy.sync.compressor import BucketFacts, Compressor, Segment, SumTime
from argosy.sync.compressors import COMPRESSOR_OF

SAMPLE_S = 2e-3
"""Calls are timed together for at least this long: one alone may be shorter than a wait for the device."""
LONGEST_SLICE_S = 0.5
"""A measurement is repeated for at most this long: by then it is certain enough."""
FEWEST_CALLS, MOST_REPEATS = 3, 200
"""Number of samples."""


def seconds(call: Callable[[], object], device: torch.device, slice_s: float) -> float:
    """Return the seconds of one call, repeated for about `slice_s` (at least three times, after one that warms up).

    The lower quartile of the samples: other work on the machine can only make a sample slower.
    """
    calls = max(1, round(SAMPLE_S / _sample(call, device, 1)))
    samples: list[float] = []
    end = time.perf_counter() + slice_s
    while len(samples) < FEWEST_CALLS or (time.perf_counter() < end and len(samples) < MOST_REPEATS):
        samples.append(_sample(call, device, calls))
    return lower_quartile(samples)


def _sample(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the seconds of one of `calls` calls."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def total(world: World, value: float) -> float:
    """Return the sum of a figure over all processes, the same on all."""
    return four_digits(world.sum(torch.tensor(value, dtype=torch.float64, device=world.device)).item())


def mean(world: World, value: float) -> float:
    """Return the mean of a figure over all processes, the same on all."""
    return four_digits(total(world, value) / world.size)


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the sample that a quarter of the samples is below."""
    return float(np.quantile(samples, 0.25, method="lower"))


NumberFormat = Literal["fp32", "bf16", "fp16"]
Kind = Literal["square", "forward", "input_gradient", "weight_gradient"]

PROBED_FORMATS: dict[str, tuple[NumberFormat, ...]] = {"cpu": ("fp32", "bf16"), "accelerator": ("fp32", "bf16", "fp16")}
SQUARES = {"cpu": (512, 1024), "accelerator": (2048, 4096, 8192, 16384)}
MEMORY_COPY_BYTES = {"cpu": 2**27, "accelerator": 2**31}
"""Bytes: more than caches hold."""
SMALL = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "head_width": 16, "ffn_width": 32, "vocab_size": 32}
"""A layer whose arithmetic takes no time."""


@dataclass(frozen=True)
class Matmul:
    """One matmul to measure; the fields are as in `MatmulRate`."""

    m: int
    k: int
    n: int
    kind: Kind
    number_format: NumberFormat

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n


def matmuls_to_measure(model: ModelConfig, tokens: int, device: str) -> list[Matmul]:
    """Return large squares in each format of the device, then three matmuls for each weight of `model`, by size."""
    cases = [Matmul(n, n, n, "square", fmt) for fmt in PROBED_FORMATS[device] for n in SQUARES[device]]
    shapes = dict.fromkeys(_weights(model, tokens))
    for fmt in PROBED_FORMATS[device]:
        for rows, outputs, inputs in shapes:
            cases += [
                Matmul(rows, inputs, outputs, "forward", fmt),
                Matmul(rows, outputs, inputs, "input_gradient", fmt),
                Matmul(outputs, rows, inputs, "weight_gradient", fmt),
            ]
    return cases


def _weights(model: ModelConfig, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Return tokens, outputs and inputs of the model's weights; an expert has an even share of the tokens."""
    for layer in sorted({0, model.layers - 1}):  # the first layers may be dense, and the rest have experts
        for parameter in block_table(model, layer).values():
            if parameter.is_expert:
                _, outputs, inputs = parameter.shape
                yield max(1, tokens * model.moe.experts_per_token // model.moe.experts), outputs, inputs
            elif len(parameter.shape) == 2:
                outputs, inputs = parameter.shape
                yield tokens, outputs, inputs
    if model.vocab_size:
        yield tokens, model.vocab_size, model.width


def measure_matmuls(world: World, cases: Iterable[Matmul], slice_s: float) -> list[MatmulRate]:
    """Measure each rate, repeated for `slice_s`; leave out what would take longer at the rate of the one before."""
    rates: list[MatmulRate] = []
    newest: dict[NumberFormat, float] = {}
    for case in cases:
        if case.flops <= slice_s * newest.get(case.number_format, math.inf):
            newest[case.number_format] = rate = mean(world, case.flops / _matmul_s(world, case, slice_s))
            rates.append(MatmulRate(**vars(case), flops_per_s=rate))
    return rates


def _matmul_s(world: World, case: Matmul, slice_s: float) -> float:
    dtype, device = FLOAT_DTYPES[case.number_format], world.device

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device).to(dtype)

    # Laid out as autograd has them: the weight is [outputs, inputs], and a gradient's factor is transposed.
    if case.kind == "forward":
        a, b = matrix(case.m, case.k), matrix(case.n, case.k).T
    elif case.kind == "weight_gradient":
        a, b = matrix(case.k, case.m).T, matrix(case.k, case.n)
    else:
        a, b = matrix(case.m, case.k), matrix(case.k, case.n)
    world.barrier()
    return seconds(lambda: dense(a, b.mT), device, slice_s)


def measure_attention(world: World, model: ModelConfig, seq_len: int, slice_s: float) -> list[AttentionRate]:
    """Measure causal attention with the model's heads (latent attention: at the mean width of keys and values).

    Compiled where that makes it faster: steps are compiled unless their plan says otherwise.
    """
    mla = model.mla
    width = (mla.key_width + mla.value_width) // 2 if mla.kv_rank else model.head_width
    rates = []
    for fmt in PROBED_FORMATS[kind_of(world.device)]:
        shapes = [(1, seq_len, heads, width) for heads in (model.heads, model.kv_heads, model.kv_heads)]
        q, k, v = (torch.randn(s, device=world.device).to(FLOAT_DTYPES[fmt]).requires_grad_() for s in shapes)
        gradient = torch.ones_like(q)
        attend = packed_attention
        if products_are_faster(q):
            compiler.load()
            attend = torch.compile(packed_attention)
        y = attend(q, k, v, None)
        world.barrier()
        with torch.no_grad():
            forward_s = seconds(partial(attend, q.detach(), k.detach(), v.detach(), None), world.device, slice_s)
        world.barrier()
        backward_s = seconds(
            partial(torch.autograd.grad, y, (q, k, v), gradient, retain_graph=True), world.device, slice_s
        )
        flops = 2.0 * model.heads * seq_len**2 * width
        rates.append(
            AttentionRate(
                seq_len=seq_len,
                heads=model.heads,
                head_width=width,
                number_format=fmt,
                forward_flops_per_s=mean(world, flops / forward_s),
                backward_flops_per_s=mean(world, 2 * flops / backward_s),
            )
        )
    return rates


def measure_copy(world: World, slice_s: float) -> float:
    """Measure the bytes that a large copy reads and writes per second."""
    source = torch.ones(MEMORY_COPY_BYTES[kind_of(world.device)], dtype=torch.uint8, device=world.device)
    target = torch.zeros_like(source)
    world.barrier()
    return mean(world, 2 * len(source) / seconds(lambda: target.copy_(source), world.device, slice_s))


def measure_launch(world: World, slice_s: float) -> float:
    """Measure the host seconds of one operation on a single element."""
    one = torch.ones(1, device=world.device)
    world.barrier()
    return mean(world, seconds(lambda: one.add_(1), world.device, slice_s))


def measure_layer_host(world: World, slice_s: float) -> float:
    """Measure the host seconds of forward and backward of one dense layer, too small for the device to matter."""
    config = ModelConfig.model_validate(SMALL)
    decoder = Decoder(config)
    materialize(decoder, config, world.device, seed=0)
    x = torch.randn(1, 8, config.width, device=world.device)
    documents = Documents.of_rows(1, 8, world.device)
    places = layer_spec(config, 0).places
    assert places is not None
    rotary = tuple(part[None] for part in place_table(places, 8, world.device))

    def step() -> None:
        decoder.blocks["0"](x, rotary, documents).sum().backward()

    world.barrier()
    return mean(world, seconds(step, world.device, slice_s))


UPDATE_SIDE = 1024
"""A bucket of the usual 4 MiB is one square matrix."""


def measure_compression(world: World, slice_s: float) -> list[CompressionRate]:
    """Measure each word with the usual settings, each process in a group of its own, so that nothing is sent."""
    alone, _ = dist.new_subgroups(1)
    rates = []
    for word in COMPRESSED:
        compressor = COMPRESSOR_OF[word](SyncConfig())
        world.barrier()
        took_s = mean(world, _sum_s(compressor, alone, world.device, slice_s))
        rates.append(CompressionRate(sync=word, number_s=took_s / UPDATE_SIDE**2))
    return rates


def _sum_s(compressor: Compressor, group: dist.ProcessGroup, device: torch.device, slice_s: float) -> float:
    segment = Segment(1, UPDATE_SIDE, UPDATE_SIDE)
    bucket = BucketFacts(0, (segment,), compressor.memory([segment], device), seed=0)
    gradient = torch.randn(segment.elements, device=device)

    def one_sum() -> None:
        for work in compressor.sum(gradient.clone(), [group] * compressor.messages, bucket, SumTime()):
            work.wait()
        bucket.memory.commit()

    return seconds(one_sum, device, slice_s)


DISK_FILE_BYTES = 2**26
"""Bytes of each process's file, a multiple of DISK_BLOCK_BYTES."""
DISK_BLOCK_BYTES = 2**22
KERNEL_ROWS, SEQ_LEN = 64, 512
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
    block = os.urandom(DISK_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        world.barrier()
        began = time.perf_counter()
        for _ in range(file_bytes // DISK_BLOCK_BYTES):
            file.write(block)
        sync(file)
        write_s = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        world.barrier()
        began = time.perf_counter()
        while file.read(DISK_BLOCK_BYTES):
            pass
        read_s = time.perf_counter() - began
    return DiskRates(total(world, file_bytes / write_s), total(world, file_bytes / read_s))


def measure_loader(world: World, run: RunConfig | None, budget_s: float) -> float:
    """Return the tokens per second of one loader on the first process, alone; the same number on all processes.

    The run's data if they are prepared, else sources of this package, prepared in a temporary folder.
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
        text = (str(Path(argosy.__file__).parent / "data"),)  # all of them would take seconds, and read no faster
        prepared = PrepareConfig(input=text, out=Path(folder), vocab_size=400, validation_fraction=0.1, processes=1)
        prepare(prepared)
        data = RunConfig.model_validate({"data": {"sources": {folder: 1.0}, "seq_len": SEQ_LEN}}).data
        return _rate(open_data(data, 0, KERNEL_ROWS), budget_s)


def _rate(data: OpenData, budget_s: float) -> float:
    loader = data.loader(slice(0, data.global_batch))
    loader.batch(0)  # the first steps open files and look up samples
    began, tokens, step = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < budget_s or not step:
        step += 1
        tokens += loader.batch(step).size
    loader.close()
    return tokens / elapsed
