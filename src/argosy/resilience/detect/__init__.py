"""Detectors: each a class that takes readings and gives findings, and touches nothing itself.

| module | takes | kinds of findings |
|---|---|---|
| `hang` | a `Sample` of all ranks | stopped, frozen, hang, stuck_loader, mismatch |
| `straggler` | a `Sample` of all ranks | straggler |
| `suspect` | a `Sample` of all ranks | suspect |
| `memory` | `MemoryReading` of a node | oom_kill, memory_low |
| `disk` | `DiskReading` of a folder | disk_failed, disk_slow, disk_full |
| `clock` | monotonic and wall time of a node | clock_jump |
| `limits` | `LimitsReading` of a node and its workers | limit_near |

Those of all ranks run where all are known, in the coordinator (`supervise.watch`); `node.NodeWatch` runs the others,
in each agent.
What a run's own numbers show (bad steps, diverged replicas) is judged by the workers: `training.bad_steps`.
"""
