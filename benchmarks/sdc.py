"""Which flipped bits are seen: coverage by bit of each check for silent corruption, and its false-positive rate.

    python benchmarks/sdc.py [--flips 2000] [--healthy 2000] [--ranks 4] [--elements 1000000]

fingerprint   one bit of a tensor that several ranks hold (weights, optimizer): `parallel.buckets.sum_of_bits`
checksum      one bit of a sum of gradients over ranks, by `parallel.buckets.is_sum` (resilience.check_collectives)
norm          one bit of one rank's gradient before it is summed, by the bad-step policy's limit on the norm alone
recompute     the same, by others computing it again: every bit, in one of n k steps (not drawn here: it compares bits)

Gradients are normal with standard deviations from 1e-8 to 1e-3, a decade to each part of the tensor, as in a model.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from argosy.config.schema import ResilienceConfig
from argosy.parallel.buckets import checksums, is_sum, sum_of_bits, tolerance
from argosy.training.bad_steps import BadStepPolicy

BITS = 32
NORM_NOISE = 0.1
"""Standard deviation of the logarithm of a healthy run's gradient norm from step to step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000, help="for each bit and check")
    parser.add_argument("--healthy", type=int, default=2000, help="sums and steps without a fault, for each check")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=1_000_000)
    options = parser.parse_args()
    checks = {
        "fingerprint": fingerprint(options.elements),
        "checksum": checksum(options.elements, options.ranks),
        "norm": norm(options.elements),
    }
    print(f"{options.flips} flips of each bit, fp32; {options.ranks} ranks, {options.elements:,} elements")
    print("bit  " + "".join(f"{name:>13}" for name in checks))
    for bit in reversed(range(BITS)):
        seen = [sum(sees(bit) for _ in range(options.flips)) / options.flips for sees in checks.values()]
        kind = "sign" if bit == 31 else "exponent" if bit >= 23 else "mantissa"
        print(f"{bit:>3}  " + "".join(f"{share:>13.1%}" for share in seen) + f"   {kind}")
    false = [sum(sees(None) for _ in range(options.healthy)) / options.healthy for sees in checks.values()]
    print("none " + "".join(f"{share:>13.1%}" for share in false) + "   false positives")


Sees = Callable[[int | None], bool]
"""Returns True if a flip of this bit, of a random number, is seen; None: nothing is flipped."""


def fingerprint(elements: int) -> Sees:
    """Flips of one of two copies. The sum of a small part stands for the whole: it adds the same difference."""
    copy = gradient(min(elements, 4096), 0)
    expected = int(sum_of_bits(copy))

    def sees(bit: int | None) -> bool:
        place = flip(copy, bit)
        seen = int(sum_of_bits(copy)) != expected
        restore(copy, place, bit)
        return seen

    return sees


def checksum(elements: int, ranks: int) -> Sees:
    """Flips in the sum that one rank receives."""
    parts = torch.stack([gradient(elements, rank) for rank in range(ranks)])
    expected = checksums(parts).sum(0)
    total = parts.sum(0)
    off_before = (total.sum(dtype=torch.float64) - expected[0]).item()
    allowed = tolerance(expected, total.dtype, ranks).item()

    def sees(bit: int | None) -> bool:
        if bit is None:  # other numbers each time
            seed = random.getrandbits(32)
            some = torch.stack([gradient(4096, seed + rank) for rank in range(ranks)])
            return not bool(is_sum(some.sum(0), checksums(some).sum(0), ranks))
        place = random.randrange(elements)
        one = total[place : place + 1]
        old = one.item()
        flip(one, bit, 0)
        off = one.item() - old
        restore(one, 0, bit)
        # What `is_sum` says of the whole, without adding up a million numbers for each flip.
        return not abs(off_before + off) <= allowed

    return sees


def norm(elements: int) -> Sees:
    """Flips in one rank's gradient, which move the norm of the sum."""
    own = gradient(elements, 0)
    squares = own.double().square().sum().item()
    draw = random.Random(0)
    policy = BadStepPolicy(ResilienceConfig())
    policy.remember((s, 3.0, math.sqrt(squares) * math.exp(NORM_NOISE * draw.gauss(0, 1))) for s in range(128))
    _, limit = policy.limits(128)

    def sees(bit: int | None) -> bool:
        noise = math.exp(NORM_NOISE * draw.gauss(0, 1))
        if bit is None:
            return math.sqrt(squares) * noise > limit
        place = random.randrange(elements)
        one = own[place : place + 1]
        old = one.item()
        flip(one, bit, 0)
        new = one.item()
        restore(one, 0, bit)
        found = math.sqrt(max(squares - old * old + new * new, 0.0)) if math.isfinite(new) else math.inf
        return found * noise > limit

    return sees


def gradient(elements: int, seed: int) -> Tensor:
    """Made-up numbers, fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator) * torch.logspace(-8, -3, elements)


def flip(tensor: Tensor, bit: int | None, place: int | None = None) -> int:
    """Flip a bit of a number, a random one if `place` is not given; returns which."""
    place = random.randrange(tensor.numel()) if place is None else place
    if bit is not None:
        tensor.view(torch.int32)[place] ^= _mask(bit)
    return place


def restore(tensor: Tensor, place: int, bit: int | None) -> None:
    """Undo `flip`."""
    flip(tensor, bit, place)


def _mask(bit: int) -> int:
    return (1 << bit) if bit < BITS - 1 else -(1 << bit)


if __name__ == "__main__":
    random.seed(0)
    main()
