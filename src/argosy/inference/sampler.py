"""Texts that the model writes on the way: samples.jsonl, a line for a verified checkpoint every so many steps.

A part of the run's follower, in a process of its own that holds the whole model on the CPU, in fp32, with one thread
and behind everything else. Training neither waits for it nor knows of it, so that its numbers cannot change.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from argosy.checkpoint.checksums import step_name
from argosy.config.load import load
from argosy.errors import UserError
from argosy.observe.events import JsonLines, forget_from
from argosy.plan.hardware.local_machine import read_memory
from argosy.plan.parameters import parameters
from argosy.sinks.sink import About, Record, Sink

MOST_TOKENS = 200
SAMPLES_FILE = "samples.jsonl"
FREE_MEMORY_SHARE = 0.5
"""Most of the free memory that samples may take: training must not run out of it."""


class Sampler(Sink):
    """Writes a text for the first checkpoint that is verified at or after every multiple of the steps."""

    def __init__(self, about: About):
        super().__init__(about)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the devices are the training's
        run = load(about.folder / "run.toml")
        self._every, self._prompt, self._seed = (
            run.observe.sample_every_steps,
            run.evaluate.sample_prompt or "",
            run.seed,
        )
        self._need_bytes = 4 * parameters(run.model)
        self._lines = JsonLines(about.folder / SAMPLES_FILE)
        self._next: int = self.state.setdefault("next", self._every)
        self._wanted: int | None = None
        self._writer: threading.Thread | None = None
        self._written: list[Record] = []
        self._problem: Exception | None = None
        self._rewinds = 0

    def events(self, records: Sequence[Record]) -> None:
        """Take note of checkpoints that were verified; only the newest counts."""
        for record in records:
            if record.get("event") == "verified" and record["step"] >= self._next:
                self._wanted = record["step"]

    def rewind(self, step: int) -> None:
        """Forget the texts of steps that were lost."""
        forget_from(self.about.folder / SAMPLES_FILE, step)
        self._wanted, self._rewinds = None, self._rewinds + 1
        self._next = self.state["next"] = (step // self._every + 1) * self._every

    @property
    def is_writing(self) -> bool:
        """True while a text is written, or was and has not been taken down yet."""
        return self._writer is not None

    def tick(self) -> None:
        """Write down what is written, and begin what is due. Raises: UserError if there is no memory for it."""
        if self._writer is not None and not self._writer.is_alive():
            self._take()
        if not self.is_writing and self._wanted is not None:
            self._check_memory()
            step, self._wanted = self._wanted, None
            self._next = self.state["next"] = (step // self._every + 1) * self._every
            self._writer = threading.Thread(target=self._write, args=(step, self._rewinds), daemon=True)
            self._writer.start()

    def close(self, report: Record | None) -> None:
        """Add the text that the run itself wrote at its end; one that is being written now is dropped."""
        if self._writer is not None and not self._writer.is_alive():
            self._take()
        if report is not None and report.get("sample"):
            text = report["sample"].removeprefix(self._prompt)
            self._add({"step": report["steps"] - 1, "prompt": self._prompt, "text": text})

    def _write(self, done: int, rewinds: int) -> None:
        folder = self.about.folder / "checkpoints" / step_name(done)
        try:
            import torch

            from argosy.inference.loaded_model import generate

            torch.set_num_threads(1)
            text = generate(folder, self._prompt, max_tokens=MOST_TOKENS, seed=self._seed)
            if rewinds == self._rewinds:
                self._written.append({"step": done - 1, "prompt": self._prompt, "text": text})
        except Exception as problem:
            if folder.exists():  # else it was pruned meanwhile, and the next one is soon there
                self._problem = problem

    def _take(self) -> None:
        self._writer = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        for record in self._written:
            self._add(record)
        self._written.clear()

    def _add(self, record: Record) -> None:
        forget_from(
            self.about.folder / SAMPLES_FILE, record["step"]
        )  # it may be there, if this process was ended at the wrong moment
        self._lines.write({"step": record["step"], "time_s": round(time.time(), 3), **record})

    def _check_memory(self) -> None:
        free_bytes = read_memory().available_bytes
        if self._need_bytes > FREE_MEMORY_SHARE * free_bytes:
            raise UserError(
                f"observe.sample_every_steps: to write samples needs {self._need_bytes / 1e9:.0f} GB of memory on this "
                f"machine, where {free_bytes / 1e9:.0f} GB are free, and no more than half of it is taken. Set it to 0."
            )
