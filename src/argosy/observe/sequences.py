"""How far each of this process's groups has got: these numbers tell a hang from a slow step."""

from __future__ import annotations

from torch.distributed import distributed_c10d

NAME_END = 12
"""Characters kept of a group's name, which may be a long hash."""


def sequence_numbers() -> dict[str, int]:
    """Return process group -> number of collectives that this process has begun in it; groups of one are left out.

    A group's name is its purpose and the end of torch's name for it, the same on all its ranks. Any thread may call
    this, also while another waits in a collective.

    Torch has no public list of groups (`pg_map`), and its flight recorder, which has such numbers in public, only knows
    NCCL's; `_get_sequence_number_for_group` is what torch itself names in the message of a collective that timed out.
    """
    world = distributed_c10d._world
    return {
        f"{group.group_desc}#{name[-NAME_END:]}": group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for group, name in list(world.pg_names.items())
        if group.size() > 1
    }
