"""torchft: one replica group for each process, its state taken from a live group after a death; no checkpoints.

Each group is a torchrun of its own, which starts its process again:
torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 torchrun --nproc-per-node 1 --max-restarts 1000 \\
    --rdzv-endpoint localhost:0 --rdzv-backend c10d benchmarks/faults/torchft_ddp.py RUN.toml FOLDER TIMEOUT_S
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
from task import Task, tell
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    run_file, folder, timeout_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    task = Task(run_file, group, groups)
    model = task.model()
    inner = task.optimizer(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def take(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=timeout_s)),
        min_replica_size=1,
        load_state_dict=take,
        state_dict=state,
        replica_id=f"group_{group}",
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while (step := manager.current_step()) < task.steps:
        optimizer.zero_grad()  # asks for a quorum
        loss = task.loss(parallel, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.run.optimizer.grad_clip)
        optimizer.step()  # applies it only if nobody failed
        if manager.current_step() > step and manager.participating_rank() == 0:
            tell(folder, step, loss.item())
    torch.save(model.state_dict(), folder / f"weights-{group}.pt")
    manager.shutdown()


if __name__ == "__main__":
    main()
