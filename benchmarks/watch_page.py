"""How long the page of `argosy watch` takes to show a run of a million steps, and pictures of it.

    python benchmarks/watch_page.py                                # times: opening, and each step of a scroll
    python benchmarks/watch_page.py --pictures docs/pictures       # those of docs/watch.md

Needs Debian's chromium and playwright. The runs are made up (tests/run_folders.py), the same each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from argosy.watch.reader import RunReader
from browser import chromium, look, serve
from run_folders import Made, Trouble

TROUBLE = Trouble(straggler=(2, 430), spike=200, killed=(1, 300))
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
PICTURES = {
    "watch-runs-light": ("", WIDE, "light"),
    "watch-run-light": ("?run=stdlib-5m", WIDE, "light"),
    "watch-run-dark": ("?run=stdlib-5m", WIDE, "dark"),
    "watch-time-light": ("?run=stdlib-5m&view=time", WIDE, "light"),
    "watch-ranks-dark": ("?run=stdlib-5m&view=ranks", WIDE, "dark"),
    "watch-events-light": ("?run=stdlib-5m&view=events", WIDE, "light"),
    "watch-advice-dark": ("?run=stdlib-5m&view=advice", WIDE, "dark"),
    "watch-phone-dark": ("?run=stdlib-5m", PHONE, "dark"),
}
"""Name -> address, window, colours."""
MOST_BYTES = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pictures", type=Path, help="take pictures into this folder, instead of times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        if options.pictures:
            take_pictures(browser, Path(folder), options.pictures)
        else:
            print(json.dumps(times(browser, Path(folder), options.steps), indent=1))


def take_pictures(browser: Any, folder: Path, out: Path) -> None:
    """Make runs, and a picture of each view."""
    # As if it went on at this moment.
    made = Made(steps=520, total_steps=800, ranks=8, per_node=4, trouble=TROUBLE, experts=8, is_finished=False)
    replace(made, start_s=time.time() - 10 - 20 - 520 * made.step_s).write(folder / "stdlib-5m")
    for name, steps in (("llama-5m-lr-3e-4", 800), ("llama-5m-lr-1e-3", 800), ("moe-8x", 300)):
        crash = Trouble(crash=name == "moe-8x")
        Made(steps=steps, trouble=crash, start_s=time.time() - 90_000).write(folder / "sweep" / name)
    out.mkdir(parents=True, exist_ok=True)
    with serve(folder) as base:
        for name, (query, viewport, colours) in PICTURES.items():
            phone = viewport is PHONE
            with look(browser, base, viewport=viewport, color_scheme=colours, is_mobile=phone, has_touch=phone) as seen:
                seen.open(query)
                seen.page.wait_for_selector("#live.live")
                seen.page.wait_for_timeout(1500)  # the strip has come, the dot does not blink
                path = out / f"{name}.png"
                seen.page.screenshot(path=path, animations="disabled")
                assert path.stat().st_size < MOST_BYTES, f"{path} is too large"
                print(path, path.stat().st_size, *seen.complaints)


def times(browser: Any, folder: Path, steps: int) -> dict[str, Any]:
    """Open a run of so many steps in a server that has just started, then scroll through it."""
    Made(steps=steps, total_steps=2 * steps, ranks=1, norms_every=1000, is_finished=False).write(folder / "long")
    read_s, read_cpu_s = reading(folder / "long")
    with serve(folder) as base, look(browser, base) as seen:
        first = seconds(lambda: drawn(seen, "?run=long"))
        whole = first + seconds(lambda: seen.page.wait_for_selector("p.loading", state="hidden"))
        again = seconds(lambda: drawn(seen, "?run=long"))
        scrolls = []
        seen.open(f"?run=long&from={steps // 10}&to={steps // 5}")
        strip = seen.page.locator(".range-window")
        strip.focus()
        for _ in range(20):
            scrolls.append(seconds(lambda: asked(seen, lambda: strip.press("ArrowRight"))))
        return {
            "steps": steps,
            "metrics_bytes": (folder / "long" / "metrics.jsonl").stat().st_size,
            "read_s": round(read_s, 3),
            "read_cpu_s": round(read_cpu_s, 3),
            "first_open_s": round(first, 3),
            "all_steps_s": round(whole, 3),
            "second_open_s": round(again, 3),
            "scroll_s": {"median": round(statistics.median(scrolls), 3), "most": round(max(scrolls), 3)},
            "complaints": seen.complaints,
        }


def reading(run: Path) -> tuple[float, float]:
    """Seconds, and those of a processor, to read the run without a server: on a busy machine they differ."""
    began, cpu = time.perf_counter(), time.process_time()
    reader = RunReader.read(run)
    assert len(reader.steps["loss"])
    return time.perf_counter() - began, time.process_time() - cpu


def drawn(seen: Any, query: str) -> None:
    """Open the page and wait until the loss is drawn."""
    seen.page.goto(f"{seen.base}/{query}")
    seen.page.wait_for_selector('[data-chart="Loss"] .u-over')


def asked(seen: Any, act: Callable[[], None]) -> None:
    """Do something, and wait until the points for it have come."""
    with seen.page.expect_response(lambda answer: "/series?" in answer.url and "grad_norm" in answer.url):
        act()


def seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
