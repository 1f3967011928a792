"""The run file's tables of sinks: where else a run is shown. Credentials come from the environment alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from argosy.config.section import Section

Port = Annotated[int, Field(ge=0, le=65535)]


class TensorBoardConfig(Section):
    """TensorBoard's event files. Extra: tensorboard."""

    folder: Path | None = None
    """Folder of the event files; if not given, `tensorboard` in the run's folder."""


class WandbConfig(Section):
    """Weights & Biases. Extra: wandb. The key is read from WANDB_API_KEY, or from what `wandb login` left."""

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

    endpoint: str | None = None
    """Base URL of the collector; if not given, OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318."""
    service: str | None = None
    """service.name of the traces; if not given, OTEL_SERVICE_NAME, else argosy."""
    steps_per_span: Annotated[int, Field(ge=1)] = 100
    """Steps of one span."""


class SinksConfig(Section):
    """How sinks are held."""

    timeout_s: PositiveFloat = 60.0
    """A sink that does nothing for so long is ended, and tried again later."""
    flush_s: PositiveFloat = 30.0
    """At the run's end, sinks have so long to write the rest."""
    memory_bytes: Annotated[int, Field(ge=2**28)] = 4 * 2**30
    """A sink that takes more memory than this fails, and is tried again later."""
