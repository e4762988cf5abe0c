"""Inputs for the checks: small calls of any shape, peaked attention, named hard cases."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import sparing
from sparing import Projection, Shape, native


@dataclass(frozen=True)
class Inputs:
    """q, k and the value of a call; the value is a Projection for methods that work on one."""

    q: Tensor
    k: Tensor
    value: Tensor | Projection

    @property
    def payload(self) -> Tensor:
        """The part of the value that has one row per token (token axis -2)."""
        return self.value.x if isinstance(self.value, Projection) else self.value

    @property
    def n_q(self) -> int:
        return self.q.shape[-2]

    @property
    def n_k(self) -> int:
        return self.k.shape[-2]

    def with_payload(self, payload: Tensor) -> Inputs:
        value = self.value._replace(x=payload) if isinstance(self.value, Projection) else payload
        return replace(self, value=value)

    def map(self, fn: Any) -> Inputs:
        """fn on q, k and every tensor of the value."""
        if isinstance(self.value, Projection):
            return Inputs(fn(self.q), fn(self.k), Projection(*(None if t is None else fn(t) for t in self.value)))
        return Inputs(fn(self.q), fn(self.k), fn(self.value))

    def tokens(self, index: Any) -> Inputs:
        """A selection of tokens (same for queries and keys)."""
        return replace(self, q=self.q[:, :, index], k=self.k[:, :, index]).with_payload(self.payload[..., index, :])

    def item(self, index: slice) -> Inputs:
        """A selection of batch items."""
        return replace(self, q=self.q[index], k=self.k[index]).with_payload(self.payload[index])

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.payload]


def shape_of(x: Inputs, causal: bool = False) -> Shape:
    """Return the shape that costs and full budgets are worked out from."""
    value_dim = x.value.shape[-1] if isinstance(x.value, Tensor) else x.value.weight.shape[0] // x.k.shape[1]
    return Shape(
        batch=x.q.shape[0], heads=x.q.shape[1], kv_heads=x.k.shape[1], queries=x.n_q, keys=x.n_k, head_dim=x.q.shape[-1],
        value_dim=value_dim, causal=causal,
        in_features=x.value.x.shape[-1] if isinstance(x.value, Projection) else None,
    )  # fmt: skip


def projected(x: Inputs) -> Tensor:
    """Return the value as a tensor, whether it is a Projection or not."""
    return x.value.project(x.k.shape[1]) if isinstance(x.value, Projection) else x.value


def make(
    method: sparing.Method,
    *,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    n_q: int = 33,
    n_k: int | None = None,
    d: int = 8,
    e: int = 6,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sharpness: float = 1.5,
) -> Inputs:
    """Random inputs with moderately peaked attention."""
    gen = torch.Generator().manual_seed(seed)
    n_k = n_q if n_k is None else n_k
    kv_heads = heads if kv_heads is None else kv_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    k = draw(batch, kv_heads, n_k, d)
    q = sharpness * draw(batch, heads, n_q, d)
    value: Tensor | Projection
    if method.supports.projection:
        width = 12
        value = Projection(draw(batch, n_k, width), draw(kv_heads * e, width) / math.sqrt(width), draw(kv_heads * e))
    else:
        value = draw(batch, kv_heads, n_k, e)
    return Inputs(q, k, value).map(lambda t: t.to(dtype))


def run(method: sparing.Method | str, x: Inputs, *, seed: int | None = 0, **kwargs: Any) -> Tensor:
    return sparing.attention(x.q, x.k, x.value, method=method, seed=seed, **kwargs)


def by(impl: str, *args: Any, **kwargs: Any) -> Tensor:
    """`run` by the specification, by plain PyTorch ("torch") or by kernels ("native")."""
    with native.switched_off() if impl == "torch" else nullcontext():
        return run(*args, impl="reference" if impl == "reference" else "auto", **kwargs)


def exact_for(x: Inputs, **kwargs: Any) -> Tensor:
    """Exact softmax attention in float64 of the same inputs."""
    return run("exact", x.map(lambda t: t.double()), impl="reference", **kwargs)


def relative(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def keys_mask(keep: Tensor) -> Tensor:
    """[B, n_k] boolean -> the key-padding mask of the door."""
    return keep[:, None, None, :]


def padding(kind: str, batch: int, n: int, seed: int = 0) -> Tensor:
    """[B, n] boolean: left, right, both or holes; at least one key per item is valid, and items differ."""
    gen = torch.Generator().manual_seed(seed)
    position = torch.arange(n).expand(batch, n)
    length = torch.randint(max(1, n // 2), max(2, n), (batch, 1), generator=gen).clamp_max(n)
    if kind == "right":
        return position < length
    if kind == "left":
        return position >= n - length
    if kind == "both":
        start = (n - length) // 2
        return (position >= start) & (position < start + length)
    keep = torch.rand(batch, n, generator=gen) < 0.6
    keep[:, n // 2] = True
    return keep


def effective_count(q: Tensor, k: Tensor) -> float:
    """Mean over queries of 1 / sum alpha^2: how many keys attention really uses."""
    alpha = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).softmax(-1)
    return float((1 / alpha.square().sum(-1)).mean())


def peaked(
    method: sparing.Method, count: float, *, n: int = 64, d: int = 16, e: int = 8, heads: int = 2, seed: int = 0
) -> Inputs:
    """Self-attention on clustered tokens whose temperature is set so that about `count` keys matter per query."""
    x = make(method, batch=1, heads=heads, n_q=n, d=d, e=e, dtype=torch.float64, seed=seed, sharpness=1.0)
    gen = torch.Generator().manual_seed(seed + 1)
    topics = torch.randn(1, heads, 6, d, generator=gen, dtype=torch.float64)
    topic = torch.randint(6, (n,), generator=gen)
    k = 0.7 * topics[:, :, topic] + 0.7 * x.k
    q = 0.7 * topics[:, :, topic.roll(3)] + 0.7 * x.q
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if effective_count(middle * q, k) > count else (low, middle)
    # Value norms differ by an order of magnitude, as they do in real layers.
    norms = torch.exp(0.8 * torch.randn(n, 1, generator=gen, dtype=torch.float64))
    return Inputs(low * q, k, x.value).with_payload(x.payload * norms)


def hard_cases(method: sparing.Method, dtype: torch.dtype = torch.float32) -> dict[str, Inputs]:
    """Named inputs on which methods tend to divide by zero, overflow or drop tokens."""
    x = make(method, n_q=33, dtype=dtype)
    one = make(method, n_q=1, dtype=dtype)
    duplicate = replace(x, k=x.k[:, :, :1].expand_as(x.k).contiguous())
    zeros = x.map(torch.zeros_like) if not isinstance(x.value, Projection) else replace(x, q=x.q * 0, k=x.k * 0)
    root = math.sqrt(1e4 * math.sqrt(8) / 8)
    huge = replace(x, q=x.q.sign() * root, k=x.k.sign() * root)
    norms = torch.ones(33, 1, dtype=dtype)
    norms[5] = 1e4
    return {
        "one token": one,
        "two tokens": make(method, n_q=2, dtype=dtype),
        "one key": make(method, n_q=7, n_k=1, dtype=dtype) if method.supports.cross_attention else one,
        "duplicate keys": duplicate,
        "zero vectors": zeros,
        "anti-parallel": replace(x, q=-x.k.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)),
        "equal q and k": replace(x, q=x.k.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1).clone()),
        "logits of 1e4": huge,
        "one huge value": x.with_payload(x.payload * norms),
        "width one": make(method, n_q=9, d=1, e=1, dtype=dtype),
        **_patterns(x),
    }


def _patterns(x: Inputs) -> dict[str, Inputs]:
    """Attention of a known form, on 33 tokens of width 8."""
    u = torch.zeros(8, dtype=x.q.dtype)
    u[0] = 1.0
    token = torch.arange(33)
    angle = 2 * math.pi / 33 * token[:, None] * torch.tensor([1, 2, 4, 8])
    place = torch.cat([angle.cos(), angle.sin()], -1).to(x.q.dtype)  # closest to those of the neighbours
    across, direction = x.k * (1 - u), x.k / x.k.norm(dim=-1, keepdim=True)
    return {
        "two equal peaks": replace(
            x, q=x.q + 12 * u, k=torch.where(((token == 5) | (token == 20))[:, None], 4 * u, x.k)
        ),
        "heavy-hitter key": replace(x, q=x.q + 6 * u, k=torch.where((token == 7)[:, None], 30 * u, x.k)),
        "strictly local": replace(x, q=(10 * place).expand_as(x.q).clone(), k=place.expand_as(x.k).clone()),
        "strictly global": replace(
            x, q=(60 * u).expand_as(x.q).clone(), k=torch.where((token == 32)[:, None], u, across)
        ),
        "one-hot attention": replace(x, q=1e3 * direction.roll(11, -2), k=direction),
    }
