"""Find and load the compiled library, and choose its instruction set."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparing.version import __version__


class _Schemas(torch.library.Library):
    """Declares ops, whether or not a compiled library implements them."""

    def __init__(self) -> None:
        super().__init__("sparing", "DEF")
        self.declared: list[str] = []

    def define(self, schema: str, *args: Any, **options: Any) -> str:
        name: str = super().define(schema, *args, **options)
        self.declared.append(f"sparing::{name.removeprefix('sparing::')}")
        return name


schemas = _Schemas()  #: every module of this package defines its ops on it


class Info(NamedTuple):
    """What `info()` returns."""

    loaded: bool
    path: str | None  #: the compiled library
    instruction_set: str | None  #: "avx512", "avx2" or "portable"
    available: tuple[str, ...]  #: instruction sets that this machine can run
    reason: str | None  #: why nothing was loaded


_NAMES = ("avx512", "avx2", "portable")
_off = False


def _load() -> tuple[ctypes.CDLL | None, str | None, str | None]:
    """Return (library, its path, why there is none)."""
    wanted = os.environ.get("SPARING_NATIVE_LIBRARY")
    if wanted == "":
        return None, None, "SPARING_NATIVE_LIBRARY is set to nothing"
    found = [Path(wanted)] if wanted else sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not found:
        return None, None, "they were not built: install a C++20 compiler, then pip install --no-build-isolation ."
    try:
        torch.ops.load_library(found[0])
        library = ctypes.CDLL(str(found[0]))
    except (OSError, RuntimeError) as error:
        why = str(error.__cause__ or error).splitlines()[0]  # torch repeats the name, with the reason as the cause
        return None, None, f"{found[0]} cannot be loaded: {why}"
    try:
        library.sparing_version.restype = library.sparing_isa.restype = ctypes.c_char_p
        library.sparing_use_isa.argtypes = [ctypes.c_char_p]
    except AttributeError as error:
        return None, None, f"{found[0]} is not a build of this version's kernels: {error}"
    built = library.sparing_version().decode()
    if built != __version__:  # the ops of another version may take other arguments
        return None, None, f"{found[0]} was built for sparing {built}, and this is {__version__}: build it again"
    return library, str(found[0]), None


_library, _path, _reason = _load()
_checked = _library is None
_told = os.environ.get("SPARING_NATIVE_LIBRARY") == ""


def _check_once() -> None:
    """Drop a library that lacks ops; at its first use, when all modules have declared theirs."""
    global _checked, _library, _path, _reason
    if not _checked:
        _checked = True
        if missing := [op for op in schemas.declared if not _has_kernel(op)]:
            _library, _path, _reason = None, None, f"{_path} has no op {', '.join(missing)}: build it again"


def _tell_once() -> None:
    global _told
    if not _told:
        _told = True
        if _library is None:
            warnings.warn(f"sparing runs without its kernels, on plain PyTorch: {_reason}", stacklevel=3)


def _has_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0  # inside dual_level(), which torch.func.jvp enters too


def why_not(tensor: Tensor) -> str:
    """Return why `ready` is False."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return f"they take float32 and float64 on the CPU, not {tensor.dtype} on {tensor.device}"
    if _forward_mode():
        return "they have no forward-mode derivative"
    return _reason or "sparing.native.switched_off() is in force"


def ready(tensor: Tensor, *, half: bool = False) -> bool:
    """Return whether kernels are loaded that can work on this tensor: CPU, float32 or float64.

    half: whether the kernel takes bfloat16 and float16 as well. Not in forward-mode differentiation, in which an op
    without a rule of its own loses the tangent silently.
    """
    known = tensor.dtype in (torch.float32, torch.float64) or (half and tensor.dtype in (torch.bfloat16, torch.float16))
    if tensor.device.type != "cpu" or not known or _forward_mode():
        return False
    _check_once()
    _tell_once()
    return _library is not None and not _off


def info() -> Info:
    """Return what was loaded: the library, the instruction set in use and those that this machine has."""
    _check_once()
    if _library is None:
        return Info(False, None, None, (), _reason)
    now = _library.sparing_isa()
    available = tuple(name for name in _NAMES if _library.sparing_use_isa(name.encode()))
    _library.sparing_use_isa(now)
    return Info(True, _path, now.decode(), available, None)


def instruction_set_in_use() -> str | None:
    """Return the instruction set that kernels run with, None without kernels. Unlike `info`, it costs nothing."""
    return None if _library is None else str(_library.sparing_isa().decode())


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the kernels with another instruction set; for all threads."""
    if _library is None:
        raise RuntimeError(f"no kernels are loaded: {_reason}")
    before = _library.sparing_isa()
    if not _library.sparing_use_isa(name.encode()):
        raise ValueError(
            f"name={name!r} is not one of {', '.join(map(repr, info().available))}, which this machine has"
        )
    try:
        yield
    finally:
        _library.sparing_use_isa(before)


@contextmanager
def switched_off() -> Iterator[None]:
    """Run without kernels, as on a machine that has none; for all threads."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before
