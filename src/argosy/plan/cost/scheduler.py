"""A simulated scheduler of one replica: continuous batching, with prompts in chunks beside the decoding of others.

Requests come at random (Poisson), and take turns as in vLLM and SGLang: in each pass every sequence that has room gets
a token, and what is left of `CHUNK_TOKENS` goes to prompts that wait, first come first served (Agrawal et al. 2024,
"Sarathi-Serve"). Passes in which nothing changes are taken at once. Lengths vary by half around their mean.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from argosy.plan.cost.inference import ADMITTED, CHUNK_TOKENS, ServingLoad, ServingModel

REQUESTS, WARM_UP_REQUESTS = 300, 60
"""Requests of a simulation, and how many of the first do not count."""
BATCHES = 24
"""Batch sizes whose decode is predicted, and lengths of chunks; those between are interpolated."""
SEED = 0


@dataclass(frozen=True)
class Percentiles:
    """Latencies of a simulation's requests, in seconds."""

    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float


class SimulatedReplica:
    """A replica whose passes are predicted once, to be simulated at many rates."""

    def __init__(self, model: ServingModel, prompt: int, output: int, decodes_only: bool = False):
        """Set it up; decodes_only: prompts are computed elsewhere, and their cache is sent here."""
        self.prompt, self.output, self._decodes_only = prompt, output, decodes_only
        self.room = int(max(1.0, float(model.room(prompt + output * max(0.5, ADMITTED)))))
        sizes = np.unique(np.geomspace(1, self.room, BATCHES).round())
        decode_s = np.array([float(model.decode_s(size, prompt + output / 2)) for size in sizes])
        self._decode_s = [0.0, *np.interp(np.arange(1, self.room + 1), sizes, decode_s).tolist()]
        """Seconds of a token of so many sequences at once."""
        chunks = np.geomspace(1, CHUNK_TOKENS, BATCHES)
        chunk_s = np.concatenate([[0.0], model.pass_s(chunks, np.maximum(1, chunks / prompt), prompt / 2, 0.0)])
        self._chunks, self._chunk_s = [0.0, *chunks.tolist()], chunk_s.tolist()
        self._start_s = float(model.constants.request_s)
        busiest = model.latencies(ServingLoad(self.room, prompt, output))
        self.most_per_s = self.room / (output * decode_s[-1]) if decodes_only else float(busiest.tokens_per_s) / output
        """Requests a second beyond which a queue only grows."""

    def simulate(self, rate: float) -> Percentiles:
        """Return what requests take that come at `rate` a second."""
        draw = np.random.default_rng(SEED)
        comes = np.cumsum(draw.exponential(1 / rate, REQUESTS)).tolist()
        prompts = (self.prompt * draw.uniform(0.5, 1.5, REQUESTS)).tolist()
        outputs = np.maximum(1, self.output * draw.uniform(0.5, 1.5, REQUESTS)).round().astype(int).tolist()
        left = [0.0 if self._decodes_only else length for length in prompts]
        first, done = [0.0] * REQUESTS, [0.0] * REQUESTS
        running: list[tuple[int, int]] = []  # a heap: the pass after which each ends, and the request
        waiting: list[int] = []
        now, arrived, passed = 0.0, 0, 0
        while arrived < REQUESTS or waiting or running:
            if not running and not waiting:
                now = max(now, comes[arrived])
            while arrived < REQUESTS and comes[arrived] <= now:
                waiting.append(arrived)
                arrived += 1
            step = self._decode_s[len(running)]
            budget, chunk = float(CHUNK_TOKENS - len(running)), 0.0
            begun: list[int] = []
            for request in waiting:
                if len(running) + len(begun) >= self.room or budget <= 0:
                    break
                taken = min(left[request], budget)
                left[request] -= taken
                chunk, budget = chunk + taken, budget - taken
                if left[request] <= 0:
                    begun.append(request)
            passes = 1
            if not waiting and running:
                until = running[0][0] - passed
                if arrived < REQUESTS:
                    until = min(until, int((comes[arrived] - now) / step) + 1)
                passes = max(1, until)
            now += passes * (step + self._prompts_s(chunk))
            passed += passes
            while running and running[0][0] <= passed:
                done[heappop(running)[1]] = now + self._start_s
            for request in begun:
                waiting.remove(request)
                first[request] = now + self._start_s
                done[request] = first[request]
                if outputs[request] > 1:
                    heappush(running, (passed + outputs[request] - 1, request))
        ttft = np.array(first[WARM_UP_REQUESTS:]) - np.array(comes[WARM_UP_REQUESTS:])
        tpot = (np.array(done[WARM_UP_REQUESTS:]) - np.array(first[WARM_UP_REQUESTS:])) / np.maximum(
            1, np.array(outputs[WARM_UP_REQUESTS:]) - 1
        )
        return Percentiles(*(float(np.quantile(each, share)) for each in (ttft, tpot) for share in (0.5, 0.95)))

    def _prompts_s(self, tokens: float) -> float:
        """Return what so many tokens of prompts take beside the others', interpolated as `np.interp` does."""
        below = bisect_right(self._chunks, tokens) - 1
        low, low_s = self._chunks[below], self._chunk_s[below]
        if tokens == low or below == len(self._chunks) - 1:
            return low_s
        return (self._chunk_s[below + 1] - low_s) / (self._chunks[below + 1] - low) * (tokens - low) + low_s

    def most_within(self, ttft_s: float, tpot_s: float) -> float:
        """Return the requests a second that this replica answers with 95 of 100 within both latencies; 0 if none."""

        def holds(rate: float) -> bool:
            found = self.simulate(rate)
            return found.ttft_p95_s <= ttft_s and found.tpot_p95_s <= tpot_s

        high = 0.98 * self.most_per_s
        low = high / 512
        if not holds(low):
            return 0.0
        if holds(high):
            return high
        while high / low > 1.03:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low
