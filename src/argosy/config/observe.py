"""The run file's table `observe`: what a run shows of itself, and where; its alerts, profile, energy and sinks.

Credentials of sinks come from the environment alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from argosy.config.section import PositiveSeconds, Section

AlertKind = Literal[
    "spike", "nan", "stall", "dead", "disk_filling", "node_in_doubt", "low_goodput", "checkpoint_unverified"
]
ALERT_KINDS: tuple[AlertKind, ...] = get_args(AlertKind)
VARIABLE_NAME = r"^$|^[A-Za-z_][A-Za-z0-9_]*$"


class AlertsConfig(Section):
    """Alerts to people while a run goes on, and how they reach them."""

    give_credentials = "the URL, or headers, by environment variables that webhook_env and headers_env name"
    on: tuple[AlertKind, ...] = ALERT_KINDS
    """The alerts that are told: spike, nan, stall, dead, disk_filling, node_in_doubt, low_goodput,
    checkpoint_unverified."""
    page: bool = False
    """Write alerts into the run's events even if neither `webhook` nor `command` is given, so that the page shows those
    that came and went while nobody looked."""
    webhook: Annotated[str, Field(pattern=r"^$|^https?://[^\s/]+")] = ""
    """URL that each alert is posted to, as JSON. A URL with a secret in it belongs in `webhook_env`."""
    webhook_env: Annotated[str, Field(pattern=VARIABLE_NAME)] = ""
    """Environment variable that holds the URL, in place of `webhook`."""
    headers_env: Annotated[str, Field(pattern=VARIABLE_NAME)] = ""
    """Environment variable that holds headers of the request, one a line: Authorization: Bearer ..."""
    command: tuple[str, ...] = ()
    """Program with its arguments that each alert is given to, as JSON on its standard input; no shell is involved."""
    timeout_s: PositiveSeconds = 10.0
    """Longest time that a request or the command may take."""
    stall_s: PositiveSeconds = 60.0
    """stall: least time without a step. It is also twenty usual steps, and three times the longest of the last ones."""
    spike_steps: PositiveInt = 64
    """spike, nan: the alert ends after this many good steps."""
    disk_hours: NonNegativeFloat = 2.0
    """disk_filling: at the rate of the last lines the disk is full within this time; 0 looks at free space alone."""
    disk_free_gb: NonNegativeFloat = 5.0
    """disk_filling: less than this is free, in GB."""
    goodput: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """low_goodput: a smaller share of the last `goodput_minutes` went into steps that count."""
    goodput_minutes: PositiveFloat = 30.0
    """Window of low_goodput; in a younger run it is not looked at."""
    unverified_minutes: NonNegativeFloat = 0.0
    """checkpoint_unverified: no checkpoint was read back and found whole for this long; 0: three times the interval
    between checkpoints, at least 30 minutes."""
    goes_on_minutes: PositiveFloat = 60.0
    """An alert that lasts this long is sent once more."""

    @property
    def are_delivered(self) -> bool:
        """True if somebody is to be told, or the events."""
        return self.page or bool(self.webhook or self.webhook_env or self.command)


class EnergyConfig(Section):
    """Prices of energy, carbon and devices where the run is; for its report, beside what was measured."""

    grid_kg_per_kwh: NonNegativeFloat | None = None
    """CO2 of a kWh of the electricity, kg; none: that of `launch.cluster`, or the world's average."""
    pue: Annotated[float, Field(ge=1)] | None = None
    """Power of the building over that of the computers; none: that of `launch.cluster`, or 1.2."""
    price_per_device_h: PositiveFloat | None = None
    """Price of an hour of one device (on CPUs: of a process); none: that of `launch.cluster`, or the catalogue's."""
    currency: str = "USD"
    """Currency of price_per_device_h."""

    @model_validator(mode="after")
    def _currency_has_a_price(self) -> Self:
        if self.currency != "USD" and self.price_per_device_h is None:
            raise ValueError(
                f"currency = {self.currency} has no effect without price_per_device_h: other prices are in the "
                "currency of `launch.cluster`, or in USD; give it too"
            )
        return self


class ProfileConfig(Section):
    """Steps that are recorded with torch's profiler, and summed up (docs/profiling.md)."""

    steps: str = ""
    """FIRST:END, as Python's slices: 10:13 records the steps 10, 11 and 12 as metrics.jsonl counts them; "": none."""
    ranks: str = "nodes"
    """Ranks that record: nodes (the first rank of each), all, or ranks such as 0,7."""
    memory: bool = True
    """Record memory too: on a GPU a snapshot of it, on a CPU each allocation."""
    stacks: bool = False
    """Record where in the source each operation was called; makes steps slower and traces larger."""

    @field_validator("steps")
    @classmethod
    def _is_range(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+):(\d+)", value)
        if value and found is None:
            raise ValueError(f"{value} is not FIRST:END, such as 10:13 for the steps 10, 11 and 12")
        if found and int(found[1]) >= int(found[2]):
            ahead = int(found[1]) + 3
            raise ValueError(f"{value} has no step: END must exceed FIRST. Try {found[1]}:{ahead}")
        return value

    @field_validator("ranks")
    @classmethod
    def _are_ranks(cls, value: str) -> str:
        if value not in ("nodes", "all") and not re.fullmatch(r"\d{1,9}(, *\d{1,9})*", value):
            raise ValueError(f"{value} is neither nodes, nor all, nor ranks such as 0,7")
        return value

    @property
    def chosen(self) -> frozenset[int] | None:
        """The ranks that are named; None if they are chosen by their place."""
        return None if self.ranks in ("nodes", "all") else frozenset(map(int, self.ranks.split(",")))

    @property
    def range(self) -> range:
        """The steps, 0-based; empty if none are recorded."""
        first, _, end = self.steps.partition(":")
        return range(int(first), int(end)) if end else range(0)


Port = Annotated[int, Field(ge=0, le=65535)]


class TensorBoardConfig(Section):
    """TensorBoard's event files. Extra: tensorboard."""

    folder: Path | None = None
    """Folder of the event files; if not given, `tensorboard` in the run's folder."""


class WandbConfig(Section):
    """Weights & Biases. Extra: wandb. The key is read from WANDB_API_KEY, or from what `wandb login` left."""

    give_credentials = "the key by WANDB_API_KEY, or `wandb login`"
    project: str = "argosy"
    """Project of the run."""
    entity: str | None = None
    """User or team; if not given, your default one."""
    group: str | None = None
    """Group that the run belongs to."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """offline: written to `wandb` in the run's folder, for `wandb sync`."""
    url: str | None = None
    """Address of your own server; if not given, WANDB_BASE_URL or wandb.ai."""


class MlflowConfig(Section):
    """MLflow. Extra: mlflow. Credentials are read from MLFLOW_TRACKING_USERNAME and its fellows."""

    give_credentials = "them by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    tracking_uri: str | None = None
    """Address of the server, or a folder; if not given, MLFLOW_TRACKING_URI, else `mlflow` in the run's folder."""
    experiment: str = "argosy"
    """Experiment of the run; it is made if it is not there."""


class TrackioConfig(Section):
    """trackio. Extra: trackio. The token for a Space is read from HF_TOKEN."""

    project: str = "argosy"
    """Project of the run."""
    space: str | None = None
    """Hugging Face Space that shows it, as "user/name"; if not given, it is kept on this machine."""
    folder: Path | None = None
    """Folder of trackio's files; if not given, TRACKIO_DIR, else trackio's own."""


class PrometheusConfig(Section):
    """An address that a Prometheus server scrapes, /metrics."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a token, in ARGOSY_METRICS_TOKEN."""
    port: Port = 9464
    """Port to listen on; 0: any that is free (the event `sink_started` says which)."""


class OpenTelemetryConfig(Section):
    """Traces of a run's phases, by OTLP over HTTP. Extra: opentelemetry. Credentials: OTEL_EXPORTER_OTLP_HEADERS."""

    give_credentials = "them by OTEL_EXPORTER_OTLP_HEADERS"
    endpoint: str | None = None
    """Base URL of the collector; if not given, OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318."""
    service: str | None = None
    """service.name of the traces; if not given, OTEL_SERVICE_NAME, else argosy."""
    steps_per_span: Annotated[int, Field(ge=1)] = 100
    """Steps of one span."""


class SinksConfig(Section):
    """Limits of all sinks."""

    timeout_s: PositiveSeconds = 60.0
    """A sink that does nothing for this long is ended, and tried again later."""
    flush_s: PositiveSeconds = 30.0
    """Time that sinks have to write the rest at the run's end."""
    memory_bytes: Annotated[int, Field(ge=2**28)] = 4 * 2**30
    """A sink that takes more memory than this fails, and is tried again later."""


class ObserveConfig(Section):
    """The records of a run, and where they are shown. Nothing here changes what is trained."""

    ranks_every_s: PositiveSeconds = 5.0
    """Seconds between two lines in which a node writes down what its ranks and devices did; longer in large runs."""
    energy: EnergyConfig = EnergyConfig()
    alerts: AlertsConfig = AlertsConfig()
    norms_every_steps: NonNegativeInt = 50
    """Steps between two measurements of the norms of weights, gradients and updates by layer; 0: never."""
    noise_scale_every_steps: NonNegativeInt = 0
    """Steps between two estimates of the gradient noise scale, which tells how large a batch is worth its samples; 0:
    never. An estimate reads the gradients once more."""
    sample_every_steps: NonNegativeInt = 0
    """Steps between two texts that continue evaluate.sample_prompt, each written by a verified checkpoint; 0: only at
    the end."""
    profile: ProfileConfig = ProfileConfig()
    sinks: tuple[str, ...] = ()
    """Further places that show the run: tensorboard, wandb, mlflow, trackio, prometheus, opentelemetry."""
    sink: SinksConfig = SinksConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    opentelemetry: OpenTelemetryConfig = OpenTelemetryConfig()
