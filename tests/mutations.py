"""Records that were changed in any way: for tests of what reads records from outside."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 2**63, 10**400, 1e308, float("nan"), float("inf")),
    *("", "..", "../../x", "/etc/passwd", "a\x00b", "x" * 5000, "\ud800", "<script>"),
    *([], [[]], [1], [[1, 2, 3]], {}, {"": 0}, {"bytes": 1}, {"../x": {"bytes": 1, "sha256": "ab" * 32}}),
]
"""Values that hardly any key takes."""


def mutated(record: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Records that differ from `record` in one to three places: a key removed, renamed, added, or another value."""

    @st.composite
    def change(draw: st.DrawFn) -> dict[str, Any]:
        changed = copy.deepcopy(record)
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.sampled_from(_places(changed)))
            holder, key = place
            value = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
            match draw(st.sampled_from(["remove", "rename", "replace", "add"])):
                case "remove" if holder is not changed or len(changed) > 1:
                    del holder[key]
                case "rename" if isinstance(holder, dict) and isinstance(value, str):
                    holder[value] = holder.pop(key)
                case "add" if isinstance(holder, dict):
                    holder[draw(st.text(max_size=8))] = value
                case _:
                    holder[key] = value
        return changed

    return change()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (dict or list, key or index) of all places in a record."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]
