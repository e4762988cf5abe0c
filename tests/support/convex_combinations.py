"""Weights and values on which few keys are hard to choose, and what is asked of a convex combination of few values."""

import torch

F64 = torch.float64
KINDS = (
    "random", "uniform", "peaked", "one-hot", "underflow", "sphere", "log-normal", "one huge value", "graded", "integers",
    "duplicates", "near duplicates", "on a line", "low rank", "nearly low rank", "all alike", "zeros", "far from zero",
)  # fmt: skip


def instance(kind, e, *, queries=24, n=60, seed=0):
    """(weights [Q, n], values [n, e]) in float64."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=F64)

    sharpness = {"uniform": 0, "peaked": 8, "one-hot": 60, "underflow": 800, "log-normal": 2, "graded": 4}.get(kind, 1)
    weights, v = (sharpness * draw(queries, n)).softmax(-1), draw(n, e)
    values = {
        "sphere": lambda: v / v.norm(dim=-1, keepdim=True),
        "log-normal": lambda: v * torch.exp(draw(n, 1)),
        "one huge value": lambda: v * torch.where(torch.arange(n) == 5, 1e4, 1.0)[:, None],
        "graded": lambda: v * 10 ** torch.linspace(-4, 4, n, dtype=F64)[:, None],
        "integers": lambda: torch.randint(-1, 2, (n, e), generator=gen).double(),
        "duplicates": lambda: v[:5].repeat(n // 5, 1),
        "near duplicates": lambda: v[:5].repeat(n // 5, 1) + 1e-9 * draw(n, e),
        "on a line": lambda: torch.linspace(-1, 1, n, dtype=F64)[:, None] * draw(1, e),
        "low rank": lambda: draw(n, 2) @ draw(2, e),
        "nearly low rank": lambda: draw(n, 2) @ draw(2, e) + 1e-8 * draw(n, e),
        "all alike": lambda: v[:1].repeat(n, 1),
        "zeros": lambda: torch.zeros(n, e, dtype=F64),
        "far from zero": lambda: v + 1e5,
    }.get(kind, lambda: v)()
    return weights, values


def error(found, weights, values):
    """Squared distance of a combination (indices, weights) to the mean."""
    indices, held = found
    return ((held.unsqueeze(-2) @ values[indices]).squeeze(-2) - weights @ values).square().sum(-1)


def top(weights, r, scores=None):
    """OVO-r in the form of an oracle: the r largest scores, with their weights renormalised."""
    indices = (weights if scores is None else scores).topk(r).indices
    held = weights.gather(-1, indices)
    return indices, held / held.sum(-1, keepdim=True)


def scale(weights, values):
    """Squared size of the values: rounding is judged against it."""
    return weights @ values.square().sum(-1)


def assert_exact(found, weights, values):
    """The mean itself, from at most e + 1 values with convex weights."""
    indices, held = found
    assert bool((held >= 0).all())
    assert torch.allclose(held.sum(-1), torch.ones((), dtype=F64), atol=1e-12)
    assert int((held > 0).sum(-1).max()) <= values.shape[-1] + 1
    assert indices.min() >= 0
    assert indices.max() < values.shape[-2]
    assert bool((error(found, weights, values) <= 1e-22 * scale(weights, values)).all())
