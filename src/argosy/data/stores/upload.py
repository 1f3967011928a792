"""Copies a prepared folder to an object store. Its manifest goes last: until then there is nothing prepared there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from argosy.data.manifest import NAME as MANIFEST
from argosy.data.manifest import TOKENIZER, Manifest
from argosy.data.stores.store import Store, StoreUnreachable
from argosy.errors import RunFailed, UserError

AT_ONCE = 4
"""Files that are copied at once; a large one goes in parts, several at once too."""
ATTEMPTS, PAUSE_S = 5, 3.0
NAMED = "remote = "
Answer = TypeVar("Answer")
JOURNAL = ".copied.jsonl"
"""What was copied where, so that an interrupted copy goes on."""


def upload(folder: Path, url: str, report: Callable[[int, int], None] = lambda done, files: None) -> bool:
    """Copy the prepared `folder` to `url`; False if the same is there already.

    `report` is called with the number of files that are there, and of all. After an interruption, the same call goes
    on.

    Raises: UserError if the store refuses, or other prepared data are there; RunFailed if it cannot be reached.
    """
    manifest = Manifest.load(folder)
    content = (folder / MANIFEST).read_bytes()
    store = Store(url, NAMED)
    there = _patiently(store, lambda: store.get(MANIFEST, len(content)))
    if there == content:
        return False
    if there is not None:
        raise UserError(f"{NAMED}{store.url}: holds other prepared data. Name another folder, or delete what is there.")
    names = [TOKENIZER]
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        names += [
            shard.name + suffix for suffix in (".bin", ".idx", ".crc32") if (folder / (shard.name + suffix)).exists()
        ]
    identity = [store.url, manifest.identity]
    copied = _journal(folder, identity)
    with ThreadPoolExecutor(AT_ONCE) as pool, (folder / JOURNAL).open("a") as journal:
        left = [name for name in names if name not in copied]
        tasks = {name: pool.submit(_put, store, name, folder / name) for name in left}
        try:
            for done, (name, task) in enumerate(tasks.items(), start=1):
                task.result()
                journal.write(json.dumps([*identity, name]) + "\n")
                journal.flush()
                report(len(names) - len(left) + done, len(names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _patiently(store, lambda: store.put(MANIFEST, content))
    (folder / JOURNAL).unlink(missing_ok=True)
    return True


def _put(store: Store, name: str, path: Path) -> None:
    _patiently(store, lambda: store.put(name, path))


def _patiently(store: Store, ask: Callable[[], Answer]) -> Answer:
    problem: Exception | None = None
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except StoreUnreachable as away:
            problem = away
            time.sleep(PAUSE_S if attempt + 1 < ATTEMPTS else 0)
    raise RunFailed(
        f"{NAMED}{store.url}: cannot be reached ({problem}). The data are prepared; the same command goes on with "
        "copying them."
    ) from None


def _journal(folder: Path, identity: list[str]) -> set[str]:
    """Return the files that an interrupted copy of the same data to the same place has copied."""
    path = folder / JOURNAL
    lines = path.read_text().splitlines() if path.exists() else []
    copied = set()
    for line in lines:
        try:
            *of, name = json.loads(line)
        except ValueError:  # a kill cut it off
            continue
        if of == identity:
            copied.add(name)
    return copied
