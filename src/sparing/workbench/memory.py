"""Peak memory of a call, as the operating system counts it, and the size of what an object holds.

torch counts its own allocations only, and a kernel's scratch is not among them. Linux keeps the largest resident size
of a process (`VmHWM`) and resets it when a 5 is written to `/proc/self/clear_refs`, so that everything counts:
tensors, scratch, thread stacks. The size before the call is subtracted.

Memory that the C library keeps for later would hide what a call takes from it, so it is handed back first
(`malloc_trim`). What remains uncertain is about a megabyte: pages come in groups and the kernel counts in batches.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """Return the peak memory of the process during the call minus that before it, or None if it cannot be read.

    The result of the call counts, its inputs do not. Run the call once before, so that
    one-time allocations are not measured. Other threads of the process are measured too.
    """
    if not can_measure():
        return None
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    _RESET.write_bytes(b"5")
    call()
    return max(_status("VmHWM") - before, 0)


def can_measure() -> bool:
    """Return whether this system keeps a peak that can be reset: Linux with glibc."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return False
    try:
        _RESET.write_bytes(b"5")
        return _status("VmHWM") > 0
    except (OSError, LookupError):
        return False


def available_bytes() -> int | None:
    """Return the memory available on this machine without swapping, or None if it cannot be read."""
    try:
        return _entry(Path("/proc/meminfo"), "MemAvailable")
    except (OSError, LookupError):
        return None


def _status(name: str) -> int:
    return _entry(_STATUS, name)


def _entry(path: Path, name: str) -> int:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{path} has no entry {name}")


def tensor_bytes(held: object) -> int:
    """Return the bytes of all tensors that an object of sparing's holds in its attributes, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    left = [held]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        elif type(each).__module__.partition(".")[0] == "sparing":
            left += getattr(each, "__dict__", {}).values()
    return sum(storages.values())
