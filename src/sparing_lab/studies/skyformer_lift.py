"""The kernel matrix of queries and keys together, Skyformer's approximation of it, and the guarantee of Theorem 2."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import method as _method
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.maths.linalg import degree_scaled, inverse_iteration
from sparing.methods.skyformer.method import Skyformer, gaussian


class Lifted(NamedTuple):
    """The exact and the approximate matrix, (B, H, n_q + n_k, n_q + n_k) each."""

    exact: Tensor  # C-bar, the Gaussian kernel of all rows of [Q; K]
    found: Tensor  # C-bar-tilde, from the landmarks


class Promise(NamedTuple):
    """What Theorem 2 requires and guarantees, with the constants of its proof."""

    slack: float  #: lambda, the most that C-bar may exceed C-bar-tilde by
    dimension: float  #: d_stat, the sum of the leverages
    landmarks: int  #: number that suffices with probability 1 - delta, drawn independently


def call_of(
    q: Tensor,
    *,
    seed: int = 0,
    scale: float | None = None,
    keep: Tensor | None = None,
    influence: Tensor | None = None,
) -> Call:
    """Return what `attention` would pass to a method for queries [B, H, n, d], with that seed."""
    return Call(
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        mask=Mask(keep=keep, influence=influence),
        draws=Draws(seed, torch.arange(q.shape[1])),
    )


def skyformer(spec: str | Skyformer) -> Skyformer:
    """Return the method of a spec; raise if it is not Skyformer, which alone has a lift."""
    found = _method(spec)
    if not isinstance(found, Skyformer):
        raise TypeError(f"method={found} has no lift; skyformer does")
    return found


def lifted(spec: str | Skyformer, q: Tensor, k: Tensor, **options: Any) -> Lifted:
    """Return both matrices for queries and keys in float64; options: those of `call_of`."""
    chosen, call = skyformer(spec), call_of(q, **options)
    columns, middle, _ = chosen.lift(q, k, call)
    return Lifted(kernel_matrix(q, k, call.scale), columns @ chosen.solve(middle, columns.mT))


def kernel_matrix(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return C-bar (B, H, n_q + n_k, n_q + n_k)."""
    rows = math.sqrt(scale) * torch.cat([q, k], -2)
    return gaussian(rows, rows)


def eigenvalues(matrix: Tensor) -> Tensor:
    """Return the eigenvalues of a symmetric matrix, the least first; rounding may have made it asymmetric."""
    return torch.linalg.eigvalsh((matrix + matrix.mT) / 2)


def lowest(matrix: Tensor) -> float:
    """Return the least eigenvalue of all matrices of a batch."""
    return float(eigenvalues(matrix).min())


def promise(exact: Tensor, n: int, eps: float, delta: float, *, factor: float = 1.0) -> Promise:
    """Return Theorem 2 for C-bar (2n, 2n) with lambda = factor eps |C|; a factor of 2 is enough for |C - C-tilde|.

    landmarks >= 56/3 d_stat/beta log(4n/delta), where d_stat/beta = 2n times the largest leverage
    """
    slack = factor * eps * float(torch.linalg.matrix_norm(exact[:n, n:], 2))
    eye = torch.eye(2 * n, dtype=exact.dtype)
    leverage = torch.linalg.solve(exact + slack * eye, exact).diagonal()
    need = 56 / 3 * 2 * n * float(leverage.max()) * math.log(4 * n / delta)
    return Promise(slack, float(leverage.sum()), math.ceil(need))


def circle(n: int, *, radius: float = 0.6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return n queries and n keys [1, 1, n, 2] on a circle, for a scale of 1.

    Their leverages are nearly equal, so that Theorem 2 asks for fewer landmarks than there are rows.
    """
    angle = 2 * math.pi * torch.rand(1, 1, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, k = (radius * torch.stack([angle.cos(), angle.sin()], -1)).split(n, dim=-2)
    return q, k


#: Where the iteration for the inverse of a matrix A with eigenvalues in (0, 1] can begin: the identity, as Lemma 3
#: allows, or the transpose over its largest column sum, as in the authors' code.
STARTS = ("identity", "transpose")


def iterated(w: Tensor, steps: int, *, start: str = "identity", factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the inverse of W (..., m, m) after that many steps, and the residual I - A Z of the scaled A.

    factor: multiplies the start. Above 1 from the identity, or above the largest column sum from the transpose,
        the iterates can exceed the inverse.
    """
    a, root = degree_scaled(w)
    eye = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
    if start not in STARTS:
        raise ValueError(f"start={start!r} is not one of {', '.join(STARTS)}")
    z = factor * (eye if start == "identity" else a.mT / a.abs().sum(-2).amax(-1)[..., None, None])
    z = inverse_iteration(a, z, steps)
    return z * root.unsqueeze(-1) * root.unsqueeze(-2), eye - a @ z
