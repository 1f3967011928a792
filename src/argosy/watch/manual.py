"""The manual of the installed version: the pages of docs/, from the checkout or from what the wheel has installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from argosy.errors import UserError, near_names

CHECKOUT = Path(__file__).parents[3] / "docs"
INSTALLED = "share/argosy/docs/"
SKILL = "skill"
"""The page that `argosy docs --skill` writes."""


def _pages() -> Iterator[tuple[str, Path]]:
    if (CHECKOUT / f"{SKILL}.md").is_file():
        found = [(path.relative_to(CHECKOUT).as_posix(), path) for path in CHECKOUT.glob("**/*.md")]
    else:
        try:
            listed = files("argosy") or []
        except PackageNotFoundError:
            listed = []
        found = [
            (str(file).partition(INSTALLED)[2], Path(str(file.locate())))
            for file in listed
            if INSTALLED in str(file) and file.suffix == ".md"
        ]
    for name, path in sorted(found):
        if not name.startswith("site/"):
            yield name.removesuffix(".md"), path


def topics() -> list[str]:
    """Return the names of all pages."""
    return [name for name, _ in _pages()]


def page(topic: str) -> str:
    """Return a page, Markdown. Raises: UserError if there is none of this name."""
    pages = dict(_pages())
    if not pages:
        raise UserError("docs: this installation has no pages. Install it anew: pip install --force-reinstall argosy")
    if topic not in pages:
        raise UserError(f"docs {topic[:60]}: no such page; {near_names(topic, list(pages))}")
    return pages[topic].read_text(encoding="utf-8")
