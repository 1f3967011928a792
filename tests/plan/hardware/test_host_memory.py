"""Memory of the machine, of control groups of both versions, and what is left of it."""

from __future__ import annotations

from pathlib import Path

from argosy.plan.hardware.host_memory import MemoryReading, host_memory_bytes, read_memory


def files(root: Path, **content: str) -> Path:
    for name, text in content.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def proc(tmp_path: Path, cgroup: str) -> Path:
    meminfo = "MemTotal:       65536000 kB\nMemFree: 1 kB\nMemAvailable:   32768000 kB\n"
    return files(tmp_path / "proc", meminfo=meminfo, vmstat="pgfault 7\noom_kill 2\n", self__cgroup=cgroup)


def test_the_machine_is_read(tmp_path):
    reading = read_memory(proc(tmp_path, ""), tmp_path / "none")
    assert reading == MemoryReading(32768000 * 1024, 65536000 * 1024, 0, 2)


def test_a_group_of_version_2_with_a_limit_is_narrower(tmp_path):
    group = tmp_path / "cgroup" / "job" / "inner"
    files(group, memory_DOT_max="max\n", memory_DOT_current="1\n", memory_DOT_events="low 0\noom 3\noom_kill 1\n")
    files(
        group.parent, memory_DOT_max="1000000\n", memory_DOT_current="900000\n",
        memory_DOT_stat="anon 5\ninactive_file 50000\n", memory_DOT_events="oom_kill 99\n",
    )  # fmt: skip
    reading = read_memory(proc(tmp_path, "0::/job/inner\n"), tmp_path / "cgroup")
    assert reading == MemoryReading(150000, 1000000, 1, 2)
    assert host_memory_bytes(proc(tmp_path, "0::/job/inner\n"), tmp_path / "cgroup") == 1000000


def test_a_group_of_version_1_is_read_too(tmp_path):
    group = tmp_path / "cgroup" / "memory" / "job"
    files(
        group, memory_DOT_limit_in_bytes="1000000\n", memory_DOT_usage_in_bytes="600000\n",
        memory_DOT_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    )  # fmt: skip
    reading = read_memory(proc(tmp_path, "4:memory:/job\n1:cpu:/\n"), tmp_path / "cgroup")
    assert reading == MemoryReading(400000, 1000000, 4, 2)
    assert host_memory_bytes(tmp_path / "proc", tmp_path / "cgroup") == 1000000


def test_this_machine_can_be_read():
    reading = read_memory()
    assert 0 < reading.available_bytes <= reading.limit_bytes
