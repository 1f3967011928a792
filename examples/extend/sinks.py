"""A sink: a CSV file of the losses, written by a process beside the run. `[observe] sinks = ["csv"]`"""

from collections.abc import Sequence

from argosy import extend
from argosy.sinks.sink import Record, Sink


@extend.sink("csv")
class Csv(Sink):
    def steps(self, records: Sequence[Record]) -> None:
        with (self.about.folder / "losses.csv").open("a") as file:
            file.writelines(f"{record['step']},{record['loss']}\n" for record in records)
