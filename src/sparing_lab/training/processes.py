"""The processes of a run: accelerate starts them, and they leave their group before they end."""

from __future__ import annotations

import atexit
import gc
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

_wrapped: WeakSet[nn.Module] = WeakSet()  # models that hold the process group


def need_accelerate() -> None:
    """Raise if accelerate is missing, before anything is computed."""
    try:
        import accelerate  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "accelerate is missing; run: pip install 'sparing[train]'", name="accelerate"
        ) from None


def accelerator(mixed_precision: str) -> Any:
    """Return an Accelerator for this process, also after runs with another precision."""
    need_accelerate()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()  # an earlier run in this process set it
    # cpu is explicit: without a GPU, processes that a launcher started would otherwise not find each other.
    found = Accelerator(mixed_precision=mixed_precision, cpu=not torch.accelerator.is_available())
    if found.num_processes > 1:
        atexit.unregister(_leave_group)
        atexit.register(_leave_group)
    return found


def prepare(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return model and optimizer, wrapped for the processes of the run."""
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.num_processes > 1:
        _wrapped.add(model)
    return model, optimizer


def _leave_group() -> None:
    """Destroy the process group, and with it gloo's threads.

    A thread of gloo that drops a tensor needs Python's global lock. Python ends a thread that asks for the lock during
    finalization, and inside C++ that aborts the process. Only the destructor of the group joins these threads, and
    `destroy_process_group` runs it only if nothing else holds the group; models wrapped for several processes do.
    """
    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        return
    holders = (distributed.ProcessGroup, distributed.Reducer, distributed.Logger)
    for model in list(_wrapped):
        for name in [name for name, value in vars(model).items() if isinstance(value, holders)]:
            delattr(model, name)
    gc.collect()
    distributed.destroy_process_group()
