"""The place of a run and of its processes: the table `launch`, addresses, the options of `argosy launch`.

The options are said once, with their meaning, for all that starts jobs: `argosy launch`, a site's table `launch` and a
parameter server's have all of them; `argosy prepare` and `argosy sweep`, whose jobs are programs on one machine each,
have those of `ClusterOptions`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, fields
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from argosy.config.section import PositiveSeconds, Section
from argosy.errors import UserError
from argosy.files import read_at_most

PATTERN = r"(?:[^\s:\[\]]+|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]):\d{1,5}"
MOST_PORT = 65535


def host_and_port(text: str) -> tuple[str, int]:
    """Return both of an address HOST:PORT; an IPv6 address as HOST is in brackets there."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def interface_of(host: str) -> str:
    """Return the address to listen at for peers that call `host`: of this machine alone if that is, "" for all."""
    return "127.0.0.1" if host == "localhost" else host if is_loopback(host) else ""


SHORTEST_TOKEN = 16
"""Characters of a token without which other machines get no answer."""
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
"""The names in Host headers of requests that come from this machine."""


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches `host`."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def host_of(header: str) -> str:
    """Return the name in a Host header, without its port, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _can_be_called(host: str) -> bool:
    """Return False for what no host is called, which sockets refuse with a UnicodeError: "node1..org"."""
    with suppress(ValueError):  # a UnicodeError is one
        if ":" in host:
            return bool(IPv6Address(host))
        return bool(host.encode("idna"))
    return False


def _checked(text: str) -> str:
    host, port = host_and_port(text) if re.fullmatch(PATTERN, text) else ("", 0)
    if not (0 < port <= MOST_PORT and _can_be_called(host)):
        raise ValueError(
            f'"{text}" is no address. Write HOST:PORT, with a port from 1 to {MOST_PORT}, such as '
            '"node1.example.org:7100" or "[fd00::1]:7100"'
        )
    return text


Address = Annotated[str, AfterValidator(_checked), Field(json_schema_extra={"pattern": f"^{PATTERN}$"})]
OptionalAddress = Annotated[
    str, AfterValidator(lambda text: text and _checked(text)), Field(json_schema_extra={"pattern": f"^$|^{PATTERN}$"})
]
"""An address, or an empty text."""


MOST_RANK_MAP_BYTES = 64 * 2**20


def read_rank_map(path: str) -> dict[str, int]:
    """Return node -> its place in the order of ranks, of the file that launch.rank_map names; empty without one.

    Raises: UserError for a file that cannot be read, or names no node or one twice.
    """
    if not path:
        return {}
    try:
        text = read_at_most(Path(path), MOST_RANK_MAP_BYTES).decode()
        names = [line.strip() for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or "it is not a text file"
        raise UserError(
            f"launch.rank_map = {path}: cannot be read: {why}. `argosy plan --rank-map FILE` writes one; all nodes "
            "must see it."
        ) from None
    found: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,255}", name):
            raise UserError(
                f'launch.rank_map = {path}: "{name[:80]}" is not the name of a node. Write one name in each line.'
            )
        if name in found:
            raise UserError(
                f"launch.rank_map = {path}: {name} is listed twice, and a node has one place. Remove line {number}."
            )
        found[name] = len(found)
    if not found:
        raise UserError(f"launch.rank_map = {path}: names no node. Write one name in each line, or leave the key out.")
    return found


ETCD_PORT = 2379
FORMS = (
    '"etcd://HOST:PORT,HOST:PORT,HOST:PORT" ("etcds://..." for TLS), "kubernetes://NAMESPACE/NAME", or "folder", '
    "the run's folder"
)
_ENDPOINT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?")
_DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_KUBERNETES = re.compile(rf"({_DNS_LABEL})/({_DNS_LABEL}(?:\.{_DNS_LABEL})*)")


@dataclass(frozen=True)
class LeaseUrl:
    """launch.lease, taken apart."""

    kind: Literal["folder", "etcd", "kubernetes"]
    endpoints: tuple[tuple[str, int], ...] = ()
    """etcd: hosts and ports."""
    is_tls: bool = False
    prefix: str = ""
    """etcd: what its keys begin with."""
    namespace: str = ""
    name: str = ""
    """Kubernetes: of the Lease object."""

    @classmethod
    def parse(cls, text: str) -> LeaseUrl:
        """Take the text apart. Raises: ValueError, a sentence that follows the key."""
        if text == "folder":
            return cls("folder")
        scheme, _, rest = text.partition("://")
        if scheme in ("etcd", "etcds") and rest:
            return cls._of_etcd(text, rest, scheme == "etcds")
        if scheme == "kubernetes" and (found := _KUBERNETES.fullmatch(rest)):
            return cls("kubernetes", namespace=found[1], name=found[2])
        raise ValueError(f'lease = "{text}" is not one of the forms that there are: {FORMS}')

    @classmethod
    def _of_etcd(cls, text: str, rest: str, is_tls: bool) -> LeaseUrl:
        if "@" in rest:
            raise ValueError(
                "lease names a user of etcd; leave that out, and set the environment variables ETCDCTL_USER and "
                "ETCDCTL_PASSWORD on each machine"
            )
        hosts, _, prefix = rest.partition("/")
        endpoints = []
        for host in hosts.split(","):
            found = _ENDPOINT.fullmatch(host)
            name, port = (found[1] or found[2], int(found[3] or ETCD_PORT)) if found else ("", 0)
            if not (0 < port <= MOST_PORT and _can_be_called(name)):
                raise ValueError(f'lease = "{text}": "{host}" is not HOST:PORT')
            endpoints.append((name, port))
        return cls("etcd", tuple(endpoints), is_tls, prefix.strip("/"))


EngineName = Literal["slurm", "kubernetes", "ray", "ssh", "local"]
ProgramEngine = Literal["slurm", "ray", "local"]
"""Those that start programs, each on one machine: workers of `argosy prepare`, trials of a sweep."""


@dataclass(frozen=True, kw_only=True)
class _Machines:
    """The machines of a job."""

    nodes: PositiveInt = 1
    """Machines."""
    cpus_per_node: NonNegativeInt = 0
    """CPUs of each; slurm, ray: 0 asks for whole nodes, for this job alone."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each; 0 asks for none. ssh: use this many; 0: all."""
    gpu_resource: str = "nvidia.com/gpu"
    """kubernetes: the resource that a GPU is there, e.g. amd.com/gpu or habana.ai/gaudi."""
    memory_per_node: str = ""
    """Memory of each, in the cluster's words: slurm 64G, kubernetes 64Gi. Empty: what the cluster gives."""
    hosts: str = ""
    """ssh: the machines, e.g. node1,node2, each by a name that ssh takes."""
    namespace: str = ""
    """kubernetes: the namespace; empty: kubectl's own."""
    volume: str = ""
    """kubernetes: the PersistentVolumeClaim for data and runs, and its path in the pods if not /data: CLAIM[:PATH]."""
    image: str = ""
    """kubernetes: the container image. slurm: that of each task (srun --container-image, of the pyxis plugin)."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of every command that starts jobs on an engine. Each engine takes some, and refuses the others."""

    time: str = ""
    """slurm: a job's time limit, e.g. 24:00:00; a run is requeued when that is over. Empty: the partition's."""
    account: str = ""
    """slurm: the account that is charged."""
    partition: str = ""
    """slurm: the partition. kubernetes: Kueue's LocalQueue; empty: the one called default, if the namespace has it."""
    address: str = ""
    """ray: of the cluster's dashboard, e.g. http://head:8265, or its head; empty: RAY_ADDRESS, else the cluster that
    this machine is in."""
    extra: tuple[str, ...] = ()
    """Lines that are passed through. slurm: options of sbatch. ssh: of ssh. ray: of `ray job submit`. kubernetes: JSON,
    merged into the pod's spec. On the command line --extra=--constraint=h100, again for another line; in a site's table
    extra = ["--constraint=h100"]."""

    def launch_options(self, **others: Any) -> LaunchOptions:
        """Return these options with others, of a job."""
        return LaunchOptions(**{field.name: getattr(self, field.name) for field in fields(ClusterOptions)}, **others)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ClusterOptions, _Machines):
    """Resources that a job asks of the engine that starts it."""

    def for_engine(self) -> dict[str, Any]:
        """Return the values of these options by name."""
        return {field.name: getattr(self, field.name) for field in fields(EngineOptions)}

    @property
    def given(self) -> list[str]:
        """The names of these options that are not as they are if nobody says them."""
        return [field.name for field in fields(EngineOptions) if getattr(self, field.name) != field.default]

    def in_words(self) -> tuple[str, ...]:
        """Return the words of a command line that give these options."""
        words = list[str]()
        for name in self.given:
            option, value = f"--{name.replace('_', '-')}", getattr(self, name)
            words += [f"{option}={each}" for each in value] if isinstance(value, tuple) else [option, str(value)]
        return tuple(words)


@dataclass(frozen=True, kw_only=True)
class _Place:
    on: EngineName = "local"
    """The engine and its options."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(EngineOptions, _Place):
    """The engine that starts a job, and the resources that it asks for there."""


DeviceType = Literal["cpu", "cuda", "xpu", "hpu", "npu", "mps"]
"""Kinds of devices, as torch names them: cuda is NVIDIA's and (by ROCm) AMD's, xpu Intel's, hpu Gaudi, npu Ascend, mps
Apple's."""
USUAL_ACCELERATOR: DeviceType = "cuda"
"""The kind that plans for devices elsewhere are for, and the only one with fp8 here (torchao's)."""


class LaunchConfig(Section):
    """The machines of the run, and the processes on each."""

    processes: NonNegativeInt = 0
    """Number of GPUs to use on each machine, one worker process for each; 0: as many as the plan says; with auto all
    GPUs, or one process without GPUs."""
    threads: NonNegativeInt = 0
    """CPU threads per worker; 0 divides the cores equally."""
    device: Literal["auto", DeviceType] = "auto"
    """Device of the workers, as torch names it; auto: the accelerator that torch finds, else the CPU."""
    max_restarts: NonNegativeInt = 3
    """Number of times in a row that lost workers are replaced without progress in between."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of a coordinator on this machine if `coordinator` is not given; 0: a free one."""
    nodes: PositiveInt = 1
    """Number of machines; start the same command on each of them, with the same `coordinator` or `lease`."""
    coordinator: OptionalAddress = ""
    """HOST:PORT of the coordinator; the agent on the machine that HOST names starts it there."""
    lease: str = ""
    """In place of `coordinator`: where the agents agree on which of them starts it, and which other one if its machine
    is lost. etcd://HOST:PORT,HOST:PORT,HOST:PORT (etcds://... for TLS), kubernetes://NAMESPACE/NAME, or folder: the
    run's folder."""
    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]*$", max_length=255)] = ""
    """Address at which the others reach a coordinator that `lease` has started on this machine; empty: the one from
    which it reaches etcd or Kubernetes, or that of its host name."""
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*$", max_length=255)] = ""
    """Name of this machine among the nodes; empty: its host name."""
    rank_map: str = ""
    """File with the names of the nodes, one a line, in the order in which they get ranks, as `argosy plan --rank-map`
    writes it; empty: in alphabetical order."""
    tls: bool = False
    """Encrypt what agents and coordinator say to each other. Without it, others on the network can read it, but without
    the run's secret they can neither take part nor change anything."""
    tls_certificate: str = ""
    """PEM file of the certificate that all nodes of the run show; empty: one that is made for the run."""
    tls_key: str = ""
    """PEM file of its private key."""
    timeout_s: PositiveSeconds = 600.0
    """Longest time that a collective may wait for a peer."""
    cluster: str = ""
    """Cluster that predictions are made for: NxDEVICE, a preset or a file; empty: ./cluster.toml if `argosy probe`
    wrote it on this machine, else the catalogue's figures for the devices at hand."""
    allow_memory: bool = False
    """Start even if the plan is predicted to need more memory than devices and host have."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if self.lease:
            LeaseUrl.parse(self.lease)
        if self.lease and self.coordinator:
            raise ValueError(
                "lease and coordinator are both given; give one: coordinator is a fixed place, lease lets the agents "
                "choose one"
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_key(self) -> Self:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together; give both, or none: one is made for the run")
        if self.tls_key and not self.tls:
            raise ValueError("tls_certificate and tls_key have no effect without tls = true; add it")
        return self
