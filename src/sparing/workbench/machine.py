"""Describe the machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sparing import native
from sparing.version import __version__

TIMING = 2  #: version of how times are taken, part of their cells; those of 1 did not know what disturbed them


def machine() -> dict[str, Any]:
    """Return processor, instruction set, versions and threads; nothing that identifies the host or its user."""
    kernels = native.info()
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "instruction_set": kernels.instruction_set,
        "kernels": "loaded" if kernels.loaded else "not loaded",
        "threads": torch.get_num_threads(),
        "timing": TIMING,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "sparing": __version__,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
