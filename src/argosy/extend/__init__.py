"""Code of your own in a run: callbacks, metrics, losses, optimizers, sources of text, sinks,
model families (docs/extending.md).

    from argosy import extend

    @extend.callback("after_step")
    def perplexity(run: extend.Run) -> None:
        run.log(perplexity=math.exp(run.loss))

A run file names the file that this stands in: `[extend] files = ["mine.py"]`. Outside of a run, what is decorated is
the plain function that it was: it can be imported and tested as any other.
"""

from argosy.extend.register import (
    POINTS,
    Loss,
    Point,
    Run,
    Update,
    callback,
    family,
    loss,
    metric,
    optimizer,
    sink,
    source,
)

__all__ = [
    "POINTS",
    "Loss",
    "Point",
    "Run",
    "Update",
    "callback",
    "family",
    "loss",
    "metric",
    "optimizer",
    "sink",
    "source",
]
