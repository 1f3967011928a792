"""Which steps and ranks are profiled, which alerts are delivered, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from argosy.config.observe import ALERT_KINDS, AlertsConfig, ObserveConfig, ProfileConfig


@pytest.mark.parametrize(("steps", "recorded"), [("", range(0)), ("10:13", range(10, 13)), ("0:1", range(1))])
def test_steps_are_a_slice_of_pythons(steps: str, recorded: range) -> None:
    assert ProfileConfig(steps=steps).range == recorded


@pytest.mark.parametrize(
    ("ranks", "chosen"), [("nodes", None), ("all", None), ("3", {3}), ("0,7", {0, 7}), ("0, 7", {0, 7})]
)
def test_ranks_are_chosen_by_their_place_or_named(ranks: str, chosen: set[int] | None) -> None:
    assert ProfileConfig(ranks=ranks).chosen == chosen


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"profile": {"steps": "10"}}, "10 is not FIRST:END, such as 10:13 for the steps 10, 11 and 12"),
        ({"profile": {"steps": "13:13"}}, "13:13 has no step: END must exceed FIRST. Try 13:16"),
        ({"profile": {"steps": "-1:3"}}, "-1:3 is not FIRST:END"),
        ({"profile": {"ranks": "first"}}, "first is neither nodes, nor all, nor ranks such as 0,7"),
        ({"profile": {"ranks": "9" * 5000}}, "is neither nodes, nor all, nor ranks"),
        ({"profile": {"ranks": "1,"}}, "1, is neither nodes, nor all, nor ranks"),
        ({"alerts": {"webhook": "ftp://host/x"}}, "String should match pattern"),
        ({"alerts": {"webhook_env": "MY URL"}}, "String should match pattern"),
        ({"alerts": {"on": ["spikes"]}}, "Input should be 'spike', 'nan', 'stall'"),
        ({"prometheus": {"port": 65536}}, "less than or equal to 65535"),
        ({"energy": {"pue": 0.9}}, "greater than or equal to 1"),
        ({"energy": {"currency": "EUR"}}, "currency = EUR has no effect without price_per_device_h"),
    ],
)
def test_what_cannot_be_observed_so_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ObserveConfig.model_validate(table)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "are_delivered"),
    [
        ({}, False),
        ({"page": True}, True),
        ({"webhook": "https://host/x"}, True),
        ({"webhook_env": "URL"}, True),
        ({"command": ["mail", "me"]}, True),
        ({"headers_env": "HEADERS"}, False),  # headers alone reach nobody
    ],
)
def test_alerts_are_delivered_if_there_is_somebody_to_tell(keys: dict[str, Any], are_delivered: bool) -> None:
    alerts = AlertsConfig.model_validate(keys)
    assert alerts.are_delivered is are_delivered and alerts.on == ALERT_KINDS
