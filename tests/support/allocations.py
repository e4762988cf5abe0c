"""How large the largest tensor is that a computation makes, and how many elements all of them hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Watch(TorchDispatchMode):
    """Remembers the largest storage among all results, and adds up those that are new: neither views nor in place."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.largest = 0
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if _is_tensor(t)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if _is_tensor(tensor) and self.dtype in (None, tensor.dtype):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, elements)
                self.total += elements if tensor.untyped_storage().data_ptr() not in given else 0
        return out


def largest_tensor(fn: Callable[[], object], dtype: torch.dtype | None = None) -> int:
    """Elements of the largest tensor, of this type if one is given, that exists while fn runs."""
    with _Watch(dtype) as watch:
        fn()
    return watch.largest


def all_elements(fn: Callable[[], object]) -> int:
    """Elements of all tensors together that fn makes: a measure of its work, except inside of single operations."""
    with _Watch() as watch:
        fn()
    return watch.total


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)
