"""Services take part in steps and decide nothing of them: a file each, and a word in `SERVICES`."""

from argosy.training.services.noise_scale import NoiseScale
from argosy.training.services.norms import LayerNorms, Preferences
from argosy.training.services.profiling import Profiling
from argosy.training.services.rebalance import Rebalance
from argosy.training.services.service import Service
from argosy.training.services.user_code import UserCode

SERVICES: tuple[type[Service], ...] = (Profiling, Rebalance, NoiseScale, LayerNorms, Preferences, UserCode)
"""Services in the order in which they are called."""
