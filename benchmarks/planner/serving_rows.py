"""Published measurements of serving, read into what the model of serving takes: model, device, cut, formats, traffic.

The columns are those of `inference.csv`. What a source says outside of its rows (its engine's version, whether its
batches are fixed, which device it means) is in `SOURCES`. Rows that cannot be read so are skipped, each with the
reason.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.errors import UserError
from argosy.plan.cost.inference import (
    CHUNK_TOKENS,
    Formats,
    Latencies,
    ReplicaCut,
    ServingLoad,
    ServingModel,
    ServingOptions,
)
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.serving_constants import ServingConstants, ServingEngine
from argosy.plan.hardware.devices import Device, Format, find_device
from argosy.plan.quantities import stack
from argosy.plan.workload import Workload

Floats = NDArray[np.float64]

COLUMNS = (
    "source", "model", "params_b", "device", "devices", "tp", "pp", "precision", "batch_or_concurrency", "input_len",
    "output_len", "metric", "value", "unit",
)  # fmt: skip
NEEDED = ("model", "device", "batch_or_concurrency", "input_len", "metric", "value")
"""Columns that a file has to have; others may be left out, as cells of theirs may be empty."""
TIMES = ("ttft", "tpot", "e2e_latency")
"""Metrics that bars hold for; others are throughputs, in tokens/s."""
MODELS = Path(__file__).parent / "serving_models.csv"
"""Sizes of models. Of layers that hold a mixer or a feed-forward each (Nemotron Nano), two count as one, and what Mamba
layers have more is in the width of feed-forwards without experts."""
MOST_SEQUENCES = 4096
"""Sequences at a time where a source says "max": what trtllm-bench allows (finetune_setting)."""
PUBLISHERS = ("docs.vultr", "docs.nvidia.com/nim", "buildkite", "ROCm", "dstackai")
"""Publishers, by how addresses of their pages begin; others are named by the first word of a source."""


@dataclass(frozen=True)
class Source:
    """What a source says outside of its rows."""

    version: tuple[int, int] | None = None
    """Release of its engine."""
    engine: str = ""
    """Its engine, where its name does not say."""
    fixed: bool = False
    """Batches are fixed: all sequences begin together."""
    devices: tuple[tuple[str, str], ...] = ()
    """Name of a device -> that of the catalogue."""
    requests: float = 0.0
    """Requests of a measurement, those first together that it keeps on the way; 0: not said."""
    rounds: float = 0.0
    """The same over those on the way at a time; 1: all come at once."""
    dies: tuple[tuple[str, int], ...] = ()
    """Name of a device in the catalogue -> how many of them the source counts as one."""
    chunks: bool = False
    """Its batches are the tokens of a prompt that a pass computes; there is one sequence."""
    chunk: float = CHUNK_TOKENS
    """Most prompt tokens of a pass."""
    eager_on: tuple[str, ...] = ()
    """Devices that it uses without captured graphs."""
    alike: bool = False
    """All answers have one length: requests that begin together end together."""
    cache_bytes: float = 0.0
    """Bytes of a number in the cache; 0: not said."""
    apart: bool = False
    """Each sequence of a batch has a client of its own: the first to come is computed while the others wait."""
    own_attention: bool = False
    """With several devices, each has attention for sequences of its own if the model has experts."""


_ARGONNE = (("nvidia a100", "a100-40"), ("nvidia h100", "h100-sxm"))
_CARDS = (("MI250X-GCD", 2),)
SOURCES = {
    # Polaris (A100 of 40 GB) and JLSE of Argonne; engines of mid-2024, fixed batches (arXiv:2411.00136).
    # Its runs on one MI250 name devices 0 and 1 (llama.cpp), and two of them hold 70B models in 16 bits: cards, of two
    # dies each. llama-bench's -b is the tokens of a pass, and its tokens/s times seconds are those of one sequence.
    r"LLM-Inference-Bench.*llama\.cpp": Source((0, 5), fixed=True, devices=_ARGONNE, dies=_CARDS, chunks=True),
    r"LLM-Inference-Bench": Source((0, 5), fixed=True, devices=_ARGONNE, dies=_CARDS),
    r"FasterTransformer": Source(fixed=True),
    # profile_generation.py starts a thread for each sequence.
    r"lmdeploy a100": Source(fixed=True, apart=True),
    r"TensorRT-LLM v0": Source((0, 5), fixed=True),
    # enable_attention_dp for models with experts (perf-overview.md's llm_options.yml).
    r"TensorRT-LLM v1": Source((1, 0), fixed=True, own_attention=True),
    r"NIM 1\.": Source((0, 17)),
    r"docs.vultr": Source(requests=400, alike=True),
    r"gpustack.*latency": Source(requests=100),
    r"gpustack.*all requests at once": Source(rounds=1),
    r"InferenceX": Source(rounds=10),
    # vllm bench serve of random tokens, --num-prompts 128 and --ignore-eos; --kv-cache-dtype fp8.
    r"Llama3\.3-70B-ROCm": Source(requests=128, alike=True, chunk=32768, cache_bytes=1.0),
    r"ROCm/vllm": Source((0, 6), fixed=True),
    # --max-model-len 91680, without chunks of prompts, and no --kv-cache-dtype; --enforce-eager with AMD's.
    r"dstackai": Source((0, 6), "vLLM", fixed=True, cache_bytes=2.0, chunk=91680, eager_on=("MI300X",)),
    r"vllm/performance-benchmark/builds/9515": Source((0, 6), fixed=True),
}
"""Beginning of a source, or a part of it -> what it says."""
MAXIMUM_LOAD: dict[tuple[float, float | None], float] = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (1024, 1024): 3000, (1024, 8192): 1500, (1024, 32768): 1000, (2048, 128): 3000, (2048, 2048): 1500,
    (5000, 500): 1500, (8192, 1024): 1500, (20000, 2000): 1000, (32768, 1024): 1000,
}  # fmt: skip
"""Tokens of prompts and answers -> requests of TensorRT-LLM's "maximum load" (its perf-overview.md): all are alike and
come at once, so that they are answered in turns, of which the last is rarely full."""
DEVICES = {
    "a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "a100-sxm": "a100-80", "h100": "h100-sxm",
    "h100-80gb": "h100-sxm", "h100-sxm": "h100-sxm", "h200-sxm": "h200", "mi250": "mi250x-gcd",
    "rtx-pro-6000-blackwell-se": "rtx-pro-6000-server",
}  # fmt: skip
"""Device as sources write it -> its name in the catalogue; others are looked up as they are."""


DRAIN = 0.5
"""Requests of the last round are answered one after the other: half of its places are empty, on average."""


class Skip(Exception):
    """The row says too little, or the catalogue lacks its device."""


@dataclass(frozen=True)
class ServingRow:
    """One measurement."""

    line: int
    publisher: str
    engine: ServingEngine
    model: str
    device: Device
    work: Workload
    rates: Rates
    cached_layers: float
    cut: ReplicaCut
    replicas: float
    devices: float
    formats: Formats
    options: ServingOptions
    traffic: ServingLoad
    apart: float
    """1: the first sequence of a batch is computed while the others wait."""
    filled: float
    """Share of places with a request, of requests in rounds that begin and end together; 0: they come one by one."""
    metric: str
    value: float
    """Seconds, or output tokens of all devices a second."""
    cells: tuple[str, ...]

    @property
    def vendor(self) -> str:
        """Maker of the device."""
        return self.device.vendor

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups whose shifts of constants it has."""
        return self.engine.groups(self.vendor, self.device.name)


def read(path: Path) -> tuple[list[ServingRow], list[tuple[int, str]]]:
    """Return rows, and (line, why) of those that are skipped. Raises: UserError for a file not in this format."""
    try:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (table.fieldnames or [])]
            if missing:
                raise UserError(f"{path}: line 1: no column {', '.join(missing)}. The columns are {','.join(COLUMNS)}.")
            cells = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}. Give a CSV file of published measurements.") from None
    rows: list[ServingRow] = []
    skipped: list[tuple[int, str]] = []
    for line, cell in enumerate(cells, start=2):
        try:
            rows.append(_row(line, {key: (cell.get(key) or "").strip() for key in COLUMNS}))
        except (Skip, UserError) as error:
            skipped.append((line, str(error)))
    if not rows:
        line, why = skipped[0] if skipped else (1, "no rows follow")
        raise UserError(f"{path}: no row can be predicted; line {line}: {why}. The columns are {','.join(COLUMNS)}.")
    return rows, skipped


def held_out(row: ServingRow) -> bool:
    """Return True for a fifth of the published (publisher, device, model) groups, which nothing is ever fitted to."""
    group = "|".join((row.publisher, row.cells[COLUMNS.index("device")], row.model))
    return zlib.crc32(group.encode()) % 5 == 0


def publisher_of(source: str) -> str:
    """Return the publisher: sources of one repository or site measure alike."""
    begin = re.split(r"[ @(:]", source)[0]
    return next((name for name in PUBLISHERS if begin.startswith(name)), begin)


def _row(line: int, cell: dict[str, str]) -> ServingRow:
    source = next((said for part, said in SOURCES.items() if re.search(part, cell["source"])), Source())
    metric, value = cell["metric"], _number(cell, "value")
    if not value or not np.isfinite(value) or value < 0:
        raise Skip(f"value = {cell['value']!r} is not a number above 0")
    if cell["unit"] == "ms":
        value /= 1000
    engine = ServingEngine.of(f"{cell['source']} {source.engine}", source.version)
    prompt, output = _number(cell, "input_len"), _number(cell, "output_len")
    if not prompt or (not output and metric != "ttft"):
        raise Skip("input_len or output_len is not known")
    device = _device(cell["device"], source)
    work, cached, bits = _workload(cell["model"], _number(cell, "params_b"))
    dies = dict(source.dies).get(device.name, 1)
    tp, pp = dies * (_number(cell, "tp") or 0.0), _number(cell, "pp") or 0.0
    devices = dies * (_number(cell, "devices") or 0.0) or max(1.0, tp * pp)
    if not tp:  # llama.cpp gives each device some layers; elsewhere one replica has all
        tp, pp = (1.0, devices) if engine.name == "llama.cpp" else (devices / max(1.0, pp), max(1.0, pp))
    pp = pp or 1.0
    own_attention = work.experts > 0 and (
        "dp" in re.split(r"[ -]", cell["precision"].lower()) or (source.own_attention and devices > 1)
    )
    tp = 1.0 if own_attention else tp
    replicas = devices if own_attention else max(1.0, devices / (tp * pp))
    is_maximum = cell["batch_or_concurrency"] == "max"
    sequences = _in_a_turn(prompt, output, replicas) if is_maximum else _number(cell, "batch_or_concurrency")
    if not sequences:
        raise Skip("batch_or_concurrency is not known")
    if metric == "output_throughput_per_gpu":
        value *= devices
    elif metric not in (*TIMES, "output_throughput"):
        raise Skip(f"metric {metric} is none of {', '.join(TIMES)}, output_throughput, output_throughput_per_gpu")
    first, filled = _first_share(source, sequences), _filled(source, sequences)
    sequences = min(sequences, source.requests or sequences)
    chunk = sequences if source.chunks else source.chunk
    sequences = 1.0 if source.chunks else sequences
    formats, rates = _formats(cell, device, engine, bits)
    of_engine = ServingOptions.of(engine, device)
    if source.cache_bytes:
        formats = replace(formats, cache_bytes=source.cache_bytes)
    # A replica has what the busiest one gets, at most its default.
    here = sequences if is_maximum else min(sequences / replicas, MOST_SEQUENCES)
    return ServingRow(
        line=line,
        publisher=publisher_of(cell["source"]),
        engine=engine,
        model=cell["model"],
        device=device,
        work=work,
        rates=rates,
        cached_layers=cached,
        options=replace(
            of_engine, eager=max(float(device.name in source.eager_on), float(of_engine.eager)), chunk=chunk
        ),
        cut=ReplicaCut(tp, pp, devices if own_attention else 0.0),
        replicas=replicas,
        devices=devices,
        formats=formats,
        traffic=ServingLoad(max(1.0, here), prompt, max(1.0, output or 1.0), float(source.fixed), first),
        apart=float(source.apart),
        filled=filled,
        metric=metric if metric in TIMES else "throughput",
        value=value,
        cells=tuple(cell[key] for key in COLUMNS),
    )


def _in_a_turn(prompt: float, output: float | None, replicas: float) -> float:
    """Return the sequences that a replica answers at a time at most, if all requests of maximum load come at once."""
    requests = MAXIMUM_LOAD.get((prompt, output), 0.0) / replicas or float(MOST_SEQUENCES)
    return requests / np.ceil(requests / MOST_SEQUENCES)


def _filled(source: Source, sequences: float) -> float:
    """Return the share of places with a request, of rounds that begin and end together; 0: there are none."""
    if not source.alike:
        return 0.0
    rounds = source.requests / min(sequences, source.requests)
    return float(rounds / np.ceil(rounds))


def _first_share(source: Source, sequences: float) -> float:
    """Return the share of a measurement's requests that come at once at its beginning; -1 if it is not said."""
    if source.requests:
        return min(1.0, sequences / source.requests)
    return 1 / source.rounds if source.rounds else -1.0


def _number(cell: dict[str, str], key: str) -> float | None:
    try:
        found = float(cell[key])
    except ValueError:
        return None
    return found if np.isfinite(found) and found >= 0 else None


@cache
def _device(name: str, source: Source) -> Device:
    plain = re.sub(r"^(nvidia|amd|intel|habana|google|aws)\s+(instinct\s+)?", "", name.strip().lower())
    plain = re.sub(r"[ _]+", "-", plain)
    named = dict(source.devices).get(name.lower()) or DEVICES.get(plain) or plain
    for attempt in (named, re.sub(r"-(sxm\d?|oam|\d+gb)", "", named), named.split("-")[0]):
        try:
            return find_device(DEVICES.get(attempt, attempt))
        except UserError:
            continue
    raise Skip(f"device {name!r} is not in the catalogue")


@cache
def _models() -> list[dict[str, str]]:
    with MODELS.open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def _workload(name: str, params_b: float | None) -> tuple[Workload, float, float | None]:
    """Return the model's sizes, its layers with a cache that grows, and bits of its weights if it has only such."""
    plain = re.sub(r"(?<=\d)_(?=\d)", ".", name.lower()).replace("deepseek-r1-distill-", "")
    plain = re.sub(r"[ _]+", "-", plain)
    for sizes in _models():
        if re.search(rf"(^|[^a-z0-9])({sizes['pattern']})", plain):
            return _of_sizes({key: float(text or 0) for key, text in sizes.items() if key != "pattern"})
    said = re.search(r"(\d+(?:\.\d+)?)\s*b\b", plain)
    billions = params_b or (float(said[1]) if said else 0)
    if not billions or "moe" in plain or re.search(r"\d+x\d|a\d+b", plain):
        raise Skip(f"model {name!r} is not known")
    # A dense model of so many parameters: as Llama 3, whose width grows with the cube root.
    layers = round(32 * (billions / 8) ** 0.42)
    width = 128 * round((billions * 1e9 / layers / 13) ** 0.5 / 128) or 128
    return _of_sizes(
        {"layers": layers, "width": width, "heads": max(1, width // 128), "kv_heads": 8 if width > 1024 else 2,
         "head_width": 128, "ffn_width": 3.5 * width, "ffn_matrices": 3, "vocab_size": 128_256}
    )  # fmt: skip


def _of_sizes(sizes: dict[str, float]) -> tuple[Workload, float, float | None]:
    def given(key: str) -> float:
        return sizes.get(key, 0.0)

    key_width = given("head_width")
    value_width = 128.0 if given("kv_rank") else key_width
    work = Workload(
        layers=given("layers"),
        width=given("width"),
        heads=given("heads"),
        kv_heads=given("kv_heads"),
        key_width=key_width,
        value_width=value_width,
        kv_width=key_width + value_width,
        core_width=max(key_width, value_width),
        ffn_width=given("ffn_width"),
        widest_ffn=given("ffn_width"),
        ffn_matrices=given("ffn_matrices"),
        vocab_size=given("vocab_size"),
        tied=given("tied"),
        seq_len=0,
        global_batch=0,
        attention_span=0,
        moe_layers=given("moe_layers"),
        experts=given("experts"),
        experts_per_token=given("experts_per_token"),
        expert_ffn_width=given("expert_ffn_width"),
        shared_ffn_width=given("shared_ffn_width"),
        expert_matrices=given("ffn_matrices"),
        q_rank=given("q_rank"),
        kv_rank=given("kv_rank"),
        rope_width=given("rope_width"),
    )
    return work, given("cached_layers") or given("layers"), given("weight_bits") or None


def _formats(cell: dict[str, str], device: Device, engine: ServingEngine, bits: float | None) -> tuple[Formats, Rates]:
    precision, text = cell["precision"].lower(), f"{cell['precision']} {cell['source']}".lower()
    four_bits = re.search(r"int4|awq|gptq|w4a16|q4", precision)
    narrow: Format = "fp4" if "fp4" in precision else "fp8"
    weight_bytes = 0.53 if four_bits else 0.5625 if narrow == "fp4" else 1.0 if "8" in precision else 2.0
    computes_narrow = weight_bytes <= 1.0 and not four_bits and narrow in device.formats
    if bits:  # MXFP4 times activations of 8 bits on devices with matmuls of 4, else of 16: TensorRT-LLM's guide to it
        computes_narrow, narrow = "fp4" in device.formats, "fp8"
    if narrow not in device.formats:
        narrow = "fp8"
    rates = Rates.of_device(device, narrow)
    peak = (rates.narrow * rates.achieved_narrow) if computes_narrow else (rates.half * rates.achieved_half)
    if re.search(r"1[06]|bf16|fp16|half", precision) and weight_bytes == 1.0 and "fp8" not in precision:
        weight_bytes = 2.0
    # TensorRT-LLM's guide leaves the cache of MXFP4 models on Hopper in 16 bits ("Hopper: use auto").
    by_default = engine.name == "TensorRT-LLM" and (not bits or "fp4" in device.formats)
    small_cache = weight_bytes <= 1.0 and (by_default or re.search(r"fp8[- ]?kv|kv[- ]?fp8", text))
    weight = min(weight_bytes, bits / 8) if bits else weight_bytes
    return Formats(weight, 1.0 if small_cache else 2.0, peak, float(bool(computes_narrow))), rates


class ServingTable:
    """Rows, stacked so that one evaluation predicts all of them."""

    def __init__(self, rows: Sequence[ServingRow]):
        self.rows = list(rows)
        self.work, self.rates = stack([row.work for row in rows]), stack([row.rates for row in rows])
        self.cut, self.formats = stack([row.cut for row in rows]), stack([row.formats for row in rows])
        self.options = stack([row.options for row in rows])
        self.traffic = stack([row.traffic for row in rows])
        self.cached_layers = np.array([row.cached_layers for row in rows])
        self.replicas = np.array([row.replicas for row in rows])
        self.apart = np.array([row.apart for row in rows])
        self.filled = np.array([row.filled for row in rows])
        self.metric = np.array([row.metric for row in rows])
        self.measured = np.array([row.value for row in rows])
        self.publisher = np.array([row.publisher for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: NDArray[Any]) -> ServingTable:
        """Return the rows of a mask or of indices."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        return ServingTable([self.rows[i] for i in places])

    def latencies(self, constants: ServingConstants) -> Latencies:
        """Return the latencies of each row's requests."""
        model = ServingModel(
            self.work, self.rates, self.cut, self.formats, constants, self.cached_layers, options=self.options
        )
        found, sequences = model.latencies(self.traffic), np.asarray(self.traffic.sequences)
        waits = self.apart * (1 - 1 / sequences) * model.prefill_s(1.0, self.traffic.prompt)
        return replace(found, ttft_s=found.ttft_s + waits)

    def predict(self, constants: ServingConstants) -> Floats:
        """Return seconds, or tokens of all devices a second, of each row."""
        found = self.latencies(constants)
        together = np.asarray(self.traffic.together) > 0
        fixed = self.traffic.sequences * self.traffic.output / found.e2e_s
        drained = np.minimum(fixed, found.tokens_per_s) / (1 + DRAIN * np.maximum(0.0, np.asarray(self.traffic.first)))
        rate = self.replicas * np.where(together, fixed, np.where(self.filled > 0, self.filled * fixed, drained))
        of_metric = {"ttft": found.ttft_s, "tpot": found.tpot_s, "e2e_latency": found.e2e_s, "throughput": rate}
        return np.select([self.metric == name for name in of_metric], list(of_metric.values()))
