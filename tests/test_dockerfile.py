"""The Dockerfile, as far as that can be told without a container engine: its stages and what it copies are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]


def test_each_word_of_torch_is_a_stage_and_the_default_is_one() -> None:
    stages = {match[1] for line in LINES if (match := re.fullmatch(r"FROM \S+ AS (\w+)", line))}
    (default,) = [line.partition("=")[2] for line in LINES if line.startswith("ARG TORCH=")]
    assert stages == {"cpu", "cuda"} and default in stages
    first = next(i for i, line in enumerate(LINES) if line.startswith("FROM"))
    assert f"ARG TORCH={default}" in LINES[:first]  # an ARG behind the first FROM is unknown to those that follow
    page = (ROOT / "docs/clusters/kubernetes.md").read_text()
    assert set(re.findall(r"TORCH=(\w+)", page)) <= stages


def test_what_is_copied_is_there_and_sent_to_the_builder() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert copied == sent and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= copied


def test_the_extras_of_the_image_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"/argosy\[([^]]+)\]", TEXT)
    assert set(named.split(",")) <= set(extras)
