"""The page shows names that come from files and options as text, whatever is in them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from argosy.plan.report.html import page
from argosy.plan.report.network import network_in_words
from argosy.plan.report.report import plan_report
from argosy.plan.report.request import Question, of_model

HOSTILE = "<script>alert(1)</script><img src=x onerror=\"alert('2')\">&lt;"
KEYS = ("objective", "what", "kind", "family")
"""Fields whose text is looked up, and is not from outside."""


class Tags(HTMLParser):
    """The tags of a page, and their attributes' names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def tags(text: str) -> list[tuple[str, tuple[str, ...]]]:
    parser = Tags()
    parser.feed(text)
    return [tag for tag in parser.found if tag[0] != "wbr"]


def spoiled(value: Any) -> Any:
    """Return a report with hostile text in place of all of its texts."""
    if isinstance(value, str):
        return HOSTILE
    if is_dataclass(value) and not isinstance(value, type) and value.__class__.__module__.startswith("argosy.plan."):
        init = [f.name for f in fields(value) if f.init and f.name not in KEYS]
        return replace(value, **{name: spoiled(getattr(value, name)) for name in init})
    return tuple(map(spoiled, value)) if type(value) is tuple else value


def test_no_text_of_a_report_becomes_markup() -> None:
    report = plan_report(of_model("llama3-8b", "32xh100+32xa100", Question(global_batch=512)))
    assert report.uneven, "the outlook names devices"
    hostile = page(spoiled(report))
    assert HOSTILE not in hostile and {*tags(hostile)} <= {*tags(page(report))}


def test_the_page_says_where_ranks_are_on_the_network() -> None:
    path = str(Path(__file__).parents[3] / "examples/networks/torus-3d.toml")
    few = "tp=4|8,cp=1,schedule=1f1b,recompute=full"  # plans to look at: the network is the point
    report = plan_report(of_model("llama3-8b", path, Question(global_batch=512, top=1, fix=few)))
    shown = page(report)
    assert "Where ranks are" in shown and network_in_words(report.network) in shown
    assert all(f">{axis.algorithm}<" in shown for axis in report.network.axes)
    hostile = page(spoiled(report))
    assert HOSTILE not in hostile and {*tags(hostile)} <= {*tags(shown)}
