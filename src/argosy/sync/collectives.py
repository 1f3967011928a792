"""Collectives of `torch.distributed` by the names of its newest version.

torch 2.13 gave them these names and deprecates the old; 2.11 and 2.12 have only the old.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
