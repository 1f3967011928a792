"""The plain way: DDP, torch.distributed.checkpoint in the background, torchrun to start everything again.

torchrun --standalone --nproc-per-node 2 --max-restarts 1000 benchmarks/faults/torchrun_dcp.py RUN.toml FOLDER TIMEOUT_S
"""

from __future__ import annotations

import datetime
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import Task, tell
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    run_file, folder, timeout_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    saving = dist.new_group(backend="gloo")
    task = Task(run_file, dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model.parameters())
    under_way: Future[object] | None = None
    for step in range(restore(model, optimizer, folder), task.steps):
        loss = task.loss(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.run.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0:
            tell(folder, step, loss.item() / dist.get_world_size())
        if (step + 1) % task.save_every == 0 or step + 1 == task.steps:
            if under_way is not None:
                under_way.result()
                commit(folder)
            under_way = save(model, optimizer, folder, step + 1, saving)
    if under_way is not None:
        under_way.result()
        commit(folder)
    dist.destroy_process_group()


def save(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int, group: dist.ProcessGroup | None
) -> Future[Any]:
    """Begin to save; what it is saved as counts once `commit` has renamed it."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(step)}
    (folder / "saves").mkdir(exist_ok=True)
    saved = dcp.async_save(state, checkpoint_id=folder / "saves" / f"{step:08d}.partial", process_group=group)
    assert isinstance(saved, Future)
    return saved


def commit(folder: Path) -> None:
    """Give the finished save its name, and keep two."""
    dist.barrier()
    if dist.get_rank() == 0:
        for partial in sorted((folder / "saves").glob("*.partial")):
            partial.rename(partial.with_suffix(""))
        for old in whole(folder)[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def whole(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "saves").glob("*") if path.suffix != ".partial")


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Take the newest save, if there is one; the step to go on with."""
    dist.barrier()
    saves = whole(folder)
    if dist.get_rank() == 0:
        for partial in (folder / "saves").glob("*.partial"):
            shutil.rmtree(partial)
    dist.barrier()
    if not saves:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=saves[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
