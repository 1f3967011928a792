"""The run file's table `data.cache`: where pieces of data from object stores lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import PositiveFloat

from argosy.config.section import Section


class CacheConfig(Section):
    """The cache of data.sources that are URLs of an object store. All runs of a machine may share one."""

    folder: str = ""
    """Folder of the cache, on a disk of this machine; empty: argosy/data in $XDG_CACHE_HOME, or in ~/.cache."""
    size_gb: PositiveFloat = 50.0
    """Most that the cache holds, in GB (10^9 bytes); less if the disk has less room."""
    timeout_s: PositiveFloat = 600.0
    """How long a step waits for a store that does not answer, before the run ends."""

    @property
    def path(self) -> Path:
        """The folder, whoever chose it."""
        if self.folder:
            return Path(self.folder).expanduser().absolute()
        caches = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(caches) if caches else Path.home() / ".cache") / "argosy" / "data"

    @property
    def size_bytes(self) -> int:
        """`size_gb` in bytes."""
        return int(self.size_gb * 1e9)
