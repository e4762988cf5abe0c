"""Compiled kernels for CPUs, which compute the same numbers as the plain PyTorch paths, faster.

Every op has its schema and its fake whether or not the compiled library was found. `info()` returns what was loaded.
"""

from sparing.native.library import Info, info, instruction_set, ready, switched_off, why_not

__all__ = ["Info", "info", "instruction_set", "ready", "switched_off", "why_not"]
