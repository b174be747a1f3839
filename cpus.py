"""How many processors this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cpus() -> int:
    """Return the CPUs this process may use: its affinity, capped by the cgroup quota (v2, v1)."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, round(_cgroup_quota() or allowed)))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU quota in CPUs, or None where there is none."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = (
                (root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max": unlimited
        return None
