"""First derivatives of the kernels; they have no second ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparing.native.derivatives import refuse
from sparing.native.library import schemas


def differentiable(op: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Give sparing::op its gradient, and let sparing::op_backward, which computes it, refuse to be differentiated.

    Without a rule for the latter, torch would only warn and go on with zeros.
    """

    torch.library.register_autograd(f"sparing::{op}", backward, setup_context=setup, lib=schemas)
    torch.library.register_autograd(f"sparing::{op}_backward", refuse, lib=schemas)
