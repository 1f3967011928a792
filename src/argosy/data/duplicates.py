"""Documents that came before: the same text, or one much like it (MinHash; Broder 1997).

A document has keys: the hash of its text, and one for each bucket of its signature. It is left out if a document before
it in the input has one of its keys. So what stays does not depend on who compares what: keys are sorted, in parts that
fit into memory, and in each run of equal keys all but the first are marked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.config.data import FiltersConfig
from argosy.data.filters import imported, of_datatrove, word_tokenizer

MOST_KEYS = 2**25
"""Keys that are sorted at once: about a gigabyte with what belongs to them."""
SHINGLES_AT_ONCE = 512
"""n-grams of a document that are hashed at once, times as many hashes as a signature has: half a megabyte, so that it
stays in a core's cache."""
MERSENNE_PRIME = np.uint64(2**61 - 1)

Numbers = npt.NDArray[Any]


def key_maker(config: FiltersConfig) -> Callable[[str], list[int]]:
    """Return the function that gives a document's keys: first that of its text, then those of the signature's buckets.

    A key has 64 bits: of a billion documents, the chance that any two unlike ones share the first is 3 %.

    Raises: UserError if a package is missing.
    """
    signature = _signature(config) if config.duplicates == "drop_near" else lambda text: []

    def keys(text: str) -> list[int]:
        return [_hash(b"text", text.encode()), *signature(text)]

    return keys


def _signature(config: FiltersConfig) -> Callable[[str], list[int]]:
    minhash = of_datatrove("dedup.minhash")
    hashing = imported("datatrove.utils.hashing").HashConfig(hash_fc="sha1")
    settings = minhash.MinhashConfig(
        n_grams=config.ngram,
        num_buckets=config.buckets,
        hashes_per_bucket=config.bucket_hashes,
        hash_config=hashing,
    )
    step = minhash.MinhashDedupSignature("memory://argosy", settings, language=word_tokenizer())

    def keys(text: str) -> list[int]:
        shingles = step.get_shingles(text)
        if not len(shingles):
            return []  # fewer words than an n-gram has
        buckets = least_hashes(shingles, *step.parameters).reshape(config.buckets, config.bucket_hashes)
        return [_hash(b"bucket%d" % number, bucket.tobytes()) for number, bucket in enumerate(buckets)]

    return keys


def least_hashes(shingles_N1: Numbers, factors_1H: Numbers, offsets_1H: Numbers) -> Numbers:
    """Return the least of each of H hashes over N shingles: datatrove's, ((a s + b) mod 2^64) mod (2^61 - 1).

    All are uint64. Sums take the place of the remainder, as 2^61 = 1 modulo 2^61 - 1: processors need tens of cycles
    for a division, and two threads of a core share what divides.
    """
    least_H = np.full(factors_1H.shape[1], MERSENNE_PRIME)
    for at in range(0, len(shingles_N1), SHINGLES_AT_ONCE):
        hashes = shingles_N1[at : at + SHINGLES_AT_ONCE] * factors_1H
        hashes += offsets_1H
        above = hashes >> np.uint64(61)
        hashes &= MERSENNE_PRIME
        hashes += above
        # What is below the prime stays: its difference to the prime wraps, and is larger.
        np.minimum(hashes, hashes - MERSENNE_PRIME, out=hashes)
        np.minimum(least_H, hashes.min(axis=0), out=least_H)
    return least_H


def _hash(kind: bytes, data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind[:16]).digest(), "little")


def as_arrays(keys: list[tuple[int, list[int]]]) -> dict[str, Numbers]:
    """Return the keys of (number, keys) of documents, sorted by key, each with its document and whether it is exact."""
    flat = np.array([key for _, mine in keys for key in mine], np.uint64)
    counts = [len(mine) for _, mine in keys]
    numbers = np.repeat(np.array([number for number, _ in keys], np.int64), counts)
    firsts = np.cumsum([0, *counts[:-1]])[: len(counts)]
    exact = np.zeros(len(flat), np.bool_)
    exact[firsts] = True
    order = np.argsort(flat, kind="stable")
    return {"keys": flat[order], "numbers": numbers[order], "exact": exact[order]}


def parts_of(keys: int) -> int:
    """Return into how many parts so many keys are divided."""
    return max(1, -(-keys // MOST_KEYS))


def bounds(part: int, parts: int) -> tuple[np.uint64, np.uint64]:
    """Return the least and the largest key of a part."""
    step = 2**64 // parts
    return np.uint64(part * step), np.uint64(2**64 - 1 if part + 1 == parts else (part + 1) * step - 1)


def within(arrays: Mapping[str, Numbers], least: np.uint64, most: np.uint64) -> tuple[Numbers, Numbers, Numbers]:
    """Return keys, documents and exactness of the keys between two, of what `as_arrays` has made."""
    keys = arrays["keys"]
    first, end = np.searchsorted(keys, least, "left"), np.searchsorted(keys, most, "right")
    return keys[first:end], arrays["numbers"][first:end], arrays["exact"][first:end]


def repeated(found: Iterable[tuple[int, tuple[Numbers, Numbers, Numbers]]]) -> dict[str, Numbers]:
    """Return the documents that share a key with one before, sorted: piece, number, and whether the text is the same.

    found: pieces in the input's order, each with what `within` returns.
    """
    found = list(found)
    pieces = np.concatenate([np.full(len(keys), piece) for piece, (keys, _, _) in found])
    keys, numbers, exact = (np.concatenate([part[at] for _, part in found]) for at in range(3))
    order = np.lexsort((numbers, pieces, keys))
    keys, pieces, numbers, exact = keys[order], pieces[order], numbers[order], exact[order]
    again = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    pieces, numbers, exact = pieces[again], numbers[again], exact[again]
    order = np.lexsort((~exact.astype(np.bool_), numbers, pieces))  # of several marks of a document, "exact" is first
    pieces, numbers, exact = pieces[order], numbers[order], exact[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (pieces[1:] != pieces[:-1]) | (numbers[1:] != numbers[:-1])
    return {
        "pieces": pieces[is_new].astype(np.int64),
        "numbers": numbers[is_new].astype(np.int64),
        "exact": exact[is_new].astype(np.bool_),
    }
