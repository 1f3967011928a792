"""trackio: on this machine, or in a Space of Hugging Face.

trackio takes rows as they come. If steps are lost and run again, or its process was ended at the wrong moment, the
trackio run is deleted and written anew from the first line; in a Space, where that cannot be done from here, another
run is begun beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from argosy.sinks.sink import About, Record, Sink, flat_config, is_noteworthy


class Trackio(Sink):
    """Logs a run to trackio. State: `name`, `is_open` while a process has it."""

    can_rewind: ClassVar[bool] = False

    def __init__(self, about: About):
        super().__init__(about)
        self._settings = about.config["observe"]["trackio"]
        if self._settings["folder"]:
            os.environ["TRACKIO_DIR"] = self._settings["folder"]  # it is read when trackio is imported
        if "name" not in self.state:
            self.state["name"] = self._free_name()
        self.must_start_over = self.state.get("is_open", False)
        self._run = None if self.must_start_over else self._begin()
        self.state["is_open"] = True

    def numbers(self, lines: Sequence[tuple[Record, dict[str, float]]]) -> None:
        for record, values in lines:
            self._log(values, record["step"])

    def events(self, records: Sequence[Record]) -> None:
        assert self._run is not None
        for record in filter(is_noteworthy, records):
            self._run.alert(title=record["event"], text=json.dumps(record), step=record.get("step"))

    def samples(self, records: Sequence[Record]) -> None:
        import trackio

        for record in records:
            self._log({"sample": trackio.Markdown(f"**{record['prompt']}**{record['text']}")}, record["step"])

    def start_over(self) -> None:
        import trackio

        if self._run is not None:
            self._run.finish()
        if self._settings["space"]:
            self.state["name"] = self._free_name()
        else:
            for run in self._known():
                if run.name == self.state["name"]:
                    run.delete()
        trackio.context_vars.current_run.set(None)
        self._run, self.must_start_over = self._begin(), False

    def close(self, report: Record | None) -> None:
        if self._run is not None:
            self._run.finish()
        self.state["is_open"] = False

    def _log(self, values: dict[str, Any], step: int) -> None:
        assert self._run is not None
        self._run.log(values, step=step)

    def _begin(self) -> Any:
        import trackio

        return trackio.init(
            project=self._settings["project"],
            name=self.state["name"],
            space_id=self._settings["space"],
            config=flat_config(self.about.config) | {"argosy.plan": self.about.plan_text},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _free_name(self) -> str:
        """Return a name that no run of the project has yet: the run's, or that with a number."""
        taken = {run.name for run in self._known()} | {self.state.get("name")}
        names = (self.about.name, *(f"{self.about.name}-{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _known(self) -> list[Any]:
        import trackio

        try:
            return list(trackio.Api().runs(self._settings["project"]))
        except ValueError:  # there is no such project yet
            return []
