"""Build the site in FOLDER/site: `python docs/site/build.py [FOLDER]` (build by default); `make docs` calls it.

1. Lay out the pages in FOLDER/pages: those of docs/ with their links as the site needs them, the files of the
   repository that they link to, and the reference, which is written from the code.
2. Let MkDocs make HTML of them, in strict mode (mkdocs.yml).
3. Check every link of the result, and that nothing in it needs another host.

The pages are laid out as files, by no plugin and no hook, so that another generator that reads mkdocs.yml can take
over: Zensical 0.0.73 makes the same site. Its 0.1 cannot be installed from every mirror of PyPI yet, which is why this
is Material for MkDocs, its predecessor, as long as that is maintained.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from pathlib import Path

from links import check
from reference import commands, prometheus, python_api, run_file

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BESIDE = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")]
"""Pages that are not in docs/."""
FENCE = re.compile(r"(^```.*?^```\n?)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
HEADS = {"index.md": "---\nhide:\n  - navigation\n---\n"}
"""What a page says to MkDocs alone."""
GENERATED = {
    "run-file.md": run_file.page,
    "commands.md": commands.page,
    "python-api.md": python_api.page,
    "prometheus.md": prometheus.page,
}


def lay_out(pages: Path) -> None:
    """Write what MkDocs reads into the new folder `pages`."""
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.md", "*.py", "__pycache__", "assets", "site"))
    shutil.copytree(DOCS / "site" / "assets", pages / "assets")
    waiting = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("clusters/*.md")), *BESIDE]
    seen = set(waiting)
    for source in waiting:  # it grows by what its pages link to
        text, linked = _page(source)
        target = pages / site_path(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        waiting += [file for file in linked if file not in seen]
        seen |= set(linked)
    for name, page in GENERATED.items():
        (pages / name).write_text(page())


def site_path(file: Path) -> Path:
    """Return where a file of the repository lies among the pages."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS)
    path = Path("repository") / file.relative_to(ROOT)
    return path if file.suffix == ".md" else path.with_name(path.name + ".md")


def _page(source: Path) -> tuple[str, list[Path]]:
    """Return a file of the repository as a page of the site, and the files outside of docs/ that it links to."""
    if source.suffix != ".md":
        return _listing(source), []
    linked: list[Path] = []

    def link(found: re.Match[str]) -> str:
        file = (source.parent / found[2]).resolve()
        if not found[2] or "://" in found[2] or not file.exists():
            return found[0]
        if file.is_dir():
            file = file / "README.md"
        if not file.is_relative_to(DOCS):
            linked.append(file)
        away = os.path.relpath(site_path(file), site_path(source).parent)
        return f"{found[1]}{away}{found[3] or ''})"

    parts = FENCE.split(source.read_text())
    parts[::2] = [LINK.sub(link, text) for text in parts[::2]]
    parts[1::2] = [re.sub(r"^```(\w+) file=(\S+)", r'```\1 title="\2"', block) for block in parts[1::2]]
    return HEADS.get(str(site_path(source)), "") + "".join(parts), linked


def _listing(source: Path) -> str:
    """Return the page of a file of code, which the site's search leaves out."""
    name = source.relative_to(ROOT)
    head = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n"
    return f'{head}# `{name}`\n\n````{LANGUAGES.get(source.suffix, "text")} linenums="1"\n{source.read_text()}````\n'


def build(pages: Path, site: Path) -> None:
    """Make HTML of the pages. Raises: SystemExit if MkDocs warns of anything."""
    from mkdocs.commands.build import build as make
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(site), strict=True)
    try:
        make(config)
    except Abort as problem:
        sys.exit(f"{problem}")


def main() -> None:
    """Build, check, and say where the site is."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve()
    pages, site = folder / "pages", folder / "site"
    shutil.rmtree(pages, ignore_errors=True)
    lay_out(pages)
    build(pages, site)
    problems, outside = check(site)
    print("links to other hosts, which are not looked at:", *outside, sep="\n  ")
    if problems:
        sys.exit("\n".join(problems))
    print(f"the site: {site}/index.html")


if __name__ == "__main__":
    main()
