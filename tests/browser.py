"""A headless Chromium, and a real `argosy watch` for it to look at."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENT_S

CHROMIUM = shutil.which("chromium")
WHY_NOT = "needs Debian's chromium (apt-get install chromium) and playwright (pip install playwright)"
LONGEST_MS = 20_000
"""An answer comes much sooner, but on a machine that has other things to do."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    with playwright.sync_playwright() as driver:
        # Without a sandbox, as root in a container must.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page of `argosy watch` in a browser's context of its own."""

    page: Any
    base: str
    complaints: list[str] = field(default_factory=list)
    """What the browser's console said in red, and exceptions that nobody caught."""

    def open(self, query: str = "", *, view: str | None = None) -> Any:
        """Go to an address of the page, and wait until it shows something."""
        if view is not None:
            query = f"{query or '?'}&view={view}"
        self.page.goto(f"{self.base}/{query}")
        self.page.wait_for_selector("#vitals .vital, table.runs, main .state:not(.loading), main .notice")
        self.page.wait_for_selector("p.loading", state="hidden")
        return self.page


@contextmanager
def look(browser: Any, base: str, **context: Any) -> Iterator[Watched]:
    """A page in a new context; `context` is playwright's: viewport, color_scheme, has_touch ..."""
    own = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **context})
    own.set_default_timeout(LONGEST_MS)
    watched = Watched(own.new_page(), base)
    watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    watched.page.on("console", lambda said: watched.complaints.extend([said.text] if said.type == "error" else []))
    try:
        yield watched
    finally:
        own.close()


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[str]:
    """`argosy watch FOLDER`, running; its address, without the token."""
    process = watch(folder, *options)
    try:
        yield address(process)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENT_S)


def watch(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start `argosy watch FOLDER` on a free port."""
    words = [sys.executable, "-m", "argosy", "watch", str(folder), *(options or ("--port", "0"))]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def address(process: subprocess.Popen[str]) -> str:
    """Return the address that a starting server prints."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"http://[\w.:\[\]-]+", line):
            # What it prints from now on must not fill the pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found[0].rstrip("/")
    raise AssertionError(f"it printed no address: {''.join(said)}")
