"""The most memory that something took, as far as the device lets one know."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


PROCESS = Path("/proc/self")


def reset_peak(device: torch.device) -> None:
    """Begin anew, where that can be done: a process's own peak can be reset on Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        try:
            (PROCESS / "clear_refs").write_text("5")  # see proc(5)
        except OSError:  # another system, or not allowed: the peak since the start is what there is
            pass


def peak(device: torch.device) -> tuple[int, str] | None:
    """Bytes since `reset_peak`, and what they are bytes of; `None` where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated by torch on the GPU"
    status = PROCESS / "status"
    if status.exists():
        peak = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), None)
        if peak is not None:
            return int(peak.split()[1]) * 1024, "resident in the process, models and interpreter included"
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident in the process, since its start"
