"""Errors of sampled values over many draws, compared with their exact mean squares and with the bounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparing.contract import Projection
from sparing.draws import Draws
from sparing.functional import attention, inspect
from sparing.methods.monte_carlo.sampling import Lists, draw_features, feature_law, mean_square_error, sampled_product
from sparing.transformers.watch import ObservedCall
from sparing_lab.studies.rows import Row

DELTAS = (0.5, 0.1, 0.01)  #: the probabilities delta of eq. 11
GAUSSIAN = "gaussian"


def gaussian(n: int, *, heads: int = 4, width: int = 32, features: int = 384) -> ObservedCall:
    """Return a call with normal random numbers: logits of unit variance, independent tokens."""
    random = torch.Generator().manual_seed(n)
    q, k = torch.randn(2, 1, heads, n, width, generator=random).unbind(0)
    x = torch.randn(1, n, features, generator=random)
    weight = torch.randn(heads * width, features, generator=random) / math.sqrt(features)
    return ObservedCall(GAUSSIAN, q, k, Projection(x, weight, None), {})


@torch.no_grad()
def row_error(q: Tensor, k: Tensor, value: Projection, alpha: float, samples: str, draws: int) -> Row:
    """Measure the errors of all rows of all heads of one call, over many draws.

    rms, predicted, bound, output: root mean squares over rows and heads; worst_mean, worst_rms: the largest of a row
    beside its bound; z: how many standard errors the mean square, each head's beside its predicted one, is from 1;
    tails: of the worst row, the share of draws beyond bound / delta and beyond bound / sqrt(delta).
    """
    spec = f"monte_carlo(alpha={alpha}, samples={samples})"
    facts = inspect(q, k, value, method=spec, seed=0).statistics
    heads = k.shape[1]
    exact = attention(q, k, value.project(heads), method="exact")
    bound = facts["bound"][0].double().unsqueeze(-1)  # (H, 1)
    weights = (q[0] @ k[0].mT / math.sqrt(q.shape[-1])).softmax(-1)
    per_head = value.weight.unflatten(0, (heads, -1)).mT
    predicted = {
        shared: torch.stack([
            mean_square_error(weights[h], value.x[0], per_head[h], facts["counts"][0, h], shared=shared)
            for h in range(heads)
        ])
        for shared in (False, True)
    }  # fmt: skip
    own = predicted[samples == "shared"]
    hit = own.sum(-1) > 0
    square, norm = torch.zeros_like(own), torch.zeros_like(own)
    beyond = torch.zeros(len(DELTAS), 2, *own.shape)
    limits = torch.tensor([[1 / delta, delta**-0.5] for delta in DELTAS]).view(-1, 2, 1, 1) * bound
    totals = []
    for seed in range(1, draws + 1):
        error = (attention(q, k, value, method=spec, seed=seed) - exact)[0].double().norm(dim=-1)
        square += error.square() / draws
        norm += error / draws
        beyond += (error > limits) / draws
        shares = error.square().sum(-1)[hit] / own.sum(-1)[hit]  # only heads that have sampled tokens
        totals.append(float(shares.mean()) if len(shares) else 1.0)
    found = torch.tensor(totals, dtype=torch.float64)
    spread = float(found.std()) / math.sqrt(draws)
    return {
        "rms": _root(square), "predicted": _root(own), "other": _root(predicted[samples != "shared"]),
        "bound": _root(bound.square()), "output": _root(exact[0].double().square().sum(-1)),
        "z": (float(found.mean()) - 1) / spread if spread else 0.0,
        "worst_mean": float((norm / bound).max()), "worst_rms": float((square.sqrt() / bound).max()),
        "rate": float(facts["rate"].mean()), "tails": beyond.flatten(2).amax(-1).tolist(),
    }  # fmt: skip


def _root(squares: Tensor) -> float:
    return math.sqrt(float(squares.double().mean()))


@torch.no_grad()
def token_error(value: Projection, heads: int, r: int, draws: int) -> Row:
    """Measure the token in the middle, projected from r samples, over draws; root mean square over heads."""
    x = value.x[:, value.x.shape[1] // 2].double()
    counts, ranks = torch.full((1, 1, draws), r), torch.arange(draws).view(1, 1, -1)
    found: dict[str, list[float]] = {"square": [], "mean": [], "predicted": [], "bound": [], "z": [], "excess": []}
    for head, w in enumerate(value.weight.double().unflatten(0, (heads, -1)).mT):
        law = feature_law(w).unsqueeze(0)
        lists = Lists(ranks=ranks, draws=Draws(1, torch.tensor([head])), shared=False, stratified=False)
        picks = draw_features(law, counts, lists)
        inputs = x.view(1, 1, 1, -1).expand(1, 1, draws, -1)
        error = (sampled_product(inputs, w.unsqueeze(0), law, picks, counts)[0, 0] - x @ w).norm(dim=-1)
        square = error.square()
        predicted = mean_square_error(torch.ones(1, 1), x, w, torch.tensor([r]), shared=False)
        found["square"].append(float(square.mean()))
        found["mean"].append(float(error.mean()))
        found["predicted"].append(float(predicted))
        found["bound"].append(float(x.norm() * w.norm()) / math.sqrt(r))
        found["excess"].append((found["mean"][-1] - found["bound"][-1]) / float(error.std() / math.sqrt(draws)))
        found["z"].append(float((square.mean() - predicted) / (square.std() / math.sqrt(draws))))
    worst = max(mean / bound for mean, bound in zip(found["mean"], found["bound"], strict=True))
    roots = {name: math.sqrt(sum(found[name]) / heads) for name in ("square", "predicted")}
    bound = math.sqrt(sum(bound**2 for bound in found["bound"]) / heads)
    return {
        "rms": roots["square"], "predicted": roots["predicted"], "bound": bound, "worst_mean": worst,
        "z": max(found["z"], key=abs), "excess": max(found["excess"]),
    }  # fmt: skip


@torch.no_grad()
def worst(case: str, rounding: str, draws: int) -> Row:
    """Return error / bound for tokens with which Lemma 1 is an equality: equal features and rows of W, x W = 0.

    "equal tokens": eight, read alike, with shared samples and alpha = 1. "one token": (1 / alpha)^2 = 1.99.
    """
    n, alpha = (8, 1.0) if case == "equal tokens" else (1, 1 / math.sqrt(1.99))
    w = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)[:, None] * torch.tensor([[1.0, 2.0, 2.0]])
    x = torch.ones(n, 8, dtype=torch.float64)
    bound = alpha * float(x.norm(dim=-1).mean() * w.norm())
    wanted = (n * (1 / n) / alpha) ** 2
    r = math.ceil(wanted - 1e-9) if rounding == "up" else math.floor(wanted + 1e-9)
    counts, law = torch.full((1, 1, n), r), feature_law(w).unsqueeze(0)
    rms = mean_square_error(torch.full((1, n), 1 / n), x, w, counts[0, 0], shared=True).sqrt()
    total = 0.0
    for seed in range(draws):
        draw = Draws(seed, torch.tensor([0]))
        lists = Lists(ranks=torch.arange(n).view(1, 1, -1), draws=draw, shared=True, stratified=False)
        picks = draw_features(law, counts, lists)
        total += float(sampled_product(x[None, None], w.unsqueeze(0), law, picks, counts)[0, 0].mean(0).norm())
    return {"wanted": wanted, "r": r, "ratio": total / draws / bound, "rms_ratio": float(rms) / bound}
