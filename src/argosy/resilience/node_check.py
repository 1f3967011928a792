"""A node health check: does every core and GPU of this node compute and store the right values, and how fast?

Each core has a thread pinned to it, each GPU a thread of its own, and all work at once, as they will in training:

- *products* of matrices of whole numbers, small enough for every partial sum to be exact in the number format: any
  order of summation gives the same bits. Integer arithmetic, which uses none of the units under test, tells whether
  they are right (Freivalds 1977, "Probabilistic machines can use less running time"). Every product must have them.
- *memory*: patterns that depend on the address, or move one bit through all places, are written, copied and compared
  with the expected values, in more memory than caches hold.

Single cores may compute wrong results now and then, and with some data only: Hochschild et al. 2021, "Cores that don't
count"; Dixit et al. 2021, "Silent data corruptions at scale".
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from argosy.accelerator import count_here, free_bytes, kind_of, numbered, synchronize
from argosy.faults import fault
from argosy.plan.hardware.local_machine import read_memory
from argosy.plan.plan import measured_format
from argosy.precision import FLOAT_DTYPES
from argosy.processes.child import ChannelClosed, channel_to_parent
from argosy.resilience.node_health import Health, NodeCheckRequest, WrongResult

PRODUCT_SIDE = {"cpu": 512, "accelerator": 8192}
INNER_SIDE = 256
"""Products are of matrices [side, INNER_SIDE] and [INNER_SIDE, side]: the longest sums that are exact in bf16."""
CHECKED_ROWS = 512
"""Rows of a product that are checked at a time: 64-bit numbers take memory."""
CHECKED_MEMORY_BYTES = {"cpu": 2**26, "accelerator": 2**30}
"""Memory that is written and copied to, for each core or GPU; at most `MOST_MEMORY` of what is free."""
MOST_CORES_BYTES = 2**30
"""Memory that all cores test together: more than any cache."""
MOST_MEMORY = 1 / 8
CHUNK = {"cpu": 2**14, "accelerator": 2**22}
"""Words of a pattern that are written at a time: few enough for a core's cache, many enough to keep a GPU busy."""
ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio: neighbours' values differ in about half of their bits
BROKEN_GPU_WORDS = ("uncorrectable", "hardware stack error", "illegal instruction", "unspecified launch failure")
"""Words of CUDA errors that mean a broken GPU, rather than one that is in use or too small."""

Pattern = Callable[[Tensor], Tensor]
"""Addresses, in words -> the values to store there; int64."""
PATTERNS: dict[str, Pattern] = {
    "address": lambda at: at * ODD,
    "address inverted": lambda at: ~(at * ODD),
    "walking one": lambda at: torch.ones_like(at) << at % 64,
    "walking zero": lambda at: ~(torch.ones_like(at) << at % 64),
}


@dataclass(frozen=True)
class ComputeUnit:
    """A core or a GPU."""

    device: torch.device
    number: int
    memory_bytes: int
    """Memory that it is tested with."""

    @property
    def kind(self) -> str:
        return "core" if self.device.type == "cpu" else self.device.type

    def __str__(self) -> str:
        return f"core {self.number}" if self.device.type == "cpu" else str(self.device)


@dataclass(frozen=True)
class UnitResult:
    """The result of one test of a unit."""

    test: str
    """Its name in `Health.rates`, which follows the kind of the unit."""
    rate: float
    """The best rate: FLOP/s or bytes/s."""
    wrong: WrongResult | None


def main() -> None:
    """Check this node, tell the client, and end. Entry of the forked process."""
    client, request = channel_to_parent(), NodeCheckRequest.read()
    torch.set_num_threads(1)  # of each of the threads to come
    began_s = time.monotonic()
    try:
        health = check_node(units(request.gpus), request)
    except Exception as problem:
        broken = any(word in str(problem) for word in BROKEN_GPU_WORDS)
        text = f"{type(problem).__name__}: {problem}"
        wrong = (WrongResult("node", "node_check", text),) if broken else ()
        health = Health(wrong, {}, round(time.monotonic() - began_s, 3), "" if broken else text)
    with suppress(ChannelClosed):  # its agent is gone: the run was stopped meanwhile
        client.send("node_checked", health=asdict(health))


def units(gpus: int) -> list[ComputeUnit]:
    """Return the cores that this process may use, and up to `gpus` GPUs, if torch has any."""
    cores = sorted(os.sched_getaffinity(0))
    available = read_memory().available_bytes
    of_core = int(min(CHECKED_MEMORY_BYTES["cpu"], MOST_CORES_BYTES / len(cores), MOST_MEMORY * available / len(cores)))
    found = [ComputeUnit(torch.device("cpu"), core, of_core) for core in cores]
    for number in range(min(gpus, count_here())):
        device = numbered(number)
        of_gpu = int(min(CHECKED_MEMORY_BYTES["accelerator"], MOST_MEMORY * free_bytes(device)))
        found.append(ComputeUnit(device, number, of_gpu))
    return found


def check_node(some: Iterable[ComputeUnit], request: NodeCheckRequest) -> Health:
    """Test all units at once, for `request.seconds`: an equal part for each test, and at least one try."""
    chosen, began_s = list(some), time.monotonic()
    with ThreadPoolExecutor(len(chosen)) as threads:
        of_units = list(threads.map(partial(_check_unit, request=request), chosen))
    rates: dict[str, float] = {}
    for unit, found in zip(chosen, of_units, strict=True):
        for test in found:
            what = f"{unit.kind} {test.test}"
            rates[what] = min(rates.get(what, math.inf), float(f"{test.rate:.3g}"))
    wrong = tuple(test.wrong for found in of_units for test in found if test.wrong is not None)
    return Health(wrong, rates, round(time.monotonic() - began_s, 3))


def _check_unit(unit: ComputeUnit, request: NodeCheckRequest) -> list[UnitResult]:
    if unit.device.type == "cpu":
        os.sched_setaffinity(0, {unit.number})  # of this thread alone
    formats = dict.fromkeys(["fp32", measured_format(request.number_format)])
    share_s = request.seconds / (len(formats) + 1)
    return [*(multiply(unit, number_format, share_s) for number_format in formats), remember(unit, share_s)]


# ---- products ---------------------------------------------------------------------------------------------------


def multiply(unit: ComputeUnit, number_format: str, seconds: float) -> UnitResult:
    """Multiply the same two matrices repeatedly: the bits of every product are known."""
    test, dtype = f"{number_format} product", FLOAT_DTYPES[number_format]
    seed = int.from_bytes(os.urandom(4), "little")  # some faults need special data: others each time
    a, b = factors(PRODUCT_SIDE[kind_of(unit.device)], dtype, unit.device, seed)
    exact = a @ b  # warms up, too
    if (problem := wrong_number(a, b, exact)) is not None:
        return UnitResult(test, 0.0, WrongResult(str(unit), test, problem))
    product, best_s, done, wrong = torch.empty_like(exact), math.inf, 0, 0
    for _ in _until(seconds):
        took_s = _seconds(unit, partial(torch.mm, a, b, out=product), test, product)
        best_s, done = min(best_s, took_s), done + 1
        if not torch.equal(_bytes(product), _bytes(exact)):
            problem, wrong = problem or _difference(product, exact, 0), wrong + 1
    found = WrongResult(str(unit), test, problem, wrong, done) if problem is not None else None
    return UnitResult(test, 2.0 * a.numel() * b.shape[1] / best_s, found)


def factors(side: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return matrices [side, INNER_SIDE] and [INNER_SIDE, side] of whole numbers.

    Their product is exact in `dtype`, in any order of its sums: all whole numbers up to 2 / eps are exact, and no
    partial sum is larger than that.
    """
    largest = math.isqrt(int(2 / torch.finfo(dtype).eps) // INNER_SIDE)
    seeded = torch.Generator().manual_seed(seed)
    shapes = (side, INNER_SIDE), (INNER_SIDE, side)
    a, b = (torch.randint(-largest, largest + 1, shape, generator=seeded) for shape in shapes)
    return a.to(device, dtype), b.to(device, dtype)


def wrong_number(a: Tensor, b: Tensor, product: Tensor) -> str | None:
    """Return a wrong number of the product of two matrices of whole numbers, by integer arithmetic alone; None if none.

    Freivalds' check: product x = a (b x), modulo 2**64. With odd x, a row with one wrong number is always found, and a
    row with several is missed with a chance of about 2**-62.
    """
    seeded = torch.Generator().manual_seed(1)
    x = torch.randint(-(2**62), 2**62, (product.shape[1],), generator=seeded).to(product.device) | 1
    expected = (a.long() * (b.long() * x).sum(1)).sum(1)
    for first in range(0, len(product), CHECKED_ROWS):
        rows = product[first : first + CHECKED_ROWS]
        whole = rows.long()
        wrong = (whole * x).sum(1) != expected[first : first + CHECKED_ROWS]
        wrong |= (whole.to(rows.dtype) != rows).any(1)  # no whole number, or no number at all
        if wrong.any():
            row = first + int(wrong.nonzero()[0])
            exact = (a[row].long()[:, None] * b.long()).sum(0).to(product.dtype)
            return _difference(product[row : row + 1], exact[None], row)
    return None


def _difference(found: Tensor, expected: Tensor, first_row: int) -> str:
    """Describe the first number that differs in any bit, in rows of a matrix from `first_row` on."""
    row, byte = (_bytes(found) != _bytes(expected)).nonzero()[0].tolist()
    column = byte // found.element_size()
    numbers = f"{found[row, column].item():.9g}, not {expected[row, column].item():.9g}"
    return f"{numbers}, at [{first_row + row}, {column}]"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


# ---- memory -----------------------------------------------------------------------------------------------------


def remember(unit: ComputeUnit, seconds: float) -> UnitResult:
    """Write a pattern, copy it, and compare the copy, pattern after pattern."""
    chunk = torch.arange(CHUNK[kind_of(unit.device)], device=unit.device)
    chunks = max(1, unit.memory_bytes // (2 * 8 * len(chunk)))
    source, target = torch.zeros(2, chunks, len(chunk), dtype=torch.int64, device=unit.device)
    best_s, done, wrong, problem = math.inf, 0, 0, ""
    for _, (name, pattern) in zip(_until(seconds), cycle(PATTERNS.items()), strict=False):
        for number, words in enumerate(source):
            words.copy_(pattern(chunk + number * len(chunk)))
        took_s = _seconds(unit, partial(target.copy_, source), "memory", target)
        best_s, done = min(best_s, took_s), done + 1
        if (forgotten := _forgotten(pattern, target, chunk)) is not None:
            problem, wrong = problem or f"{forgotten} ({name})", wrong + 1
    found = WrongResult(str(unit), "memory", problem, wrong, done) if problem else None
    return UnitResult("memory", 2.0 * source.nbytes / best_s, found)


def _forgotten(pattern: Pattern, memory: Tensor, chunk: Tensor) -> str | None:
    """Describe the first word of `memory` [chunks, words of a chunk] that differs from the pattern, if any does."""
    for number, found in enumerate(memory):
        expected = pattern(chunk + number * len(chunk))
        if not torch.equal(found, expected):
            word = int((found != expected).nonzero()[0])
            words = f"{_hexadecimal(found[word])}, not {_hexadecimal(expected[word])}"
            return f"{words}, at byte {8 * (number * len(chunk) + word)}"
    return None


def _hexadecimal(word: Tensor) -> str:
    return f"{int(word) % 2**64:#018x}"


# ---- parts ------------------------------------------------------------------------------------------------------


def _until(seconds: float) -> Iterator[None]:
    """Yield at least once, and again until this time has passed."""
    end_s = time.monotonic() + seconds
    yield
    while time.monotonic() < end_s:
        yield


def _seconds(unit: ComputeUnit, call: Callable[[], object], test: str, result: Tensor) -> float:
    """Return how long it takes; for a core its CPU time, as other processes use the core too."""
    clock = time.thread_time if unit.device.type == "cpu" else time.perf_counter
    synchronize(unit.device)
    began_s = clock()
    call()
    synchronize(unit.device)
    took_s = clock() - began_s
    fault("node_check", tensors=lambda: {f"{unit} {test}": result})
    return took_s
