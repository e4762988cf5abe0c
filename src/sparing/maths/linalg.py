"""Small dense linear algebra that methods share."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def inverse_iteration(a: Tensor, z: Tensor, steps: int) -> Tensor:
    """Approach the (pseudo-)inverse of a from z at third order: Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def degree_scaled(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return A = r W r and r = diag(W 1)^(-1/2): for W positive semidefinite, entries >= 0, spec(A) <= 1."""
    root = w.sum(-1).rsqrt()
    return w * root.unsqueeze(-1) * root.unsqueeze(-2), root


def iterated_inverse(w: Tensor, steps: int) -> Tensor:
    """Return W^-1 by `inverse_iteration` on the degree-scaled W from Z = I; steps stay below it (Loewner order)."""
    a, root = degree_scaled(w)
    z = inverse_iteration(a, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a), steps)
    return z * root.unsqueeze(-1) * root.unsqueeze(-2)


def damped_cholesky(m: Tensor, damping: float) -> Tensor:
    """Return the lower factor of M + damping I, for M positive semidefinite up to rounding with a unit diagonal.

    A matrix that rounding made indefinite (rows with norms beyond about 1e6) is damped a hundred times more, and so
    on; each matrix of a batch on its own.
    """
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    amount = torch.full(m.shape[:-2], damping, dtype=m.dtype, device=m.device)
    factor, info = torch.linalg.cholesky_ex(m + damping * eye)
    while bool((info > 0).any()):
        amount = torch.where(info > 0, 100 * amount, amount)
        warnings.warn(f"a kernel matrix is indefinite to rounding; damped by {float(amount.max()):.0e}", stacklevel=2)
        factor, info = torch.linalg.cholesky_ex(m + amount[..., None, None] * eye)
    return factor


def unit_rows(x: Tensor, smallest: float) -> Tensor:
    """Divide rows by their length; a row without an entry of at least `smallest` gives zeros and no gradient.

    In float64, rounded once: another order of the sum then gives the same bits, hence the same codes.
    """
    wide = x.double()
    top = wide.detach().abs().amax(-1, keepdim=True)
    empty = top < smallest
    wide = wide / top.masked_fill(empty, 1.0)  # otherwise squares of huge or tiny entries would be out of range
    return (wide / wide.norm(dim=-1, keepdim=True).masked_fill(empty, 1.0)).masked_fill(empty, 0.0).to(x.dtype)
