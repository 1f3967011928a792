"""L-BFGS for many small problems at once: thousands of short vectors cost a NumPy call as little as one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Function = Callable[[Array], tuple[Array, Array]]
"""Points [P, n] -> values [P] and gradients [P, n]; a point outside the domain has a value that is not finite."""

MEMORY = 10
"""Number of steps that the curvature is estimated from."""
SUFFICIENT_DECREASE, CURVATURE = 1e-4, 0.9
"""Wolfe's two conditions (Nocedal and Wright 2006, equation 3.6)."""
TRIALS = 20
"""Step lengths that a line search tries."""


def minimize(function: Function, starts: Array, steps: int = 300, tolerance: float = 1e-9) -> tuple[Array, Array]:
    """Return the points [P, n] where the descents from `starts` [P, n] end, and their values [P].

    Liu and Nocedal 1989 (Nocedal and Wright 2006, algorithm 7.4), each point for itself, with the line search of Lewis
    and Overton 2013 (algorithm 2.6), which kinks do not stop. Ends after `steps` steps, or once no point has come
    down by more than `tolerance` * (1 + its value) in `MEMORY` of them. `starts` have finite values.
    """
    points = starts
    values, gradients = function(points)
    history: deque[tuple[Array, Array]] = deque(maxlen=MEMORY)
    earlier: deque[Array] = deque([values], maxlen=MEMORY)
    for _ in range(steps):
        directions = _directions(gradients, history)
        found, values, found_gradients = _line_search(function, points, values, gradients, directions, tolerance)
        history.append((found - points, found_gradients - gradients))
        points, gradients = found, found_gradients
        if len(earlier) == MEMORY and np.all(earlier[0] - values <= tolerance * (1 + np.abs(values))):
            break
        earlier.append(values)
    return points, values


def _directions(gradients: Array, history: deque[tuple[Array, Array]]) -> Array:
    """Return downhill directions, scaled by the curvature in `history`; the first step has length 1 at most."""
    directions = -gradients
    if not history:
        return directions / np.maximum(1.0, np.linalg.norm(gradients, axis=1, keepdims=True))
    kept = []
    for step, change in reversed(history):
        curvature = _dot(step, change)
        # A step without positive curvature, such as none at all, teaches nothing.
        inverse = np.divide(1.0, curvature, out=np.zeros_like(curvature), where=curvature > 0)
        share = inverse * _dot(step, directions)
        directions = directions - share * change
        kept.append((step, change, inverse, share))
    step, change, inverse, _ = kept[0]
    directions = directions * np.where(inverse > 0, _dot(step, change) / np.maximum(_dot(change, change), 1e-300), 1.0)
    for step, change, inverse, share in reversed(kept):
        directions = directions + step * (share - inverse * _dot(change, directions))
    return np.where(_dot(directions, gradients) < 0, directions, -gradients)


def _line_search(
    function: Function, points: Array, values: Array, gradients: Array, directions: Array, tolerance: float
) -> tuple[Array, Array, Array]:
    """Return lower points along `directions`, with values and gradients; a point with no lower one stays."""
    slope = _dot(gradients, directions)[:, 0]
    low, high, length = np.zeros_like(slope), np.full_like(slope, np.inf), np.ones_like(slope)
    best, best_values, best_gradients = points, values, gradients
    at_end = slope >= -1e-3 * tolerance * (1 + np.abs(values))  # the others need not wait for it
    for _ in range(TRIALS):
        trial = points + length[:, None] * directions
        trial_values, trial_gradients = function(trial)
        falls = trial_values <= values + SUFFICIENT_DECREASE * length * slope
        flat = _dot(trial_gradients, directions)[:, 0] >= CURVATURE * slope
        better = (falls & (trial_values <= best_values))[:, None]
        best, best_gradients = np.where(better, trial, best), np.where(better, trial_gradients, best_gradients)
        best_values = np.where(better[:, 0], trial_values, best_values)
        if np.all(falls & flat | at_end):
            break
        low, high = np.where(falls & ~flat, length, low), np.where(falls, high, length)
        following = np.where(np.isinf(high), 2 * low, (low + high) / 2)
        length = np.where(falls & flat, length, following)
    return best, best_values, best_gradients


def _dot(a: Array, b: Array) -> Array:
    """Return the dot product of each point's vectors, [P, 1]."""
    return np.einsum("pn,pn->p", a, b)[:, None]
