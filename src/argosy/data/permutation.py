"""A keyed pseudo-random permutation of range(n), computed one element at a time, without a table.

An alternating Feistel network permutes the smallest power of two that holds n: the halves of a number take turns
at being XORed with a keyed hash of the other. Each turn is its own inverse, so the whole is a bijection for any
hash (Luby & Rackoff 1988, "How to construct pseudorandom permutations"). A result outside range(n) is
permuted again until it lies inside ("cycle walking": Black & Rogaway 2002, "Ciphers with arbitrary finite
domains"); the power of two is less than 2n, so that takes two rounds on average.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

TURNS = 8
"""Luby & Rackoff need four. There are more, since the hash is not cryptographic and small domains mix poorly."""

_TURN_OFFSETS = np.arange(1, TURNS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key that depends on all of `parts` (integers of any size)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mix(x: U64) -> U64:
    """Hash each element: the finaliser of SplitMix64 (Steele, Lea & Flood 2014), itself a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: U64, n: int, key: U64) -> U64:
    """Map each `index` (uint64 [k], below n <= 2**63) through the permutation of range(n) with its `key` [k].

    Different elements with equal keys go to different places.
    """
    bits = max((n - 1).bit_length(), 1)
    turn_keys = mix(key + _TURN_OFFSETS[:, None])
    where = _feistel(index, bits, turn_keys)
    outside = np.flatnonzero(where >= n)
    while outside.size:
        where[outside] = _feistel(where[outside], bits, turn_keys[:, outside])
        outside = outside[where[outside] >= n]
    return where


def _feistel(x: U64, bits: int, turn_keys: U64) -> U64:
    """Permute the numbers of `bits` bits by keys [TURNS, k]; the right half has floor(bits / 2) of them."""
    right_bits = np.uint64(bits // 2)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    left, right = x >> right_bits, x & right_mask
    for left_key, right_key in zip(turn_keys[::2], turn_keys[1::2], strict=True):
        left = left ^ (mix(right + left_key) & left_mask)
        right = right ^ (mix(left + right_key) & right_mask)
    return (left << right_bits) | right
