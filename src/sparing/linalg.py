"""Small dense linear algebra that methods share."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_iteration(a: Tensor, z: Tensor, steps: int) -> Tensor:
    """Third-order iteration towards a's (pseudo-)inverse, from z: Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z
