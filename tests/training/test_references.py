"""Each sample has the log-probabilities of its own answers before training."""

from __future__ import annotations

import numpy as np

from argosy.data.order import Samples
from argosy.training.rows import References


def test_samples_of_several_sources_have_the_rows_of_their_windows() -> None:
    one = np.array([[-1.0], [-2.0]], np.float32)
    other = np.array([[-3.0, -4.0], [-5.0, -6.0], [-7.0, -8.0]], np.float32)
    samples = Samples(np.array([1, 0, 1]), np.zeros(3, np.int64), np.array([2, 1, 0]))
    assert References([one, other]).of(samples).tolist() == [[-7, -8], [-2, 0], [-3, -4]]
