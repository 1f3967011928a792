"""Rate of `argosy prepare` against the raw tokenizer library, on the same text, cores and tokenizer.

    python benchmarks/prepare.py [--megabytes 20]

Raw is one call of `encode_batch_fast` on all documents at once, with the library's own threads: no reading, no
writing, no hashes. The share of it that `prepare` reaches is what reading, passing on, cutting and writing cost.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer

from argosy.config.data import PrepareConfig
from argosy.data.documents import DocumentReader, sample_texts
from argosy.data.prepare import prepare
from argosy.data.sources import find_files
from argosy.data.tokenizer import train

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20)
    text_bytes = int(parser.parse_args().megabytes * 1e6)
    engines = ["huggingface", *(["fastokens"] if find_spec("fastokens") else [])]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        config = PrepareConfig(input=("builtin:python",), max_text_bytes=text_bytes, tokenizer=tokenizer)
        files = find_files(config.input).files
        train(sample_texts(files, config, 5_000_000), 8192, tokenizer)
        texts = [d.text for d in DocumentReader(files, "skip", text_bytes).read()]
        print(f"{text_bytes / 1e6:.0f} MB, {len(texts)} documents, {len(os.sched_getaffinity(0))} cores")
        rates: dict[str, float] = {}
        for number in range(ROUNDS):  # taken in turns, so that all meet the same machine
            for engine in engines:
                out = Path(folder) / f"{engine}-{number}"
                work = {
                    f"raw {engine}": partial(raw, engine, tokenizer, texts),
                    f"prepare {engine}": partial(prepare, config.model_copy(update={"out": out, "engine": engine})),
                }
                for name, do in work.items():
                    rates[name] = max(rates.get(name, 0.0), text_bytes / seconds(do))
    for name, rate in rates.items():
        engine = name.split()[1]
        own = f"   {rate / rates[f'raw {engine}']:.2f} of raw {engine}" if name.startswith("prepare") else ""
        print(f"{name:20} {rate / 1e6:7.2f} MB/s   {rate / rates['raw huggingface']:.2f} of raw huggingface{own}")


def raw(engine: str, tokenizer: Path, texts: list[str]) -> None:
    if engine == "fastokens":
        import fastokens

        fastokens.Tokenizer.from_file(str(tokenizer)).encode_batch_flat(texts)
    else:
        Tokenizer.from_file(str(tokenizer)).encode_batch_fast(texts, add_special_tokens=False)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
