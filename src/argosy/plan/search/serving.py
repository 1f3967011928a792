"""The ways to serve a model on a cluster: cuts, number formats and requests at a time, with prefill on the same devices
or on others; which of them are best, and how many devices hold a rate of requests within a latency.

All ways are columns of one table, predicted in one go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.economy import power_per_device_w, price_per_device_h
from argosy.plan.cost.estimate import Estimate, gib, propagate, seconds
from argosy.plan.cost.inference import (
    BYTES_OF_WEIGHT,
    CACHES,
    Draft,
    Formats,
    ReplicaCut,
    ServingLoad,
    ServingModel,
    ServingSoftware,
    formats_of,
)
from argosy.plan.cost.scheduler import SimulatedReplica
from argosy.plan.cost.serving_constants import ServingEngine, spread_of
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layer_spec import tensor_parts
from argosy.plan.quantities import divisors
from argosy.plan.search.space import Pins
from argosy.plan.serving_calibration import SHIFTED, shifted
from argosy.plan.workload import Workload

Floats = NDArray[np.float64]

SERVING_PLAN_KEYS = ("tp", "pp", "precision")
"""Keys of a plan that apply to serving."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Requests at a time that each replica is predicted for, beside as many as it has room for."""
PREFILL_LOAD = 0.7
"""Share of their time that devices which only prefill are busy."""
LATE = {"first token": "The first token takes", "further tokens": "Further tokens take"}


@dataclass(frozen=True)
class ServingQuestion:
    prompt: int = 2048
    output: int = 512
    engine: str = ""
    """Engine and release, as "vLLM 0.10"; "" for the mean of all."""
    weights: tuple[str, ...] = ()
    """Number formats of weights to choose from; none: that of the run."""
    caches: tuple[str, ...] = ("16",)
    draft: Draft = field(default_factory=Draft)
    sequences: int | None = None
    """Requests at a time on all devices; None: from one for each replica to as many as fit."""
    rate: float | None = None
    """Requests a second to answer."""
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    """Latencies that 95 of 100 requests keep at that rate."""


@dataclass(frozen=True)
class ServingWay:
    """A way to serve: how a replica is cut, and its number formats."""

    tp: int
    pp: int
    weights: str
    cache: str

    @property
    def size(self) -> int:
        """Devices of a replica."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Serving(ServingWay):
    """One way to serve, at one number of requests at a time."""

    replicas: int
    prefill_devices: int
    """Devices that only prefill; 0: every replica prefills its own requests."""
    prefill_tp: int
    sequences: int
    """Requests that a replica answers at a time."""
    weights_bytes: float
    """Weights on one device."""
    cache_bytes: float
    """Cache on one device, for these requests at full length."""
    memory_bytes: float
    most_sequences: int
    """Requests at full length that a replica has room for."""
    ttft_s: Estimate
    tpot_s: Estimate
    tokens_per_s: Estimate
    """Output tokens that all devices give a second."""
    tokens_per_s_device: float
    money_per_million: Estimate | None
    """Cost of a million output tokens, in the cluster's currency."""
    kwh_per_million: Estimate | None
    parts: dict[str, float]
    """Seconds of a token by what they are spent on."""

    @property
    def devices(self) -> int:
        """Devices of all replicas, and those that only prefill."""
        return self.replicas * self.size + self.prefill_devices


@dataclass(frozen=True)
class SizedFleet(ServingWay):
    """Devices that hold a rate of requests."""

    replicas: int
    prefill_devices: int
    devices: int
    rate_per_replica: float
    """Requests a second that one replica answers within the latencies."""
    ttft_p95_s: float
    """Seconds to the first token that 95 of 100 requests keep at the rate asked for."""
    tpot_p95_s: float
    money_per_million: float | None
    """Cost of a million output tokens at that rate, idle time included, in the cluster's currency."""
    kwh_per_million: float | None


class ServingSearch:
    """Predicts every way to serve one model on one cluster."""

    def __init__(self, costs: CostModel, cluster: Cluster, question: ServingQuestion, pins: Pins):
        """Raises: UserError if a pin does not apply, or no cut or format is possible."""
        self.costs, self.cluster, self.question = costs, cluster, question
        if strange := [key for key in pins if key not in SERVING_PLAN_KEYS]:
            raise UserError(f"--fix {strange[0]} says nothing about serving. Try {', '.join(SERVING_PLAN_KEYS)}.")
        device = cluster.device
        named = "--engine" if question.engine else "the cluster's serving_engine ="
        software = ServingSoftware.of(question.engine or cluster.serving_engine, device, named)
        self.engine, constants, self.options = software
        self.learnt = bool(cluster.serving) and self.engine == ServingEngine.of(cluster.serving_engine)
        self.weights = question.weights or tuple(map(str, pins.get("precision", (costs.precision,))))
        if not question.caches:
            raise UserError(f"--kv-cache names no format. Try {', '.join(CACHES)}.")
        for name, known in ((self.weights, BYTES_OF_WEIGHT), (question.caches, CACHES)):
            if wrong := [word for word in name if word not in known]:
                option = "--kv-cache" if known is CACHES else "--weights"
                if known is BYTES_OF_WEIGHT and not question.weights:
                    raise UserError(
                        f"--fix precision={wrong[0]}: not known in serving. Give {option}: {', '.join(known)}."
                    )
                raise UserError(f"{option} {wrong[0]}: not known. Try {', '.join(known)}.")
        if wrong := [name for name in cluster.serving if name not in SHIFTED]:
            raise UserError(
                f"the cluster's serving.{wrong[0]} is no constant of serving. Let argosy plan --learn FILE.csv write "
                "them, or leave it out."
            )
        self.constants = shifted(constants, cluster.serving) if self.learnt else constants
        self.ways = [
            ServingWay(*way)
            for way in product(*_cuts(costs, pins), self.weights, question.caches)
            if _allowed(costs, *way[:2])
        ]
        if not self.ways:
            fixed = ", ".join(f"{key} = {'|'.join(map(str, values))}" for key, values in pins.items())
            whole = f"{costs.run.model.heads} heads over {costs.devices} devices"
            raise UserError(f"no way to cut {whole} with {fixed}. Try numbers that divide both.")

    def model(self, ways: Sequence[ServingWay]) -> ServingModel:
        """Return the model of the ways, as columns."""
        cut = ReplicaCut(np.array([way.tp for way in ways], float), np.array([way.pp for way in ways], float))
        formats = [formats_of(self.cluster.device, self.costs.rates, way.weights, way.cache) for way in ways]
        columns = Formats(
            **{name: np.array([getattr(each, name) for each in formats], float) for name in vars(formats[0])}
        )
        run = self.costs.run
        work = Workload.of(run.model_copy(update={"model": run.model.without_further()}))
        return ServingModel(
            work, self.costs.rates, cut, columns, self.constants, draft=self.question.draft, options=self.options
        )

    def found(self) -> list[Serving]:
        """Return all ways that fit, at all numbers of requests at a time. Raises: UserError if nothing fits."""
        question, all_devices = self.question, self.costs.devices
        length = question.prompt + question.output
        rooms = self.model(self.ways).room(length)
        rows: list[tuple[ServingWay, int, int]] = []
        for way, room in zip(self.ways, rooms.tolist(), strict=True):
            replicas = all_devices // way.size
            most = math.floor(room)
            if question.sequences is not None:
                here = -(-question.sequences // replicas)
                rows += [(way, replicas, here)] if here <= most else []
            elif most >= 1:
                rows += [(way, replicas, n) for n in sorted({*(n for n in BATCH_SIZES if n < most), most})]
        if not rows:
            self._nothing_fits(rooms)
        model = self.model([way for way, _, _ in rows])
        together = self._points(rows, model)
        if len(self.ways) and question.sequences is None and all_devices > 1:
            return together + self._apart(rows, model)
        return together

    def _nothing_fits(self, rooms: Floats) -> None:
        best = int(np.argmax(rooms))
        way, model = self.ways[best], self.model(self.ways[best : best + 1])
        need = self.question.sequences or 1
        room = max(0, math.floor(rooms[best]))
        length = self.question.prompt + self.question.output
        cache = float(model.token_cache_bytes[0]) * length
        raise UserError(
            f"nothing fits: with tp = {way.tp} and pp = {way.pp} a device needs {gib(model.weights_bytes[0])} GiB for "
            f"weights and {gib(cache)} GiB for the cache of each request of {length} tokens, and has "
            f"{gib(self.costs.rates.memory_bytes)} GiB: a replica has room for {room} requests, and {need} are asked "
            "for at a time. Try fewer or shorter requests, --weights fp8, --kv-cache fp8, or more devices."
        )

    def _points(self, rows: list[tuple[ServingWay, int, int]], model: ServingModel) -> list[Serving]:
        question = self.question
        sequences = np.array([n for _, _, n in rows], float)
        load = ServingLoad(sequences, question.prompt, question.output)
        found = model.latencies(load)
        rates = found.reached(load)
        busy = np.array([n for _, n, _ in rows], float)
        if question.sequences is not None:  # they need not fill all replicas
            busy = np.minimum(busy, question.sequences / sequences)
        return self._servings(rows, model, found.ttft_s, found.tpot_s, rates * busy, np.zeros(len(rows)), None)

    def _apart(self, rows: list[tuple[ServingWay, int, int]], model: ServingModel) -> list[Serving]:
        """Return the ways whose prefill has devices of its own, as many as keep the others busy."""
        question, costs = self.question, self.costs
        prefill_s = self.model(self.ways).prefill_s(1.0, question.prompt)
        work = prefill_s * np.array([way.size for way in self.ways])
        fits = self.model(self.ways).room(question.prompt) >= 1
        kept = []
        for index, (way, _, sequences) in enumerate(rows):
            same = [i for i, w in enumerate(self.ways) if (w.weights, w.cache) == (way.weights, way.cache) and fits[i]]
            best = min(same, key=lambda i: float(work[i]))
            token_s = float(model.decode_s(sequences, question.prompt + question.output / 2)[index])
            answers_per_s = sequences / (question.output * token_s)
            size = self.ways[best].size
            per_replica = answers_per_s * float(work[best]) / PREFILL_LOAD
            replicas = math.floor(costs.devices / (way.size + per_replica))
            prefill = size * math.ceil(replicas * per_replica / size) if replicas else 0
            while replicas and replicas * way.size + prefill > costs.devices:
                replicas -= 1
                prefill = size * math.ceil(replicas * per_replica / size)
            if replicas:
                sent = self._handover_s(way, float(model.token_cache_bytes[index]))
                alone = float(prefill_s[best])
                waited = alone * (1 + PREFILL_LOAD / (2 * (1 - PREFILL_LOAD)))  # M/D/1
                ttft = waited + sent + token_s + float(model.constants.request_s)
                kept.append((index, replicas, prefill, self.ways[best].tp, ttft, token_s))
        if not kept:
            return []
        chosen = [(rows[i][0], n, rows[i][2]) for i, n, *_ in kept]
        ttfts, tokens = (np.array([each[k] for each in kept]) for k in (4, 5))
        rates = np.array([n * rows[i][2] / token_s for i, n, _, _, _, token_s in kept])
        devices = np.array([each[2] for each in kept], float)
        columns = self.model([way for way, _, _ in chosen])
        return self._servings(chosen, columns, ttfts, tokens, rates, devices, [each[3] for each in kept])

    def _handover_s(self, way: ServingWay, token_cache_bytes: float) -> float:
        """Return the seconds that a prompt's cache takes to the devices that answer."""
        return token_cache_bytes * self.question.prompt * way.pp / float(self.costs.rates.nic_bytes_per_s)

    def _servings(
        self,
        rows: list[tuple[ServingWay, int, int]],
        model: ServingModel,
        ttft: Floats,
        tpot: Floats,
        rates: Floats,
        prefill: Floats,
        prefill_tp: list[int] | None,
    ) -> list[Serving]:
        question = self.question
        length = question.prompt + question.output
        sequences = np.array([n for _, _, n in rows], float)
        parts = model.decode_parts(sequences, question.prompt + question.output / 2)
        cache, room = model.token_cache_bytes * length, model.room(length)
        price, power = price_per_device_h(self.cluster), power_per_device_w(self.cluster)
        kind = "calibrated" if self.learnt else "strangers"
        std = {name: spread_of(name, self.cluster.device.vendor, kind) for name in ("ttft", "tpot", "throughput")}
        servings = []
        for i, (way, replicas, n) in enumerate(rows):
            devices = replicas * way.size + int(prefill[i])
            tokens = Estimate.log_normal(float(rates[i]), std["throughput"])
            hours = propagate(lambda rate, used=devices: 1e6 / rate / 3600 * used, tokens)
            others = float(tpot[i]) - sum(float(part[i]) for part in parts.values())
            servings.append(
                Serving(
                    **vars(way),
                    replicas=replicas,
                    prefill_devices=int(prefill[i]),
                    prefill_tp=prefill_tp[i] if prefill_tp else 0,
                    sequences=n,
                    weights_bytes=float(model.weights_bytes[i]),
                    cache_bytes=float(n * cache[i]),
                    memory_bytes=float(model.weights_bytes[i] + n * cache[i]),
                    most_sequences=math.floor(room[i]),
                    ttft_s=Estimate.log_normal(float(ttft[i]), std["ttft"]),
                    tpot_s=Estimate.log_normal(float(tpot[i]), std["tpot"]),
                    tokens_per_s=tokens,
                    tokens_per_s_device=float(rates[i]) / devices,
                    money_per_million=price and propagate(lambda h, each: h * each, hours, price),
                    kwh_per_million=power and propagate(lambda h, watts: h * watts / 1000, hours, power),
                    parts={name: float(part[i]) for name, part in parts.items()} | {"prefill": max(0.0, others)},
                )
            )
        return servings

    def sized(self) -> list[SizedFleet]:
        """Return the devices that each way needs for `question.rate`, the fewest first; at most the best by way.

        Raises: UserError if no way keeps the latencies at any rate: the nearest, and what its time is spent on.
        """
        question = self.question
        rate = float(question.rate or 0)
        found = []
        for way in self.ways:
            model = _single(self.model([way]))
            if float(model.room(question.prompt + question.output)) < 1:
                continue
            found += [self._sized(way, model, rate, apart) for apart in (False, True)]
        answers = [each for each in found if each is not None]
        if not answers:
            self._nothing_reaches()
        return sorted(answers, key=lambda each: (each.devices, each.prefill_devices))

    def _sized(self, way: ServingWay, model: ServingModel, rate: float, apart: bool) -> SizedFleet | None:
        question, size = self.question, way.size
        prefill, limit, first_p95_s = 0, question.ttft_s, 0.0
        if apart:
            alone = float(model.prefill_s(1.0, question.prompt))
            sent = self._handover_s(way, float(model.token_cache_bytes)) + float(model.constants.request_s)
            wait = (question.ttft_s - sent) / alone - 1
            if wait <= 0:
                return None
            # Waiting of M/D/1, of which 95 of 100 wait at most three times the mean: the load that this allows.
            load = min(0.9, 2 * wait / (3 + 2 * wait)) if math.isfinite(wait) else 0.9
            prefill = size * math.ceil(rate * alone / load)
            load = rate * alone * size / prefill
            first_p95_s = alone * (1 + 3 * load / (2 * (1 - load))) + sent
            limit = math.inf
        replica = SimulatedReplica(model, question.prompt, question.output, decodes_only=apart)
        most = replica.most_within(limit, question.tpot_s)
        if not most:
            return None
        replicas = math.ceil(rate / most)
        devices, at_rate = replicas * size + prefill, replica.simulate(rate / replicas)
        hours = 1e6 / (rate * question.output) / 3600 * devices
        price, power = price_per_device_h(self.cluster), power_per_device_w(self.cluster)
        return SizedFleet(
            **vars(way),
            replicas=replicas,
            prefill_devices=prefill,
            devices=devices,
            rate_per_replica=most,
            ttft_p95_s=first_p95_s if apart else at_rate.ttft_p95_s,
            tpot_p95_s=at_rate.tpot_p95_s,
            money_per_million=None if price is None else hours * float(price.mid),
            kwh_per_million=None if power is None else hours * float(power.mid) / 1000,
        )

    def _nothing_reaches(self) -> None:
        question = self.question
        model = self.model(self.ways)
        alone = model.latencies(ServingLoad(1.0, question.prompt, question.output))
        over = np.maximum(alone.ttft_s / question.ttft_s, alone.tpot_s / question.tpot_s)
        over = np.where(model.room(question.prompt + question.output) >= 1, over, np.inf)
        if not np.isfinite(over).any():
            self._nothing_fits(model.room(question.prompt + question.output))
        best = int(np.argmin(over))
        way, ttft, tpot = self.ways[best], float(alone.ttft_s[best]), float(alone.tpot_s[best])
        late = "first token" if ttft / question.ttft_s >= tpot / question.tpot_s else "further tokens"
        parts = (
            model.decode_parts(1.0, question.prompt)
            if late == "further tokens"
            else model.pass_parts(float(question.prompt), 1.0, question.prompt / 2, 0.0)
            | {"server": np.asarray(model.constants.request_s)}
        )
        shares = {name: float(np.broadcast_to(part, len(self.ways))[best]) for name, part in parts.items()}
        most = max(shares, key=lambda name: shares[name])
        advice = {
            "weights": "--weights fp8, or devices with more memory bandwidth"
            if late == "further tokens"
            else "--weights fp8, or devices with more FLOP/s",
            "attention": "--kv-cache fp8, or shorter prompts",
            "exchange": "devices with a faster link, or a smaller tp",
            "overhead": "a newer engine, or --draft",
            "draft": "a cheaper draft",
            "server": "--engine SGLang or TensorRT-LLM, or a server of your own that --learn has measured",
        }[most]
        raise UserError(
            f"nothing answers 95 of 100 requests within {_limits(question)}, at any rate. Nearest is tp = {way.tp}, "
            f"pp = {way.pp}, {way.weights} weights: {seconds(ttft)} to the first token and {seconds(tpot)} between "
            f"tokens with one request alone. {LATE[late]} most time for {most} "
            f"({100 * shares[most] / sum(shares.values()):.0f} %). Try {advice}, or limits above these."
        )


def _limits(question: ServingQuestion) -> str:
    said = [(question.ttft_s, "to the first token"), (question.tpot_s, "between tokens")]
    return " and ".join(f"{seconds(limit)} {what}" for limit, what in said if math.isfinite(limit))


def pareto(found: Sequence[Serving]) -> list[Serving]:
    """Return the ways that no other beats in both time per token and tokens a second of a device, the fastest first."""
    best, kept = 0.0, []
    for way in sorted(found, key=lambda way: (float(way.tpot_s.mid), -way.tokens_per_s_device)):
        if way.tokens_per_s_device > best:
            best = way.tokens_per_s_device
            kept.append(way)
    return kept


def _cuts(costs: CostModel, pins: Pins) -> tuple[Sequence[int], Sequence[int]]:
    model, node = costs.run.model, int(costs.rates.node)
    tps = pins.get("tp", [n for n in divisors(costs.devices) if n <= node])
    return tps, pins.get("pp", [n for n in divisors(costs.devices) if n <= model.layers])


def _allowed(costs: CostModel, tp: int, pp: int) -> bool:
    model = costs.run.model
    return costs.devices % (tp * pp) == 0 and not any(n % tp for n in (tensor_parts(model), model.delta_net.key_heads))


def _single(model: ServingModel) -> ServingModel:
    """Return a model of columns of one as one of numbers."""
    cut = ReplicaCut(float(np.asarray(model.cut.tp)[0]), float(np.asarray(model.cut.pp)[0]))
    formats = Formats(**{name: float(column[0]) for name, column in vars(model.formats).items()})
    return ServingModel(
        model.work, model.rates, cut, formats, model.constants, draft=model.draft, options=model.options
    )
