"""Rate of `argosy prepare` beside datatrove, Hugging Face datasets and the raw tokenizer library, on the same text.

    python benchmarks/prepare.py [--megabytes 20] [--near-duplicates]

All read the same JSONL files, one for each core, and use all cores and the same tokenizer; `prepare`, datatrove's
pipeline and `datasets` write the tokens to files. Raw is one call of `encode_batch_fast` on all documents at once, with
the library's own threads: no reading, no writing, no hashes. With --near-duplicates every tenth document is there
twice, the second time with a line more, and `prepare` and datatrove leave out what is much like another, by the same
n-grams, words and sizes of the signature; `datasets` has nothing for it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer

from argosy.config.data import FiltersConfig, PrepareConfig
from argosy.data.documents import DocumentReader, sample_texts
from argosy.data.gopher import word_tokenizer
from argosy.data.manifest import Manifest
from argosy.data.prepare import prepare
from argosy.data.sources import find_files
from argosy.data.tokenizer import train

ROUNDS = 3
CORES = len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--near-duplicates", action="store_true")
    asked = parser.parse_args()
    text_bytes = int(asked.megabytes * 1e6)
    engines = ["huggingface", *(["fastokens"] if find_spec("fastokens") else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer, jsonl = folder / "tokenizer.json", folder / "jsonl"
        builtin = PrepareConfig(input=("builtin:python",), max_text_bytes=text_bytes)
        files = find_files(builtin.input).files
        train(sample_texts(files, builtin, 5_000_000), 8192, tokenizer)
        texts = [d.text for d in DocumentReader(files, builtin, None, text_bytes).read()]
        if asked.near_duplicates:
            texts += [f"{text}\n# a line more" for text in texts[::10]]
            text_bytes = sum(len(text.encode()) for text in texts)
        write(texts, jsonl)
        print(f"{text_bytes / 1e6:.0f} MB, {len(texts)} documents, {CORES} cores")
        filters = FiltersConfig(duplicates="drop_near" if asked.near_duplicates else "keep")
        config = PrepareConfig(input=(str(jsonl),), tokenizer=tokenizer, filters=filters)
        rates: dict[str, float] = {}
        for number in range(ROUNDS):  # taken in turns, so that all meet the same machine
            out = folder / f"out-{number}"
            work: dict[str, Callable[[], object]] = {}
            for engine in engines:
                settings = {"out": out / engine, "engine": engine}
                work[f"raw {engine}"] = partial(raw, engine, tokenizer, texts)
                work[f"prepare {engine}"] = partial(prepare, config.model_copy(update=settings))
            work["datatrove"] = partial(datatrove, jsonl, tokenizer, out / "datatrove", asked.near_duplicates)
            if not asked.near_duplicates:
                work["datasets"] = partial(datasets, jsonl, tokenizer, out / "datasets")
            for name, do in work.items():
                rates[name] = max(rates.get(name, 0.0), text_bytes / seconds(do))
        if asked.near_duplicates:
            print("left out by prepare:", Manifest.load(out / "huggingface").dropped)
            left_out = sum(f.stat().st_size // 4 for f in (out / "datatrove" / "removed").glob("*.remove"))
            print("left out by datatrove:", left_out)
    for name, rate in rates.items():
        print(f"{name:20} {rate / 1e6:7.2f} MB/s   {rate / rates['raw huggingface']:.2f} of raw huggingface")


def write(texts: list[str], folder: Path) -> None:
    """Write the documents to one file for each core; datatrove's workers share files, not lines."""
    folder.mkdir()
    for core in range(CORES):
        lines = [json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts) if n % CORES == core]
        (folder / f"{core}.jsonl").write_text("".join(lines), encoding="utf-8")


def datatrove(jsonl: Path, tokenizer: Path, out: Path, drops_near: bool) -> None:
    """Read, tokenize and write as datatrove's own examples of tokenizing and of MinHash do."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.hashing import HashConfig

    def run(name: str, *steps: object, tasks: int = CORES) -> None:
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=CORES, logging_dir=str(out / "log" / name)).run()

    reader, tokens = JsonlReader(str(jsonl)), DocumentTokenizer(str(out), str(tokenizer), shuffle_documents=False)
    if not drops_near:
        run("tokens", reader, tokens)
        return
    sizes = FiltersConfig()
    config = minhash.MinhashConfig(
        n_grams=sizes.ngram,
        num_buckets=sizes.buckets,
        hashes_per_bucket=sizes.bucket_hashes,
        hash_config=HashConfig(hash_fc="sha1"),
    )
    signatures, pairs, removed = (str(out / name) for name in ("signatures", "pairs", "removed"))
    run("signatures", reader, minhash.MinhashDedupSignature(signatures, config, language=word_tokenizer()))
    run("pairs", minhash.MinhashDedupBuckets(signatures, pairs, config=config), tasks=sizes.buckets)
    run("clusters", minhash.MinhashDedupCluster(pairs, removed, config), tasks=1)
    run("tokens", reader, minhash.MinhashDedupFilter(removed), tokens)


def datasets(jsonl: Path, tokenizer: Path, out: Path) -> None:
    """Read, tokenize by `map` on all cores, and save."""
    from datasets import load_dataset

    encoder = Tokenizer.from_file(str(tokenizer))

    def ids(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [e.ids for e in encoder.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    rows = load_dataset("json", data_files=str(jsonl / "*.jsonl"), split="train", cache_dir=str(out / "cache"))
    rows.map(ids, batched=True, num_proc=CORES, remove_columns=rows.column_names).save_to_disk(str(out / "rows"))


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
