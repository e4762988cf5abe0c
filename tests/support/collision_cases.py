"""What the tests of hash collisions share: inputs, and the weights that the codes say."""

from __future__ import annotations

import torch
from torch import Tensor

import sparing
from sparing.methods.yoso.method import Yoso
from tests.support.inputs import Inputs, keys_mask, peaked


def clustered(
    n: int, *, d: int = 16, e: int = 8, heads: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    """Peaked attention among a few topics."""
    return peaked(sparing.method("yoso"), 4.0, n=n, d=d, e=e, heads=heads, seed=seed).map(lambda t: t.to(dtype))


def dense_weights(
    method: Yoso, x: Inputs, *, keep: Tensor | None = None, causal: bool = False, seed: int = 0
) -> Tensor:
    """B of eq. 5 from the codes that `inspect()` gives, (B, H, n_q, n_k) in float64."""
    mask = None if keep is None else keys_mask(keep)
    facts = sparing.inspect(x.q, x.k, x.value, mask, is_causal=causal, method=method, seed=seed).statistics
    same = facts["query_codes"].unsqueeze(-2) == facts["key_codes"].unsqueeze(-3)  # (B, H, n_q, n_k, hashes)
    weights = same.double().mean(-1)
    weights = weights.tril() if causal else weights
    return weights if mask is None else weights * mask


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    found, wanted = found.detach().double(), wanted.detach().double()
    assert float((found - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


def tracked(x: Inputs) -> Inputs:
    """Copies that require a gradient."""
    return x.map(lambda t: t.detach().clone().requires_grad_())
