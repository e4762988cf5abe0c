"""The best few values: convex combinations of at most r values near the attention output, for any weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing.oracles.nearest import distances, mean_of, nearest, unit

_BLOCK = 2**18  # query-key pairs worked on at a time


def ova_objective(weights: Tensor, values: Tensor) -> Tensor:
    """Return |o - v_i|^2 for every key, with o = sum_i w_i v_i (float64). The smallest is OVA-1, the best value.

    weights: [..., n], non-negative, of sum one; values: [..., n, e].

    >>> sparing.oracles.ova_objective(torch.tensor([0.25, 0.35, 0.4]), torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    tensor([2.4925, 3.1925, 3.7925], dtype=torch.float64)
    """
    weights, values, _, lead = _grouped(weights, values, None)
    rows = [distances(mean_of(unit(w), v), v) for w, v in zip(weights, values, strict=True)]
    return torch.stack(rows).view(*lead, weights.shape[-1]) if rows else weights.new_zeros(*lead, weights.shape[-1])


def caratheodory(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same mean from at most e + 1 values: (indices, weights), [..., min(n, e + 1)], float64 weights.

    weights: [..., n], non-negative, of sum one; a row of zeros gives zeros. values: [..., n, e]; the leading axes
    broadcast, and a last leading axis of one is shared by all queries of the weights. Unused slots have weight 0.

    >>> weights, values = torch.rand(100).softmax(0), torch.randn(100, 3)
    >>> few, share = sparing.oracles.caratheodory(weights, values)
    >>> few.shape, torch.allclose(share.float() @ values[few], weights @ values, atol=1e-6)
    (torch.Size([4]), True)
    """
    _check_shapes(weights, values)
    return value_aware(weights, values, min(weights.shape[-1], values.shape[-1] + 1))


def value_aware(
    weights: Tensor, values: Tensor, keys: int, *, allowed: Tensor | None = None, corrective: bool = True
) -> tuple[Tensor, Tensor]:
    """Return at most `keys` values whose convex combination is near the mean (OVA): (indices, weights), [..., keys].

    With one key the result is the optimum. With at least e + 1 keys, or with all keys, it is the mean itself. In
    between a greedy pursuit guarantees |error|^2 <= sum_i w_i |v_i - o|^2 / keys and is never worse than the `keys`
    largest weights. The weights found are free: non-negative, of sum one, unrelated to the given ones. The plain
    pursuit keeps the optimum for one key and the guarantee, and is the mean itself only with room for all keys.

    weights: [..., n], non-negative, of sum one; a row of zeros gives zeros. values: [..., n, e]; the leading axes
        broadcast, and a last leading axis of one is shared by all queries of the weights.
    allowed: [..., n] boolean, the keys that may be used; None for those of positive weight.
    corrective: find the best weights on the support after each key. False is the plain pursuit, which can be worse
        than the `keys` largest weights.
    """
    for name, given, kind in (("keys", keys, int), ("corrective", corrective, bool)):
        if type(given) is not kind:
            raise TypeError(f"{name}={given!r} must be of type {kind.__name__}")
    if keys < 1:
        raise ValueError(f"keys={keys!r} must be at least 1")
    weights, values, allowed, lead = _grouped(weights, values, allowed)
    if not lead.numel():
        return weights.new_zeros(*lead, keys, dtype=torch.long), weights.new_zeros(*lead, keys)
    # The result does not depend on the scale of the values; a power of two keeps squares in range and changes no bit.
    values = torch.ldexp(values, -torch.frexp(values.abs().amax()).exponent)
    step = max(1, _BLOCK // weights.shape[-1])
    parts = []
    for group in range(weights.shape[0]):
        for rows in (slice(i, i + step) for i in range(0, weights.shape[1], step)):
            v = values[group] if values.ndim == 3 else values[group, rows]
            w = unit(weights[group, rows])
            parts.append(nearest(w, v, w > 0 if allowed is None else allowed[group, rows], keys, corrective)[:2])
    # Slots beyond what is ever needed stay unused.
    indices, held = (torch.cat([pad(t, (0, keys - t.shape[1])) for t in ts]) for ts in zip(*parts, strict=True))
    return indices.view(*lead, keys), held.view(*lead, keys)


def _grouped(
    weights: Tensor, values: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, torch.Size]:
    """Return weights (G, Q, n), values (G, n, e), shared by a group's queries, or (1, Q, n, e), and the batch shape."""
    lead = _check_shapes(weights, values)
    n, width = values.shape[-2:]
    weights, values = weights.detach().double(), values.detach().double()
    total = weights.sum(-1)
    if not bool((weights >= 0).all()) or not bool(((total == 0) | ((total - 1).abs() < 1e-2)).all()):
        raise ValueError("weights must be non-negative and sum to one in each row, or to zero where nothing is visible")
    if not bool(values.isfinite().all()):
        raise ValueError("values must be finite")
    if allowed is not None:
        allowed = _broadcast(allowed, (*lead, n))
        if bool((~allowed & (weights > 0)).any()):
            raise ValueError("allowed is False for a key of positive weight")
    if values.ndim == 2:
        groups, values = 1, values.unsqueeze(0)
    elif values.shape[-3] == 1:
        groups, values = lead[:-1].numel(), values.expand(*lead[:-1], 1, n, width).reshape(-1, n, width)
    else:
        groups, values = 1, values.expand(*lead, n, width).reshape(1, -1, n, width)
    weights = weights.expand(*lead, n).reshape(groups, -1, n)
    return weights, values, allowed if allowed is None else allowed.reshape(weights.shape), lead


def _check_shapes(weights: Tensor, values: Tensor) -> torch.Size:
    """Return the leading shape of both together."""
    for name, given in (("weights", weights), ("values", values)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
        if not given.is_floating_point():
            raise TypeError(f"{name} has dtype {given.dtype}; use a floating point type")
    shapes = f"weights {list(weights.shape)} and values {list(values.shape)}"
    if weights.ndim < 1 or values.ndim < 2 or weights.shape[-1] != values.shape[-2] or 0 in values.shape[-2:]:
        raise ValueError(f"weights must be [..., n] and values [..., n, e] with n, e >= 1, got {shapes}")
    try:
        return torch.broadcast_shapes(weights.shape[:-1], values.shape[:-2])
    except RuntimeError:
        raise ValueError(f"{shapes} do not broadcast") from None


def _broadcast(allowed: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        kind = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
        raise TypeError(f"allowed must be a boolean tensor [..., n], got {kind}")
    try:
        return allowed.expand(shape)
    except RuntimeError:
        raise ValueError(f"allowed {list(allowed.shape)} does not broadcast to {list(shape)}") from None
