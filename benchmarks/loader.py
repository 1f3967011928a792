"""Tokens a second that one process reads from a warm cache, against simpler and other loaders, in one run.

    python benchmarks/loader.py [--seq-len 2048] [--tokens 100000000]

memmap   a NumPy memory map and a shuffled table of all windows: the least that can be done, with nothing checked
grain    Google's Grain over the same map (its shuffle and its batches), if it is installed
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from argosy.config.data import DataConfig
from argosy.data.loader import open_data
from argosy.data.manifest import TOKENIZER, Manifest
from argosy.data.shards import ShardWriter
from argosy.data.tokenizer import train

ROWS, STEPS, ROUNDS = 32, 300, 5
SETTLE_S = 1.0
"""Until the loader whose turn it was has read all that it reads ahead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder), options.tokens)
        loaders = {"argosy": argosy(corpus, options.seq_len), "memmap": memmap(corpus, options.seq_len)}
        if find_spec("grain"):
            loaders["grain"] = grain(corpus, options.seq_len)
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(ROUNDS):  # taken in turns, so that all meet the same machine
            for name, steps in loaders.items():
                time.sleep(SETTLE_S)
                rates[name].append(ROWS * options.seq_len * STEPS / seconds(steps))
    for name, measured in rates.items():
        best = max(measured[1:])  # the first round fills the cache and checks every block
        print(f"{name:8} {best / 1e6:8.1f} M tokens/s   {best / max(rates['memmap'][1:]):.2f} of memmap")


def write_corpus(folder: Path, tokens: int) -> Path:
    tokenizer = train(["text"], 257, folder / TOKENIZER)
    writer = ShardWriter(folder / "train-00000", np.dtype("<u2"))
    writer.write(np.random.default_rng(0).integers(0, 257, tokens), np.array([tokens]))
    Manifest(
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype="uint16",
        splits={"train": (writer.close(0),)},
    ).save(folder)
    return folder


def argosy(corpus: Path, seq_len: int) -> Iterator[np.ndarray]:
    loader = open_data(DataConfig(seq_len=seq_len, sources={str(corpus): 1}), 0, ROWS).loader(slice(0, ROWS))
    step = 0
    while True:
        yield loader.batch(step)
        step += 1


def memmap(corpus: Path, seq_len: int) -> Iterator[np.ndarray]:
    tokens = np.memmap(corpus / "train-00000.bin", "<u2", mode="r")
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // seq_len)
    step = 0
    while True:
        rows = [order[(step * ROWS + row) % len(order)] * seq_len for row in range(ROWS)]
        yield np.stack([tokens[start : start + seq_len + 1] for start in rows]).astype(np.int32)
        step += 1


def grain(corpus: Path, seq_len: int) -> Iterator[np.ndarray]:
    from grain import MapDataset

    tokens = np.memmap(corpus / "train-00000.bin", "<u2", mode="r")

    def window(index: int) -> np.ndarray:
        return tokens[index * seq_len : (index + 1) * seq_len + 1].astype(np.int32)

    windows = MapDataset.range((len(tokens) - 1) // seq_len).shuffle(seed=0).repeat().map(window)
    yield from windows.batch(ROWS).to_iter_dataset()


def seconds(steps: Iterator[np.ndarray]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        next(steps)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
