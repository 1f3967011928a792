"""TensorBoard: event files in the run's folder, written with TensorBoard's own writer (neither torch nor TensorFlow).

Steps that are lost and run again: a session log with START at that step makes TensorBoard drop what it has of it and of
later steps (what `purge_step` of other writers does). A run that goes on adds a file to the same folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from argosy.sinks.sink import About, Record, Sink, evaluation_values, is_noteworthy, step_values


class TensorBoard(Sink):
    """Writes a run's event files."""

    def __init__(self, about: About):
        super().__init__(about)
        folder = Path(about.config["observe"]["tensorboard"]["folder"] or about.folder / "tensorboard")
        self._wait_for_a_new_name(folder)
        self._writer = EventFileWriter(str(folder))
        self._next: int = self.state.setdefault("next_step", 0)
        self.rewind(self._next)  # what was written, but not noted as written, comes again
        if self._next == 0:
            config = json.dumps(about.config, indent=1, sort_keys=True)
            self._text("run", f"    {config}".replace("\n", "\n    "), 0, time.time())
            self._text("plan", f"`{about.plan_text}`", 0, time.time())
        self._writer.flush()

    def steps(self, records: Sequence[Record]) -> None:
        for record in records:
            self._scalars(step_values(record), record)
            self._next = max(self._next, record["step"] + 1)
        self.state["next_step"] = self._next
        self._writer.flush()

    def evaluations(self, records: Sequence[Record]) -> None:
        for record in records:
            self._scalars(evaluation_values(record), record)
        self._writer.flush()

    def events(self, records: Sequence[Record]) -> None:
        for record in records:
            if is_noteworthy(record):
                self._text("events", f"`{json.dumps(record)}`", record.get("step", self._next), record["time_s"])
        self._writer.flush()

    def samples(self, records: Sequence[Record]) -> None:
        for record in records:
            text = f"**{record['prompt']}**{record['text']}"
            self._text("samples", text, record["step"], record.get("time_s", time.time()))
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Have TensorBoard drop the values of `step` and later."""
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        self.state["next_step"] = self._next = step

    def close(self, report: Record | None) -> None:
        if report is not None:
            self._text("report", f"    {json.dumps(report, indent=1)}".replace("\n", "\n    "), self._next, time.time())
        self._writer.close()

    def _scalars(self, values: dict[str, float], record: Record) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        wall_time = record.get("time_s", time.time())
        self._writer.add_event(Event(wall_time=wall_time, step=record["step"], summary=summary))

    def _text(self, tag: str, markdown: str, step: int, wall_time: float) -> None:
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=text_pb(tag, markdown)))

    @staticmethod
    def _wait_for_a_new_name(folder: Path) -> None:
        """Wait until the second is over in which the newest file was begun: files are read in the order of names, which
        begin with the second.
        """
        begun = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
        newest = max((int(second) for second in begun if second.isdigit()), default=0)
        time.sleep(max(0.0, min(newest + 1 - time.time(), 2.0)))
