"""What a machine shows of itself: how busy it is, its memory, disk, network; as psutil tells (the extra `devices`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class HostMeter:
    """Reads the machine's counters; rates are since the reading before."""

    def __init__(self, psutil: Any, folder: Path):
        """`folder`: whose disk is looked at."""
        self._psutil, self._folder = psutil, folder
        self._psutil.cpu_percent(interval=None)  # the first call has nothing to compare with
        self._before = self._network()

    @classmethod
    def open(cls, folder: Path) -> HostMeter | None:
        """Return the meter; None without psutil."""
        try:
            import psutil
        except ImportError:
            return None
        return cls(psutil, folder)

    def look(self) -> dict[str, float]:
        """Return shares from 0 to 1, bytes and bytes a second; load: the mean over a minute of processes that run."""
        psutil, memory = self._psutil, self._psutil.virtual_memory()
        (then_s, sent, received), self._before = self._before, self._network()
        now_s, sent_now, received_now = self._before
        past_s = max(1e-3, now_s - then_s)
        return {
            "cpu": round(psutil.cpu_percent(interval=None) / 100, 4),
            "memory_used_bytes": memory.total - memory.available,
            "memory_bytes": memory.total,
            "disk_free_bytes": psutil.disk_usage(str(self._folder)).free,
            "network_sent_bytes_per_s": round(max(0, sent_now - sent) / past_s),
            "network_received_bytes_per_s": round(max(0, received_now - received) / past_s),
            "load": round(psutil.getloadavg()[0], 2),
        }

    def _network(self) -> tuple[float, int, int]:
        counters = self._psutil.net_io_counters()  # None where there is no network
        sent, received = (counters.bytes_sent, counters.bytes_recv) if counters else (0, 0)
        return time.monotonic(), sent, received
