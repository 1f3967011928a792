"""Time of `argosy prepare` with 1, 2 and 4 workers, with and without filters and near-duplicates; the same bytes.

    python benchmarks/prepare_scaling.py [--megabytes 30] [--workers 1 2 4]

Workers on one machine share its cores: more workers than cores show what sharing costs, not what a cluster gains.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from argosy.config.data import FiltersConfig, PrepareConfig
from argosy.data import prepare as module
from argosy.data.documents import DocumentReader, sample_texts
from argosy.data.prepare import prepare
from argosy.data.sources import find_files
from argosy.data.tokenizer import train

KINDS = {
    "tokens only": FiltersConfig(),
    "repetition and languages": FiltersConfig(repetition=True, languages=("en",), language_score=0.0),
    "near-duplicates": FiltersConfig(duplicates="drop_near"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    module.DOCUMENTS_PIECE_BYTES = 2**21  # type: ignore[attr-defined]  # as many pieces as a larger input has
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        text_bytes = int(options.megabytes * 1e6)
        texts = Path(folder) / "texts.jsonl"
        with texts.open("w") as file:  # of this size: duplicates are looked for in all of the input
            builtin = PrepareConfig(input=("builtin:python",))
            for document in DocumentReader(find_files(builtin.input).files, builtin, None, text_bytes).read():
                file.write(json.dumps({"text": document.text}) + "\n")
        config = PrepareConfig(input=(str(texts),), tokenizer=tokenizer, engine="huggingface")
        train(sample_texts(find_files(config.input).files, config, 2_000_000), 4096, tokenizer)
        print(f"{options.megabytes:g} MB of Python sources, {len(os.sched_getaffinity(0))} cores")
        for kind in options.kinds:
            filters, made = KINDS[kind], set()
            for workers in options.workers:
                out = Path(folder) / f"{kind}-{workers}"
                changed = config.model_copy(update={"out": out, "processes": workers, "filters": filters})
                begun = time.perf_counter()
                manifest = prepare(changed)
                seconds = time.perf_counter() - begun
                made.add(digest(out))
                dropped = sum(manifest.dropped.values())
                rate = text_bytes / seconds / 1e6
                print(f"{kind:26} {workers} workers {seconds:7.1f} s {rate:6.2f} MB/s   {dropped} dropped", flush=True)
            print(f"{kind:26} {'the same bytes' if len(made) == 1 else 'OTHER BYTES'}")


def digest(folder: Path) -> str:
    """Return a hash of all files."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
