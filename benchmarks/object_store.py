"""Training from an object store beside training from a local disk, and what it costs if the cache is small.

  python benchmarks/object_store.py             the store behind 1 Gbit/s and 20 ms
  python benchmarks/object_store.py --bytes     bytes fetched for each byte of samples, by size of the cache

The store is a small server of ranged GETs over HTTP that reads files: moto's answers 30 large requests a
second, which would be what is measured. A request waits 20 ms, then its bytes share 1 Gbit/s with those of all others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.data.manifest import TOKENIZER, Manifest, Shard, SplitName
from argosy.data.shards import ShardWriter
from argosy.data.tokenizer import Tokenizer, train

LINE_BYTES_PER_S, LATENCY_S = 125e6, 0.020
SEQ_LEN, ROWS = 2048, 32
SHARD_TOKENS = 2**25


class Line:
    """A line of so many bytes a second, which all connections share."""

    def __init__(self) -> None:
        self._lock, self._free_at = threading.Lock(), 0.0
        self.requests = self.sent_bytes = 0

    def pass_on(self, size: int) -> None:
        """Return when `size` bytes have gone through."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / LINE_BYTES_PER_S
            wait_s = self._free_at - now
            self.sent_bytes += size
        time.sleep(wait_s)


def serve(folder: Path) -> tuple[ThreadingHTTPServer, Line]:
    line = Line()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            line.requests += 1
            time.sleep(LATENCY_S)
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            size = path.stat().st_size
            asked = self.headers.get("Range", "")
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-")) if asked else (0, size - 1)
            last = min(last, size - 1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
            self.send_header("ETag", f'"{size}"')
            self.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                left = last - first + 1
                while left:
                    data = file.read(min(left, 2**16))
                    line.pass_on(len(data))
                    self.wfile.write(data)
                    left -= len(data)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, line


def make(folder: Path, tokens: int) -> None:
    """A prepared folder of random tokens."""
    folder.mkdir(parents=True)
    train([f"def f{i}(x): return x + {i}" for i in range(100)], 300, folder / TOKENIZER)
    tokenizer, numbers = Tokenizer.load(folder / TOKENIZER), np.random.default_rng(0)
    shards: dict[SplitName, list[Shard]] = {"train": [], "validation": []}
    sizes: list[tuple[SplitName, int, int]] = [
        *(("train", number, SHARD_TOKENS) for number in range(tokens // SHARD_TOKENS)),
        ("validation", 0, 100_000),
    ]
    for split, number, size in sizes:
        writer = ShardWriter(folder / f"{split}-{number:05d}", np.dtype("<u2"))
        for _ in range(size // 100_000):
            writer.write(numbers.integers(0, 300, 100_000), np.array([100_000]))
        shards[split].append(writer.close(size * 3))
    Manifest(
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype="uint16",
        splits={name: tuple(some) for name, some in shards.items()},
    ).save(folder)


def config(source: str, cache: Path, size_gb: float) -> RunConfig:
    section = {"sources": {source: 1.0}, "seq_len": SEQ_LEN, "cache": {"folder": str(cache), "size_gb": size_gb}}
    return RunConfig.model_validate({"data": section, "train": {"steps": 1}})


def loader_rate(source: str, cache: Path, size_gb: float, steps: range) -> tuple[float, float]:
    """Return tokens a second of a loader that does nothing else, and the longest wait for a step, in ms."""
    data = open_data(config(source, cache, size_gb).data, 0, ROWS)
    loader = data.loader(slice(0, ROWS))
    loader.batch(steps[0])
    began, longest = time.perf_counter(), 0.0
    for step in steps[1:]:
        at = time.perf_counter()
        loader.batch(step)
        longest = max(longest, time.perf_counter() - at)
    elapsed = time.perf_counter() - began
    loader.close()
    return (len(steps) - 1) * ROWS * SEQ_LEN / elapsed, longest * 1e3


def run_figures(folder: Path, source: str, cache: Path, name: str, steps: int) -> dict[str, float]:
    """Train a small model, and return the medians of its steps after the first ten."""
    run = f"""
name = "{name}"
plan = "microbatch=4,precision=fp32,compile=false"
[model]
layers = 2
width = 64
heads = 4
kv_heads = 4
head_width = 16
ffn_width = 128
[data]
sources = {{ "{source}" = 1.0 }}
seq_len = 512
[data.cache]
folder = "{cache}"
size_gb = 10
[train]
steps = {steps}
global_batch = 8
[evaluate]
every_steps = 0
[launch]
processes = 1
threads = 1
device = "cpu"
"""
    (folder / f"{name}.toml").write_text(run)
    command = [sys.executable, "-m", "argosy", "train", f"{name}.toml", "--run-dir", f"runs/{name}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    steps_of = [line for line in lines if "tokens_per_s" in line and line["step"] > 10]
    waits = np.array([line["seconds"]["data"] for line in steps_of])
    return {
        "tokens_per_s": float(np.median([line["tokens_per_s"] for line in steps_of])),
        "data_ms": float(np.median(waits) * 1e3),
        "longest_data_ms": float(waits.max() * 1e3),
    }


def speed(folder: Path, tokens: int, run_steps: int) -> None:
    prepared, cache = folder / "prepared", folder / "cache"
    make(prepared, tokens)
    server, line = serve(prepared)
    url = f"http://127.0.0.1:{server.server_port}"
    size_mb = tokens * 2 / 1e6
    print(f"{size_mb:.0f} MB of tokens, samples of {SEQ_LEN}, {ROWS} a step; {platform.processor() or 'CPU'}, "
          f"{os.cpu_count()} cores, Python {platform.python_version()}")  # fmt: skip
    epoch = range(tokens // SEQ_LEN // ROWS)
    rate, wait = loader_rate(str(prepared), cache, 10, epoch)
    print(f"loader, local disk:             {rate / 1e6:7.1f}M tokens/s, longest wait {wait:6.1f} ms")
    began = time.perf_counter()
    rate, wait = loader_rate(url, cache, 10, range(len(epoch) // 4))
    seconds = time.perf_counter() - began
    print(f"loader, store, cache empty:     {rate / 1e6:7.1f}M tokens/s, longest wait {wait:6.1f} ms; "
          f"{line.sent_bytes / seconds * 8 / 1e9:.2f} Gbit/s, {line.requests} requests")  # fmt: skip
    loader_rate(url, cache, 10, epoch)
    before = line.sent_bytes
    rate, wait = loader_rate(url, cache, 10, epoch)
    print(f"loader, store, cache warm:      {rate / 1e6:7.1f}M tokens/s, longest wait {wait:6.1f} ms; "
          f"{(line.sent_bytes - before) / 1e6:.1f} MB fetched")  # fmt: skip
    shutil.rmtree(cache)
    for name, source in (
        ("local", str(prepared)),
        ("store-cold", url),
        ("store-warm", url),
        ("local-again", str(prepared)),
    ):
        figures = run_figures(folder, source, cache, name, run_steps)
        print(f"run, {name:12}               {figures['tokens_per_s']:7.0f} tokens/s, data: median "
              f"{figures['data_ms']:.2f} ms a step, longest {figures['longest_data_ms']:.1f} ms")  # fmt: skip


def bytes_fetched(folder: Path, tokens: int) -> None:
    prepared = folder / "prepared"
    make(prepared, tokens)
    steps = tokens // SEQ_LEN // ROWS
    for share in (1.1, 0.75, 0.5, 0.25, 0.1):
        cache = folder / f"cache-{share}"
        data = open_data(config(f"file://{prepared}", cache, share * tokens * 2 / 1e9).data, 0, ROWS)
        loader = data.loader(slice(0, ROWS))
        store = data.sources[0].store_folder  # type: ignore[attr-defined]
        for step in range(steps):
            loader.batch(step)
            if step == steps // 4:
                first = store.fetched_bytes
        later = (store.fetched_bytes - first) / (steps - steps // 4 - 1)
        loader.close()
        print(f"cache of {share:5.0%} of the data: {later / (ROWS * SEQ_LEN * 2):5.1f} bytes fetched for each byte of "
              "samples")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--shards", type=int, default=8, help=f"of {SHARD_TOKENS} tokens")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if options.bytes:
            bytes_fetched(Path(folder), options.shards * SHARD_TOKENS)
        else:
            speed(Path(folder), options.shards * SHARD_TOKENS, options.steps)


if __name__ == "__main__":
    main()
