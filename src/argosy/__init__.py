"""Argosy trains large language models on any number of machines; its centre is the Plan.

    import argosy
    argosy.train(argosy.load("run.toml", {"train.steps": 100}))

What is named here is imported when it is first used, so that `import argosy` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy import extend as extend
    from argosy.compare.parity import parity
    from argosy.config.data import PrepareConfig
    from argosy.config.load import load
    from argosy.config.schema import RunConfig
    from argosy.data.prepare import prepare
    from argosy.errors import ArgosyError, Interrupted, RunFailed, UserError
    from argosy.inference.evaluate import evaluate
    from argosy.inference.huggingface import export_checkpoint, import_checkpoint
    from argosy.inference.loaded_model import LoadedModel, generate, load_model
    from argosy.launch.local import train
    from argosy.observe.report import Report
    from argosy.plan.plan import Plan
    from argosy.plan.report.request import best_plans

__version__ = "0.1.0"
__all__ = [
    "ArgosyError",
    "Interrupted",
    "LoadedModel",
    "Plan",
    "PrepareConfig",
    "Report",
    "RunConfig",
    "RunFailed",
    "UserError",
    "__version__",
    "best_plans",
    "evaluate",
    "export_checkpoint",
    "generate",
    "import_checkpoint",
    "load",
    "load_model",
    "parity",
    "prepare",
    "train",
]

_HOME = {
    "ArgosyError": "argosy.errors",
    "Interrupted": "argosy.errors",
    "LoadedModel": "argosy.inference.loaded_model",
    "Plan": "argosy.plan.plan",
    "PrepareConfig": "argosy.config.data",
    "Report": "argosy.observe.report",
    "RunConfig": "argosy.config.schema",
    "RunFailed": "argosy.errors",
    "UserError": "argosy.errors",
    "best_plans": "argosy.plan.report.request",
    "evaluate": "argosy.inference.evaluate",
    "export_checkpoint": "argosy.inference.huggingface",
    "generate": "argosy.inference.loaded_model",
    "import_checkpoint": "argosy.inference.huggingface",
    "load": "argosy.config.load",
    "load_model": "argosy.inference.loaded_model",
    "parity": "argosy.compare.parity",
    "prepare": "argosy.data.prepare",
    "train": "argosy.launch.local",
}
"""Public name -> the module that defines it. No room (subpackage) may bear one of these names."""


EXTEND = "extend"
"""The one public name that is a room of its own: `argosy.extend.callback` and so on."""


def __getattr__(name: str) -> object:
    if name == EXTEND:
        return import_module("argosy.extend")
    if name not in _HOME:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, EXTEND})
