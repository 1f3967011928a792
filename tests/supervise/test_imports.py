"""What holds a run, or must start at once, does without torch: it would take seconds and hundreds of MB each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import argosy

PACKAGE = Path(argosy.__file__).parent
LIGHT = (
    "argosy.faults",
    "argosy.checkpoint.writer",
    "argosy.data.worker",
    "argosy.launch.local",
    "argosy.resilience.replanner",
    "argosy.resilience.node_health",
    *(f"argosy.processes.{name}" for name in ("child", "fork_server")),
    *(f"argosy.chaos.{path.stem}" for path in (PACKAGE / "chaos").glob("*.py")),
    *(f"argosy.supervise.{path.stem}" for path in (PACKAGE / "supervise").glob("*.py") if path.stem != "worker"),
)
CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name.removesuffix(".__init__"))
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""


def test_agent_coordinator_writer_and_chaos_import_no_torch():
    done = subprocess.run([sys.executable, "-c", CODE, *LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_functions_of_chaos_import_no_torch_either():
    assert not [path.name for path in (PACKAGE / "chaos").glob("*.py") if "import torch" in path.read_text()]
