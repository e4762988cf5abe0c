"""Compiled kernels for CPUs: the same numbers as the plain PyTorch paths, sooner. Only this package touches torch.ops.

Every op has its schema and its shape function here, whether or not the compiled library was found. `info()` tells
what was loaded.
"""

from sparing.native.library import Info, info, instruction_set, ready, switched_off, why_not

__all__ = ["Info", "info", "instruction_set", "ready", "switched_off", "why_not"]
