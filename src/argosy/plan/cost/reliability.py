"""Stops of a job: failure rates by component, from published fleets, corrected by a run's own events.

A fleet's rate of stops per device-hour is log-normal over fleets; what stopped it is split over components by shares
that are Dirichlet-distributed over fleets. Both are fitted to published figures (`failures.toml`, which
`benchmarks/planner/fit_failures.py` writes). Rates add up over devices: stops are taken to be independent, which is too
good for jobs beyond some tens of thousands of devices (docs/reliability.md).

A run's own events update both. Stops in an exposure are Poisson, so that the split over components is multinomial, and
the posterior of the shares again a Dirichlet. The rate's prior is a mixture: nearly always a fleet as published ones,
and with a small probability anything (a robust prior, Berger 1985, section 4.7.6), so that a machine that fails a
thousand times as often is believed after two stops, and one stop says little.

Rates of nodes within a fleet are gamma-distributed: a few lemons cause most stops. Of nodes that were tested for a time
without a stop, the rate is lower (the negative binomial's empirical Bayes; Robbins 1956)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import lgamma, log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.estimate import INTERVAL_Z, Estimate, plain
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.workload import Numbers

CATALOGUE = Path(__file__).parent / "failures.toml"
"""The file that `benchmarks/planner/fit_failures.py` writes."""
COMPONENTS = {
    "gpu": "GPU",
    "hbm": "HBM",
    "nvlink": "NVLink",
    "nic": "NIC",
    "network": "cable and switch",
    "host": "host",
    "dram": "DRAM",
    "psu": "power supply",
    "storage": "storage",
    "software": "software",
    "corruption": "silent corruption",
}
"""Component -> its common name. GPU is any accelerator, HBM its memory, NVLink its fast link."""
OF_NETWORK = ("nic", "network")
OF_DEVICES = ("gpu", "hbm", "nvlink")
NO_NODE_LOST = ("software", "storage", "network")
"""Components whose failures leave the node whole."""
OWN_SPREAD = 1.67
"""Spread of a figure that the user, or the device's maker, states: the root of the ratio of two clusters of A100 in one
company (Kokolis et al. 2024: 29.5 and 82.1 thousand GPU-hours)."""
ASSUMED_SPREAD = 3.0
"""Spread of a stated figure that a device's file names as assumed."""
STRANGE_KIND_STD = 0.5
"""More spread, as a standard deviation of the logarithm, for devices of which no fleet was published; assumed."""
ANYTHING, ANYTHING_STD = 0.01, 4.0
"""Prior probability that a job's rate is unlike that of any published fleet, and the spread of its logarithm then."""
REPAIR_H = Estimate(6.0, 24.0, 96.0)
"""Hours until a failed node is back; assumed."""
CONFIDENCE = 0.95
"""Spares suffice with this probability."""
BURN_IN_H = 168.0
"""Hours of the burn-in whose effect is told."""
FAILURE_DRAWS = 4000
GRID = np.linspace(-16.0, 16.0, 2001)
"""Logarithms of rates over the catalogue's, at which posteriors are computed."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FailureCatalogue:
    """The rates of published fleets."""

    hours_per_stop: float
    """Device-hours between stops from any cause: the median over fleets."""
    std: float
    """Standard deviation of its logarithm, for a fleet that nobody has seen."""
    fleets: int
    """Fleets that both are from."""
    concentration: float
    """Dirichlet concentration of the shares of such a fleet."""
    node_shape: float
    """Shape of the gamma distribution of the rates of nodes."""
    shares: Mapping[str, float]
    """Component -> share of stops."""
    kinds: tuple[str, ...]
    """Devices of those fleets."""
    sources: tuple[str, ...]


@cache
def catalogue() -> FailureCatalogue:
    table = tomllib.loads(CATALOGUE.read_text())
    return FailureCatalogue(**{**table, "kinds": tuple(table["kinds"]), "sources": tuple(table["sources"])})


def components_of(cluster: Cluster, devices: int | None = None) -> tuple[str, ...]:
    """Return the components that a job on so many devices of the cluster has; default: all."""
    used = cluster.devices if devices is None else devices
    absent: set[str] = set(OF_NETWORK) if used <= cluster.devices_per_node else set()
    if all(group.device.kind == "cpu" for group in cluster.groups):
        absent |= set(OF_DEVICES)
    elif used == 1 or all("PCIe" in group.device.link_topology for group in cluster.groups):
        absent.add("nvlink")
    return tuple(name for name in COMPONENTS if name not in absent)


def device_hours_per_stop(
    cluster: Cluster, devices: Numbers | None = None, known: FailureCatalogue | None = None
) -> Estimate:
    """Return the device-hours between stops of a job on so many devices, evenly of all kinds; default: all.

    known: what is known of failures; default: the catalogue.
    """
    known = known or catalogue()
    used = np.asarray(cluster.devices if devices is None else devices, dtype=float)
    inside, across = (
        sum(known.shares[name] for name in components_of(cluster, size))
        for size in (min(cluster.devices_per_node, cluster.devices), cluster.devices)
    )
    share = np.where(used <= cluster.devices_per_node, inside, across)
    stops_per_h = np.zeros_like(used)
    for group in cluster.groups:
        own_h = group.device.mtbf_h
        stops_per_h = stops_per_h + group.devices * (share / known.hours_per_stop if own_h is None else 1 / own_h)
    return Estimate.log_normal(
        plain(cluster.devices / stops_per_h), max(_std(group, known) for group in cluster.groups)
    )


def _std(group: NodeGroup, known: FailureCatalogue) -> float:
    """Return the spread of a kind of devices, as a standard deviation of the logarithm."""
    device = group.device
    if device.mtbf_h is not None:
        return log(ASSUMED_SPREAD if "mtbf_h" in device.assumed else OWN_SPREAD) / INTERVAL_Z
    is_known = any(device.name.upper().startswith(kind.upper()) for kind in known.kinds)
    return known.std if is_known else math.hypot(known.std, STRANGE_KIND_STD)


@dataclass(frozen=True)
class ExpectedStops:
    """Stops of one component in some hours."""

    component: str
    expected: float
    """Stops expected at the middle of the rate."""
    low: float
    high: float
    """Nine times of ten there are from `low` to `high`."""
    seen: int | None = None
    """Number seen; None: nobody has looked yet."""

    @property
    def called(self) -> str:
        return COMPONENTS.get(self.component, self.component)


@dataclass(frozen=True)
class FailureRates:
    """Expected stops of a job, by component."""

    per_device_h: Estimate
    """Prior: stops per device-hour."""
    shares: Mapping[str, float]
    """Prior: component -> share of stops; those that the job has."""
    concentration: float
    seen: Mapping[str, int]
    """Component -> stops that were seen."""
    unexplained: int = 0
    """Stops that were seen of which nobody knows the component."""
    device_hours: float = 0.0
    """Hours in which they were seen, times devices."""

    @classmethod
    def of(cls, cluster: Cluster, devices: int | None = None, known: FailureCatalogue | None = None) -> FailureRates:
        """Return what is known of a job on so many devices before it has run; default: all."""
        known = known or catalogue()
        hours = device_hours_per_stop(cluster, devices, known)
        names = components_of(cluster, devices)
        whole = sum(known.shares[name] for name in names)
        rate = Estimate(1 / hours.high, 1 / hours.mid, 1 / hours.low)
        return cls(rate, {name: known.shares[name] / whole for name in names}, known.concentration, {})

    def after(self, seen: Mapping[str, int], unexplained: int, device_hours: float) -> FailureRates:
        """Return what is known once these stops were seen in so many device-hours. A component that the job should
        not have counts as unexplained."""
        known = {name: many for name, many in seen.items() if name in self.shares}
        strange = sum(seen.values()) - sum(known.values())
        return replace(self, seen=known, unexplained=unexplained + strange, device_hours=device_hours)

    @property
    def stops(self) -> int:
        return sum(self.seen.values()) + self.unexplained

    @cached_property
    def _posterior(self) -> Floats:
        """The probability of each point of GRID: logarithms of the rate over the middle of the prior."""
        std = float(np.log(self.per_device_h.high / self.per_device_h.mid)) / INTERVAL_Z
        prior = (1 - ANYTHING) * _normal(GRID, std) + ANYTHING * _normal(GRID, ANYTHING_STD)
        mean = float(self.per_device_h.mid) * self.device_hours
        likelihood = self.stops * GRID - mean * np.exp(GRID)
        weights = np.asarray(prior * np.exp(likelihood - likelihood.max()))
        return weights / weights.sum()

    @cached_property
    def rate(self) -> Estimate:
        """Stops per device-hour, by all that is known."""
        if not self.device_hours:
            return self.per_device_h
        low, mid, high = np.interp((0.05, 0.5, 0.95), np.cumsum(self._posterior), GRID)
        return Estimate(*(float(self.per_device_h.mid) * math.exp(at) for at in (low, mid, high)))

    @property
    def is_measured(self) -> bool:
        """True if the run's own events say another rate than any published fleet's."""
        return not self.per_device_h.low <= self.rate.mid <= self.per_device_h.high

    def mtbf_s(self, devices: float) -> Estimate:
        """Return the seconds between stops of a job on so many devices."""
        return Estimate(*(3600 / (each * devices) for each in (self.rate.high, self.rate.mid, self.rate.low)))

    def share(self, component: str) -> float:
        """Return the share of stops that are of this component, by all that is known."""
        if component not in self.shares:
            return 0.0
        known = self.concentration + sum(self.seen.values())
        return (self.concentration * self.shares[component] + self.seen.get(component, 0)) / known

    def drawn_rates(self, random: np.random.Generator, many: int) -> Floats:
        """Draw stops per device-hour. Shape: (many,)."""
        if self.device_hours:
            drawn = np.interp(random.random(many), np.cumsum(self._posterior), GRID)
        else:
            drawn = random.standard_normal(many) * np.log(self.per_device_h.high / self.per_device_h.mid) / INTERVAL_Z
        return np.asarray(float(self.per_device_h.mid) * np.exp(drawn))

    def expected(self, device_hours: float) -> list[ExpectedStops]:
        """Return the stops to expect in so many device-hours, by component; likelier ones first."""
        random, names = np.random.default_rng(0), list(self.shares)
        known = np.array([self.concentration * self.shares[name] + self.seen.get(name, 0) for name in names])
        parts = random.dirichlet(np.maximum(known, 1e-6), FAILURE_DRAWS)
        counts = random.poisson(
            np.minimum(self.drawn_rates(random, FAILURE_DRAWS)[:, None] * device_hours * parts, 1e9)
        )
        ends = np.quantile(counts, (0.05, 0.95), axis=0)
        mean = float(self.rate.mid) * device_hours
        found = [
            ExpectedStops(name, mean * self.share(name), float(ends[0, i]), float(ends[1, i]), self.seen.get(name))
            for i, name in enumerate(names)
        ]
        return sorted(found, key=lambda each: -each.expected)

    def expected_in_all(self, device_hours: float) -> tuple[float, float, float]:
        """Return the stops to expect in so many device-hours: low, middle, high."""
        random = np.random.default_rng(0)
        counts = random.poisson(np.minimum(self.drawn_rates(random, FAILURE_DRAWS) * device_hours, 1e9))
        low, high = np.quantile(counts, (0.05, 0.95))
        return float(low), float(self.rate.mid) * device_hours, float(high)


def _normal(at: Floats, std: float) -> Floats:
    return np.asarray(np.exp(-0.5 * (at / std) ** 2) / std)


def node_stops_per_h(cluster: Cluster, rates: FailureRates | None = None) -> Estimate:
    """Return the stops an hour that take a node of the cluster out, by what is known of failures. Stops that nobody
    explains are taken to leave it whole."""
    rates = rates or FailureRates.of(cluster)
    known = rates.concentration + sum(rates.seen.values())
    share = (1 - sum(rates.share(name) for name in NO_NODE_LOST)) * known / (known + rates.unexplained)
    return Estimate(*(each * cluster.devices * share for each in (rates.rate.low, rates.rate.mid, rates.rate.high)))


def spare_nodes(stops_per_h: float, repair_h: float, confidence: float = CONFIDENCE) -> int:
    """Return the spare nodes to hold beside those of the job, so that with this probability no node is missing.

    stops_per_h: stops an hour that take a node out. Nodes in repair are Poisson-distributed with mean rate x repair
    time, whatever the distribution of repair times (Palm 1943, M/G/infinity).

    Raises: ValueError unless stops_per_h, repair_h >= 0 and 0 < confidence < 1.
    """
    if stops_per_h < 0 or repair_h < 0 or not 0 < confidence < 1:
        raise ValueError(f"{stops_per_h = }, {repair_h = } must be >= 0, and {confidence = } between 0 and 1")
    mean = repair_h * stops_per_h
    if mean == 0:
        return 0
    spares, at_most = 0, -mean  # log of the probability of no more than `spares`
    while at_most < log(confidence):
        spares += 1
        at_most = np.logaddexp(at_most, spares * log(mean) - mean - lgamma(spares + 1))
    return spares


@dataclass(frozen=True)
class BurnIn:
    """The effect of testing nodes before a run, and leaving out those that fail."""

    hours: float
    left_out: float
    """Share of nodes that fail in the test."""
    saved: float
    """Share of a run's stops that do not come."""


def burn_in(cluster: Cluster, hours: float = BURN_IN_H) -> BurnIn:
    """Return the effect of a burn-in of so many hours."""
    known = catalogue()
    rates = FailureRates.of(cluster, known=known)
    of_nodes = node_stops_per_h(cluster, rates)
    tested = float(of_nodes.mid) / cluster.nodes * hours / known.node_shape
    share = float(of_nodes.mid) / (float(rates.rate.mid) * cluster.devices)
    return BurnIn(hours, 1 - (1 + tested) ** -known.node_shape, share * (1 - 1 / (1 + tested)))


def node_rate_factor(stops: int, mean_stops: float) -> float:
    """Return how many times the mean node's rate one has that stopped so often where the mean node did `mean_stops`."""
    shape = catalogue().node_shape
    return (shape + stops) / (shape + mean_stops)
