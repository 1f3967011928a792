"""The machine shows itself in the units of the lines."""

from __future__ import annotations

from argosy.observe.host import HostMeter


def test_the_machine_shows_shares_bytes_and_rates(tmp_path):
    meter = HostMeter.open(tmp_path)
    assert meter is not None
    sum(number * number for number in range(10**6))
    seen = meter.look()
    assert set(seen) == {
        "cpu", "memory_used_bytes", "memory_bytes", "disk_free_bytes", "network_sent_bytes_per_s",
        "network_received_bytes_per_s", "load",
    }  # fmt: skip
    assert 0 < seen["cpu"] <= 1 and 0 < seen["memory_used_bytes"] < seen["memory_bytes"]
    assert seen["disk_free_bytes"] > 0 and min(seen.values()) >= 0
