"""The compressors by the plan's word `sync`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from argosy.config.sync import SyncConfig
from argosy.sync.compressor import Compressor, Exact
from argosy.sync.powersgd import PowerSGD
from argosy.sync.quantised import Quantised, Sign
from argosy.sync.topk import TopK

COMPRESSORS: Mapping[str, Callable[[SyncConfig], Compressor]] = {
    "exact": lambda settings: Exact(),
    "bf16": lambda settings: Exact(torch.bfloat16),
    "int8": lambda settings: Quantised(settings, bits=8),
    "int4": lambda settings: Quantised(settings, bits=4),
    "powersgd": PowerSGD,
    "topk": TopK,
    "sign": Sign,
}
