"""The size of a bucket: what a sum of gradients that begins during backward leaves to wait for after it.

Backward hands out G bytes of gradients evenly over its W seconds, in n = G/S buckets of S bytes. A bucket's sum takes
c(S) = latency + S/bandwidth, and sums go one after the other. The last bucket is whole when backward ends, so there is
its sum to wait for; or, where the links are the limit, all sums less what backward hid:

    wait(S) = max(c(S), W/n + n c(S) - W)

Small buckets pay the latency n times; of large ones the first begins late and the last ends late.
"""

from __future__ import annotations

import numpy as np

from argosy.plan.workload import Numbers

SIZES_MB = tuple(2**n for n in range(2, 9))
"""Sizes that are compared: 4 to 256 MiB. Smaller ones gain next to nothing."""
MEMORY_SHARE = 1 / 256
"""Largest bucket, of a device's memory: copies of a bucket or two live in a step, and no formula counts them."""
WORTH = 0.005
"""Share of a step that another size than the usual one must save."""


def wait_s(gradients: Numbers, bucket: Numbers, of_message: Numbers, of_byte: Numbers, backward_s: Numbers) -> Numbers:
    """Return the seconds from the end of backward to the end of the last sum.

    gradients, bucket: bytes; of_message, of_byte: seconds that a sum takes for each message, and for each byte.
    """
    many = np.maximum(1.0, np.ceil(np.asarray(gradients) / bucket))
    each = of_message + np.minimum(bucket, np.asarray(gradients)) * of_byte
    all_of_them = many * of_message + np.asarray(gradients) * of_byte
    return np.maximum(each, backward_s / many + all_of_them - backward_s)
