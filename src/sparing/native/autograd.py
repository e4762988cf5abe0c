"""Register the first derivatives of the kernels, which have no second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparing.native.derivatives import refuse
from sparing.native.library import schemas


def differentiable(op: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Register the gradient of sparing::op, and make differentiating sparing::op_backward raise an error.

    Without a rule for the latter, torch would only warn and use zeros.
    """

    torch.library.register_autograd(f"sparing::{op}", backward, setup_context=setup, lib=schemas)
    torch.library.register_autograd(f"sparing::{op}_backward", refuse, lib=schemas)
