"""`argosy probe --site`: the links between sites, and one cluster of all sites, in each site's file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from pydantic import ValidationError

from argosy.config.schema import RunConfig
from argosy.errors import RunFailed, UserError
from argosy.launch.sites import check_addresses
from argosy.observe.progress import Progress
from argosy.plan.hardware.clusters import Cluster, NetworkTier, SiteLink
from argosy.plan.hardware.measurements import Measurements
from argosy.probe.sites import FROM_PROBE, SitesProbe
from argosy.sync.links import open_links
from argosy.sync.messages import VERSION, SiteHello


def probe_links(run: RunConfig, file: Path, seconds: float, quiet: bool) -> Cluster:
    """Return the cluster of all sites of `run`, with the links between them measured; `run.site` is this one.

    file: the cluster's file of this site, which is a part of it. seconds: how long the others are waited for.
    Raises: UserError, RunFailed.
    """
    own = _own_part(run, file)
    check_addresses(run)
    home = (Path("runs") / run.name).absolute()
    home.mkdir(parents=True, exist_ok=True)
    open_at = open_links(run, run.site, home, FROM_PROBE)
    names = "\n".join(f"{site.name} {site.address}" for site in run.sites)
    identity = f"probe {hashlib.sha256(names.encode()).hexdigest()[:16]}"
    part = Cluster(groups=own.groups, network=own.network, measured=own.measured).model_dump_json(exclude_none=True)
    progress, refusals = Progress(enabled=not quiet), list[str]()
    hello = SiteHello(version=VERSION, site=run.site, run=identity, model="probe", cluster=part)

    def refused(who: str, why: str) -> None:
        refusals.append(f"{who} is not let in: {why}")
        progress.say(refusals[-1])

    with closing(open_at(lambda: hello, refused)) as links:
        probe = SitesProbe(run, links, progress.say)
        found = probe.measure(seconds, lambda: f"{refusals[-1]}. " if refusals else "")
    parts = {run.site: own} | {name: _part_of(name, hello) for name, hello in probe.hellos.items()}
    return joined(own, [site.name for site in run.sites], parts, found)


def _own_part(run: RunConfig, file: Path) -> Cluster:
    if not file.is_file():
        raise UserError(
            f"{file}: there is no such file. With --site, links are added to what a probe of this machine wrote. "
            "Give `argosy probe --run RUN.toml` first, or name its file with --out."
        )
    cluster = Cluster.load(file)
    if len(cluster.sites) > 1:
        if run.site not in cluster.sites:
            raise UserError(
                f"{file}: it has the sites {', '.join(cluster.sites)}, and not {run.site}. Name another with --out."
            )
        cluster = cluster.of_site(run.site)
    return cluster


def _part_of(name: str, hello: SiteHello) -> Cluster:
    try:
        return Cluster.model_validate_json(hello.cluster)
    except ValidationError as problem:
        raise RunFailed(
            f"{name} does not describe its devices as this version does ({problem}). Nothing was written."
        ) from None


def joined(own: Cluster, names: Sequence[str], parts: Mapping[str, Cluster], links: Sequence[SiteLink]) -> Cluster:
    """Return the cluster of all sites. Its `measured`, factors and software are those of `own`, one of `parts`.

    names: of the sites, in the order of the run file. parts: the cluster of each.
    """
    groups = tuple(group.model_copy(update={"site": name}) for name in names for group in parts[name].groups)
    site = next(name for name in names if parts[name] is own)
    at = {name: (parts[name].measured or Measurements()).model_copy(update={"site": name}) for name in names}
    return own.changed(
        name=" + ".join(names),
        groups=groups,
        network=_network([parts[name] for name in names]),
        links=tuple(links),
        measured=at[site],
        measured_at={name: at[name] for name in names if parts[name].measured is not None},
    )


def _network(parts: Sequence[Cluster]) -> tuple[NetworkTier, ...]:
    """Return the network of all sites: that of each if they are alike, else one level, as slow as the slowest."""
    alike = {(part.devices_per_node, part.network) for part in parts}
    if len(alike) == 1:
        return parts[0].network
    levels = [tier for part in parts for tier in part.tiers[1:]]
    if not levels:
        return ()
    rate, latency_s = min(tier.bytes_per_s for tier in levels), max(tier.latency_s for tier in levels)
    devices = max(part.devices for part in parts)
    return (NetworkTier(name="network", devices=devices, bandwidth_bytes_per_s=rate, latency_s=latency_s),)
