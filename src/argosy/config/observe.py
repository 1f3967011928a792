"""The run file's table `observe`: what a run shows of itself, and where."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from argosy.config.alerts import AlertsConfig
from argosy.config.energy import EnergyConfig
from argosy.config.profile import ProfileConfig
from argosy.config.section import Section
from argosy.config.sinks import (
    MlflowConfig,
    OpenTelemetryConfig,
    PrometheusConfig,
    SinksConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)


class ObserveConfig(Section):
    """What a run shows of itself, and where. Nothing here changes what is trained."""

    ranks_every_s: PositiveFloat = 5.0
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
    """Where else the run is shown: tensorboard, wandb, mlflow, trackio, prometheus, opentelemetry."""
    sink: SinksConfig = SinksConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    opentelemetry: OpenTelemetryConfig = OpenTelemetryConfig()
