"""Tensors of a door case: contents, sizes, strides and masks, the same for the same case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import sparing
from sparing import Projection
from tests.support.inputs import Inputs

CONTENTS = ("normal", "constant", "duplicates", "zeros", "one_hot", "integers", "spread")
LAYOUTS = ("plain", "columns", "transposed", "heads_last", "sliced", "expanded")
MASKS = (
    "padding", "padding_shared", "padding_additive", "padding_lowest", "padding_expanded", "by_query", "by_head",
    "hidden_rows", "hidden", "bias", "bias_of_keys",
)  # fmt: skip
WIDTH = 6  #: of the hidden states of a Projection


@dataclass(frozen=True)
class Built:
    """A call, and what its mask means."""

    method: sparing.Method
    x: Inputs
    options: dict[str, Any]  #: keyword arguments of `attention()`, the method and the seed among them
    keep: Tensor | None  #: (B, n_k): key padding
    bias: Tensor | None  #: what is added to the logits, float64, broadcastable to (B, H, n_q, n_k)
    visible: Tensor  #: (B, H, n_q, n_k): what a query may look at

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        given = self.options["scale"]
        return float(max(self.x.q.shape[-1], 1) ** -0.5 if given is None else given)

    @property
    def sees(self) -> Tensor:
        """(B, H, n_q): rows that may look at anything."""
        return self.visible.any(-1)

    def with_inputs(self, x: Inputs) -> Built:
        return replace(self, x=x)

    def run(self, x: Inputs | None = None, **changes: Any) -> Tensor:
        """`attention()` of this call."""
        x = x or self.x
        return sparing.attention(x.q, x.k, x.value, **{**self.options, **changes})

    def wide(self) -> Inputs:
        """The same numbers in float64."""
        return self.x.map(lambda t: t.double())

    def values(self, x: Inputs) -> Tensor:
        """The values (B, H_kv, n_k, e), projected where they are not."""
        return x.value.project(x.k.shape[1]) if isinstance(x.value, Projection) else x.value


def build(case: dict[str, Any]) -> Built:
    """Build the call of a case."""
    gen = torch.Generator().manual_seed(case["data"])
    dtype = getattr(torch, case["dtype"])
    method = sparing.method(case["method"])
    batch, heads, kv_heads, n_q, n_k = (case[name] for name in ("batch", "heads", "kv_heads", "n_q", "n_k"))
    d, e = case["d"], case["e"]

    def rows(name: str, *shape: int) -> Tensor:
        kind, size = case[name]
        most = torch.finfo(dtype).max / 2  # of float16, which is small
        return (_content(kind, shape, gen) * size).clamp(-most, most).to(dtype)

    value: Tensor | Projection
    q, k = rows("q", batch, heads, n_q, d), rows("k", batch, kv_heads, n_k, d)
    if method.supports.projection:
        weight = torch.randn(kv_heads * e, WIDTH, generator=gen, dtype=torch.float64)
        value = Projection(rows("v", batch, n_k, WIDTH), weight.to(dtype), weight[:, 0].to(dtype))
    else:
        value = rows("v", batch, kv_heads, n_k, e)
    x = Inputs(q, k, value)
    x = replace(x, q=_laid_out(q, case["layout"]), k=_laid_out(k, case["layout"])).with_payload(
        _laid_out(x.payload, case["layout"])
    )
    mask, keep, bias, visible = _mask(case, gen, dtype)
    if case["causal"]:
        visible = visible.tril()
    options = {
        "attn_mask": mask, "is_causal": case["causal"], "scale": case["scale"], "enable_gqa": kv_heads != heads,
        "method": method, "seed": case["seed"], "impl": case["impl"],
    }  # fmt: skip
    return Built(method, x, options, keep, bias, visible)


def _content(kind: str, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen, dtype=torch.float64)

    *outer, n, d = shape
    if kind == "constant":
        return draw(*outer, 1, d).expand(shape).clone()
    if kind == "duplicates":
        return draw(*outer, 3, d)[..., torch.randint(3, (n,), generator=gen), :]
    if kind == "zeros":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "one_hot":
        place = torch.randint(max(d, 1), (*outer, n, 1), generator=gen)
        return torch.zeros(shape, dtype=torch.float64).scatter(-1, place, 1.0) if d else draw(*shape)
    if kind == "integers":
        return torch.randint(-2, 3, shape, generator=gen).double()
    if kind == "spread":  # rows of very different lengths
        return draw(*shape) * 10.0 ** (3 * draw(*outer, n, 1)).clamp(-4, 4)
    return draw(*shape)


def _laid_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers in another place; what lies between them is NaN."""
    if layout == "columns":
        room = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype)
        room[..., ::2] = t
        return room[..., ::2]
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "heads_last":
        return t.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "sliced":
        room = torch.full((*t.shape[:-2], t.shape[-2] + 5, t.shape[-1] + 3), torch.nan, dtype=t.dtype)
        inside = room[..., 2 : 2 + t.shape[-2], 1 : 1 + t.shape[-1]]
        inside.copy_(t)
        return inside
    if layout == "expanded" and t.shape[0]:
        return t[:1].expand(t.shape)
    return t


def _mask(
    case: dict[str, Any], gen: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """(attn_mask, key padding, bias, what is visible without causality)."""
    batch, heads, n_q, n_k = (case[name] for name in ("batch", "heads", "n_q", "n_k"))
    full, kind = (batch, heads, n_q, n_k), case["mask"]

    def chance(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=gen) < share

    if kind is None:
        return None, None, None, torch.ones(full, dtype=torch.bool)
    if kind.startswith("padding"):
        shared = kind == "padding_shared"
        keep = chance(0.6, 1 if shared else batch, n_k)
        mask = keep if shared else keep[:, None, None, :]
        if kind == "padding_expanded":
            mask = mask.expand(full)
        visible = keep[:, None, None, :].expand(full)
        if kind in ("padding_additive", "padding_lowest"):
            low = -torch.inf if kind == "padding_additive" else torch.finfo(dtype).min
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, low)
        return mask, keep.expand(batch, n_k), None, visible
    if kind.startswith("bias"):
        shape = (1, n_k) if kind == "bias_of_keys" else (batch, 1, n_q, n_k)
        bias = (2 * torch.randn(shape, generator=gen, dtype=torch.float64)).to(dtype)
        if kind == "bias":
            bias = bias.masked_fill(chance(0.2, *shape), -torch.inf)
        return bias, None, bias.double(), (bias != -torch.inf).expand(full)
    shape = full if kind == "by_head" else (n_q, n_k) if kind == "by_query" else (batch, 1, n_q, n_k)
    mask = chance(0.0 if kind == "hidden" else 0.6, *shape)
    if kind == "hidden_rows":
        mask = mask & chance(0.7, batch, 1, n_q, 1)
    return mask, None, None, mask.expand(full)
