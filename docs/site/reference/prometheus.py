"""The page of the names that Prometheus scrapes."""

from __future__ import annotations

from argosy.watch.prometheus import METRIC_HELP, kind_of
from reference.markdown import escaped, keys_table


def page() -> str:
    """Return the page: a table of every name, its kind and its meaning."""
    rows = [f"| `{name}` | {kind_of(name)} | {escaped(meaning)} |" for name, meaning in METRIC_HELP.items()]
    return "\n\n".join(
        [
            "# Prometheus metrics",
            "The names that a run shows to Prometheus. The label `run` is in all of them. What is not known of a run, "
            "or cannot be measured on its machine, is left out. [Sinks](sinks.md) says how to scrape them.",
            keys_table(["| name | kind | meaning |", "|---|---|---|", *rows]),
        ]
    )
