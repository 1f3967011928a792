"""The check of a built site: every link inside it leads somewhere, and nothing needs another host to be read."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

LOADED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "use": "href",
}
"""Tag -> the attribute whose address a browser fetches without being asked."""

FETCHED = re.compile(r"@import|url\([\"']?(https?:)?//")
"""What makes a style sheet or a picture fetch something."""


class Page(HTMLParser):
    """The anchors of a page, the addresses that it links to, and those that it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag is the target of, links to and loads."""
        words = dict(attrs)
        self.anchors |= {words.get("id") or "", words.get("name") or ""}
        if tag == "a" and words.get("href") is not None:
            self.links.append(words["href"] or "")
        if (address := words.get(LOADED.get(tag, ""))) and words.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(address)


def check(site: Path) -> tuple[list[str], list[str]]:
    """Return the problems of the site in the folder `site`, and the addresses outside of it that it links to."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    problems: list[str] = []
    outside: set[str] = set()
    for path, page in pages.items():
        name = path.relative_to(site)
        problems += [f"{name} loads {address} from another host" for address in page.loads if urlsplit(address).netloc]
        for address in page.links + page.loads:
            if urlsplit(address).scheme or urlsplit(address).netloc:
                outside.add(address)
                continue
            target, anchor = urldefrag(address)
            file = (path.parent / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                problems.append(f"{name} links to {address}, which is not there")
            elif anchor and file in pages and unquote(anchor) not in pages[file].anchors:
                problems.append(f"{name} links to {address}, which has no such anchor")
    for sheet in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        if FETCHED.search(sheet.read_text()):
            problems.append(f"{sheet.relative_to(site)} loads something from another host")
    return problems, sorted(address for address in outside if address.startswith("http"))
