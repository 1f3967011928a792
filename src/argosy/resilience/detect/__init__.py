"""Detectors: each is a class that takes readings and returns findings, and has no other effect.

| module | takes | kinds of findings |
|---|---|---|
| `hang` | a `Sample` of all ranks | stopped, frozen, hang, stuck_loader, mismatch |
| `hang` | processes of a node that are in no world yet | stopped, frozen, hang |
| `slow` | a `Sample` of all ranks | straggler, slow_link, uneven_stages |
| `finding` | a `Sample` of all ranks | suspect |
| `node` | `MemoryReading` of a node | oom_kill, memory_low |
| `node` | `DiskReading` of a folder | disk_failed, disk_slow, disk_full |
| `node` | monotonic and wall time of a node; `LimitsReading` of it and its workers | clock_jump, limit_near |

Those that take a `Sample` (`finding`) run in the coordinator (`supervise.watch`), which knows all ranks;
`node.NodeWatch` runs the others in each agent. Bad steps and diverged replicas are detected by the workers:
`training.bad_steps`.
"""
