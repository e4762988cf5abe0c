"""Skyformer: Gaussian kernel attention through a Nystrom approximation that is legal for a non-symmetric matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, Unsupported, knob, method
from sparing.maths import dense, linalg
from sparing.maths.long_sums import rows_times, sum_products
from sparing.maths.packing import attend_items
from sparing.methods.skyformer.landmarks import Landmarks, draw_landmarks
from sparing.native.features import Map, feature_mix, feature_sums

_FLOOR = 1e-12  # smallest softmax row sum to divide by, relative to the heaviest key
# M can be singular (equal or close rows). Damping keeps the approximation a lower bound and costs at most that much
# accuracy, so the least that float64 rounding needs is added. The iteration forms the inverse and needs more.
_DAMPING, _DAMPING_STEPS = 1e-10, 1e-6
_FLOAT32_GAMMA = 1e-2  # from here on the solve amplifies rounding by so little that float32 columns are enough


class Lift(NamedTuple):
    """The factors of C-bar-tilde = B (M + gamma I)^-1 B^T."""

    columns: Tensor  # B (B, H, n_q + n_k, m): all rows against the landmarks; zero for unused slots and padded keys
    middle: Tensor  # M (B, H, m, m): landmarks against landmarks; identity for unused slots; float64
    landmarks: Landmarks


@dataclass(frozen=True, kw_only=True)
class Skyformer(Method):
    """Gaussian kernel attention from landmark rows of queries and keys (Chen et al., "Skyformer", 2021).

    C_ij = exp(-s |q_i - k_j|^2 / 2),  out = C~ V,  C~ = B_Q (M + gamma I)^-1 B_K^T

    B holds the kernel between all rows of [Q; K] and the landmark rows, M the kernel among the landmarks. C~ is the
    query-key block of the Nystrom approximation of the kernel matrix of [Q; K], which is positive semidefinite. In the
    Loewner order the approximation never exceeds that matrix, for any landmarks, gamma, solver or number of steps. The
    weights are not normalised: they do not sum to one, and the output grows with the number of keys, so models must be
    trained with it. A sequence with at most `landmarks` valid queries and keys in all gets the exact target. The
    linear algebra runs in float64 (the columns B in the input's precision if gamma >= 0.01).
    `inspect()` notes the landmark rows (keys are numbered from n_q on, -1 is unused) and, for the Gaussian kernel,
    `bound` (B, H), an upper bound of the spectral norm of C~ - C.

    landmarks: number of rows drawn from queries and keys together.
    gamma: damping of M. The paper's 0.1 costs a few percent of accuracy, bounds the solver's weights and hence the
        gradient, and makes float32 sufficient. 0 is the most accurate; M can then be singular, so at least 1e-10 is
        added (1e-6 for newton_schulz).
    solver: "cholesky" (exact) or "newton_schulz" (the paper's iteration, from the identity).
    iterations: number of steps of newton_schulz; 8 are enough for 128 landmarks at gamma = 0.1.
    kernel: "gaussian" or "softmax", which targets softmax attention: columns are rescaled by exp(s |k|^2 / 2) and rows
        normalised (the paper's Figure 1). It is poor on peaked attention; a row whose sum is below what its landmark
        keys alone contribute gets exact attention over these keys.
    sampling: "without_replacement" (half queries, half keys), "half" (the same, with replacement), "iid" (with
        replacement from all rows, as in the paper's theorem) or "all" (every row, at cubic cost, for comparison).

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="skyformer(landmarks=32)", seed=0).shape
    torch.Size([1, 2, 128, 16])
    """

    name = "skyformer"
    target = "gaussian kernel"
    budget = "landmarks"
    supports = Supports(mixes_queries=True, stochastic=True)

    landmarks: int = knob(128, minimum=1)
    gamma: float = knob(0.1, minimum=0)
    solver: str = knob("cholesky", choices=("cholesky", "newton_schulz"))
    iterations: int = knob(8, minimum=1)
    kernel: str = knob("gaussian", choices=("gaussian", "softmax"))
    sampling: str = knob("without_replacement", choices=("without_replacement", "half", "iid", "all"))

    def claims(self) -> Supports:
        softmax = self.kernel == "softmax"
        return replace(type(self).supports, stochastic=self.sampling != "all", training_free=softmax)

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if call.scale < 0:
            raise Unsupported(
                f"skyformer does not support scale={call.scale}: its kernel needs scale >= 0; negate query"
            )

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k, values = q.double(), k.double(), v.double()
        lift = self.lift(q, k, call)
        left, right = lift.columns.split([q.shape[-2], k.shape[-2]], dim=-2)  # B_Q (B, H, n_q, m), B_K (B, H, n_k, m)
        weights = left @ self.solve(lift.middle, right.mT)  # C~ (B, H, n_q, n_k), eq. 6
        if self.kernel == "softmax":
            known = left @ landmark_keys(values, k, call, lift.landmarks, q.shape[-2])
            out = normalised(weights @ rescaled(values, k, call), known)
        else:
            out = weights @ values
        covered = self.covered(lift.landmarks)[:, None, None, None]
        return torch.where(covered, self.exact(q, k, values, call), out).to(v.dtype)

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        dtype, n_q, n_k = v.dtype, q.shape[-2], k.shape[-2]
        work = torch.float64 if self.kernel == "softmax" or self.gamma < _FLOAT32_GAMMA else dtype
        q, k, v = q.to(work), k.to(work), v.to(work)
        if self.sampling != "all" and n_q + n_k <= self.landmarks and not call.noted:
            return self.exact(q, k, v, call).to(dtype)
        lift = self.lift(q, k, call)
        left, right = lift.columns.split([n_q, n_k], dim=-2)
        # B_K^T V first, then the solve, then B_Q: C~ itself is never formed.
        if self.kernel == "softmax":
            sums = left @ self.solve(lift.middle, right.mT @ rescaled(v, k, call))
            out = normalised(sums, left @ landmark_keys(v, k, call, lift.landmarks, n_q))
        else:
            out = rows_times(left, self.solve(lift.middle, sum_products(right, v).double()).to(work))
        return self.with_covered_items(out, q, k, v, call, lift.landmarks).to(dtype)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        dtype, n_q, n_k = v.dtype, q.shape[-2], k.shape[-2]
        work = torch.float64 if self.kernel == "softmax" or self.gamma < _FLOAT32_GAMMA else dtype
        q, k, v = q.to(work), k.to(work), v.to(work)
        if self.sampling != "all" and n_q + n_k <= self.landmarks and not call.noted:
            return self.exact(q, k, v, call).to(dtype)
        chosen = draw_landmarks(self.sampling, self.landmarks, n_q, n_k, call, q.device)
        points = landmark_rows(q, k, chosen)
        values = rescaled(v, k, call) if self.kernel == "softmax" else v
        factor = -call.scale / 2
        sums, _, _ = feature_sums(k, points, values, call.mask.keep, Map.GAUSSIAN, factor)
        middle = self.middle(math.sqrt(call.scale) * points.double(), chosen)
        table = self.solve(middle, sums.double() * chosen.used.unsqueeze(-1)).to(work)
        if self.kernel == "softmax":
            table = torch.cat([table, landmark_keys(v, k, call, chosen, n_q)], dim=-1)
        out, _ = feature_mix(q, points, table, None, Map.GAUSSIAN, factor)
        if self.kernel == "softmax":
            out = normalised(*out.chunk(2, dim=-1))
        if call.noted:
            self.lift(q, k, call)
        return self.with_covered_items(out, q, k, v, call, chosen).to(dtype)

    def with_covered_items(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, chosen: Landmarks) -> Tensor:
        """Put the exact target into `out` for the items that `covered` names."""
        items = self.covered(chosen).expand(q.shape[0]).nonzero().squeeze(-1)
        return attend_items(out, items, self.exact, q, k, v, call) if len(items) else out

    def lift(self, q: Tensor, k: Tensor, call: Call) -> Lift:
        """Return the landmarks, and the kernel of all rows and of the landmarks against them (eqs. 4 and 5)."""
        n_q, n_k = q.shape[-2], k.shape[-2]
        rows = math.sqrt(call.scale) * torch.cat([q, k], dim=-2)  # X (B, H, n_q + n_k, d)
        chosen = draw_landmarks(self.sampling, self.landmarks, n_q, n_k, call, q.device)
        used = chosen.used.unsqueeze(-2)  # (B or 1, 1, 1, m)
        points = rows.take_along_dim(chosen.rows.unsqueeze(-1), dim=-2)  # (B, H, m, d)
        columns = gaussian(rows, points)
        if not bool(used.all()):
            columns = columns * used
        if call.mask.keep is not None:
            seen = torch.cat([call.mask.keep.new_ones(call.mask.keep.shape[0], n_q), call.mask.keep], dim=-1)
            columns = columns * seen[:, None, :, None]
        middle = self.middle(points.double(), chosen)
        if call.noted:
            self.explain(columns, middle, chosen, call)
        return Lift(columns, middle, chosen)

    def middle(self, points: Tensor, chosen: Landmarks) -> Tensor:
        """Return M from the landmark rows of X."""
        used = chosen.used.unsqueeze(-2)
        eye = torch.eye(used.shape[-1], dtype=points.dtype, device=points.device)
        return gaussian(points, points) * (used & used.mT & (eye == 0)) + eye

    def solve(self, middle: Tensor, right: Tensor) -> Tensor:
        """Return (M + gamma I)^-1 right in float64."""
        if self.solver == "cholesky":
            return torch.cholesky_solve(right, linalg.damped_cholesky(middle, max(self.gamma, _DAMPING)))
        eye = torch.eye(middle.shape[-1], dtype=middle.dtype, device=middle.device)
        return linalg.iterated_inverse(middle + max(self.gamma, _DAMPING_STEPS) * eye, self.iterations) @ right

    def explain(self, columns: Tensor, middle: Tensor, chosen: Landmarks, call: Call) -> None:
        """Note the landmarks and, for the Gaussian kernel, a bound on the error of C~.

        C-bar - C-bar-tilde is positive semidefinite, so its norm is at most its trace, and the norm of an off-diagonal
        block at most half its trace.
        """
        shape = (*columns.shape[:2], chosen.rows.shape[-1])
        call.note(landmarks=chosen.rows.masked_fill(~chosen.used, -1).expand(shape))
        if self.kernel == "softmax":
            return
        with torch.no_grad():
            wide = columns.double()
            explained = (wide * self.solve(middle, wide.mT).mT).sum(-1)  # diagonal of C-bar-tilde (B, H, n_q + n_k)
            bound = ((1 - explained) * chosen.valid[:, None, :]).sum(-1) / 2
            call.note(bound=bound.masked_fill(self.covered(chosen)[:, None], 0.0))

    def covered(self, chosen: Landmarks) -> Tensor:
        """Return which items (B or 1,) have only landmark rows, so that the exact target is cheaper."""
        return chosen.valid.sum(-1) <= (-1 if self.sampling == "all" else self.landmarks)

    def exact(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute the target densely (B, H, n_q, e)."""
        if self.kernel == "softmax":
            return dense.softmax(dense.logits(q, k, call))[0] @ v
        return gaussian(math.sqrt(call.scale) * q, math.sqrt(call.scale) * k) @ v  # values of padded keys are zero

    def exact_target(self) -> Method:
        return method("exact" if self.kernel == "softmax" else "kernel(kind=gaussian, normalize=none)")

    def full_budget(self, shape: Shape) -> Method:
        # More landmarks than rows: the target itself. (sampling="all" with gamma=0 reaches it through the solver.)
        sampling = "without_replacement" if self.sampling == "all" else self.sampling
        return replace(self, landmarks=max(shape.queries + shape.keys, 1), sampling=sampling)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        n, units = shape.queries + shape.keys, shape.batch * shape.heads
        m = n if self.sampling == "all" else min(self.landmarks, n)
        softmax, d, e = self.kernel == "softmax", shape.head_dim, shape.value_dim
        if m == n and self.sampling != "all":  # exact
            work = shape.pairs * (2 * (d if softmax else d + 2) + 1 + 2 * e)
            numbers, m = shape.pairs, shape.keys
        else:
            inverse = m**3 / 3 if self.solver == "cholesky" else self.iterations * 8 * m**3
            width = e + softmax
            work = (n + m) * m * (2 * (d + 2) + 1) + inverse + 2 * m * m * width + 2 * n * m * width
            work += 2 * shape.queries * m * e if softmax else 0  # what rows without a usable sum get
            numbers = n * m + 3 * m * m
        size = 8 if softmax or self.gamma < _FLOAT32_GAMMA else 4
        return Cost(units * float(work) + shape.projection_flops, float(units * size * numbers), m)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """Return exp(-|x_i - y_j|^2 / 2): x (..., n, d), y (..., m, d) -> (..., n, m); entries in [0, 1].

    The exponent is formed in float64: near pairs of long vectors cancel.
    """
    wide_x, wide_y = x.double(), y.double()
    half_x, half_y = (t.square().sum(-1, keepdim=True) / -2 for t in (wide_x, wide_y))
    # x.y - |x|^2 / 2 - |y|^2 / 2 as one product with two more coordinates; rounding can lift it above zero.
    left = torch.cat([wide_x, half_x, torch.ones_like(half_x)], -1)
    right = torch.cat([wide_y, torch.ones_like(half_y), half_y], -1)
    return (left @ right.mT).clamp_(max=0).to(x.dtype).exp()


def key_weights(k: Tensor, call: Call) -> Tensor:
    """Return exp(s |k|^2 / 2) over the largest (B, H, n_k, 1); zero if padded. The queries' factor cancels."""
    logs = call.scale / 2 * k.square().sum(-1, keepdim=True)
    if call.mask.keep is not None:
        logs = logs.masked_fill(~call.mask.keep[:, None, :, None], -torch.inf)
    return (logs - dense.finite_or_zero(logs.detach().amax(-2, keepdim=True))).exp()


def rescaled(v: Tensor, k: Tensor, call: Call) -> Tensor:
    """Return values times their keys' weights, and the weights as the last column (B, H, n_k, e + 1)."""
    weights = key_weights(k, call)
    return torch.cat([v * weights, weights], dim=-1)


def landmark_rows(q: Tensor, k: Tensor, chosen: Landmarks) -> Tensor:
    """Return the landmarks among the rows of [Q; K], without joining the two (B, H, m, d)."""
    rows, n_q = chosen.rows.unsqueeze(-1), q.shape[-2]
    from_q = q.take_along_dim(rows.clamp_max(n_q - 1), dim=-2)
    return torch.where(rows < n_q, from_q, k.take_along_dim((rows - n_q).clamp_min(0), dim=-2))


def landmark_keys(v: Tensor, k: Tensor, call: Call, chosen: Landmarks, n_q: int) -> Tensor:
    """Return the rows of `rescaled` at landmarks that are keys, each shared among its repeats (B, H, m, e + 1)."""
    is_key = (chosen.rows >= n_q).unsqueeze(-1)  # (B or 1, H or 1, m, 1)
    repeats = (chosen.rows.unsqueeze(-1) == chosen.rows.unsqueeze(-2)).sum(-1, keepdim=True)
    at = (chosen.rows - n_q).clamp_min(0).unsqueeze(-1)
    share = key_weights(k, call).take_along_dim(at, dim=-2) * is_key / repeats
    return torch.cat([v.take_along_dim(at, dim=-2) * share, share], dim=-1)


def normalised(sums: Tensor, known: Tensor) -> Tensor:
    """Divide sums (B, H, n_q, e + 1) by their last column, the row sums, where these are plausible.

    What the landmark keys contribute to a row sum is known exactly. A sum below that (C~ may be negative) is wrong,
    and dividing by it would blow up; such a row gets exact attention over the landmark keys, `known`.
    """
    total = sums[..., -1:]
    trusted = total > known[..., -1:].clamp_min(_FLOOR)
    fallback = dense.divide_rows(known[..., :-1], known[..., -1:])
    return torch.where(trusted, sums[..., :-1] / total.masked_fill(~trusted, 1.0), fallback)
