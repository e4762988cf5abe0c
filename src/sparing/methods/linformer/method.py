"""Linformer: keys and values projected along the sequence to a fixed number of slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparing.call import Call
from sparing.contract import Cost, Method, Shape, Supports, knob, method
from sparing.draws import checksum
from sparing.maths import dense
from sparing.maths.packing import place_of_rank
from sparing.maths.segments import segment_means
from sparing.methods.linformer.native import sign_projection
from sparing.native import segments as native_segments
from sparing.native.attend import attend

_SIGNS = "linformer.signs"  # purpose of the random signs
_SIGNS_TAG = checksum(_SIGNS)


class LengthProjection(nn.Module):
    """Linformer's learned E: one matrix of `rank` x `max_length` per head, shared by keys and values."""

    def __init__(self, heads: int, rank: int, max_length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, rank, max_length).normal_(std=0.02))


@dataclass(frozen=True, kw_only=True)
class Linformer(Method):
    """Attention to `rank` mixtures of the tokens (Wang et al., "Linformer", 2020).

    out = softmax(s Q (E K)^T) (E V),  E of shape rank x n_k

    E is learned, one per head, and lives in a module: see `sparing.nn.MultiheadAttention`. Column j of E belongs to
    the j-th valid token, so shorter sequences use the first columns. Every slot mixes all positions, so there is no
    causal form.

    rank: number of slots, the rows of E.
    projection: E without a learned state. "random" takes signs / sqrt(rank), a Johnson-Lindenstrauss map: the initial
        value for training, not an approximation of softmax attention. "pooled" takes the means of `rank` runs of
        consecutive tokens and adds the logarithm of a run's length to its logit. It learns nothing; it is exact for
        rank >= n_k and where the tokens of a run are equal, and useless where neighbours have nothing in common.

    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="linformer(rank=32, projection=pooled)").shape
    torch.Size([1, 2, 128, 16])
    """

    name = "linformer"
    target = "linformer"
    budget = "rank"
    supports = Supports(stochastic=True, position_based=True)

    rank: int = knob(256, minimum=1)
    projection: str = knob("random", choices=("random", "pooled"))

    def claims(self) -> Supports:
        pooled = self.projection == "pooled"
        return replace(type(self).supports, stochastic=not pooled, training_free=pooled)

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        if call.state is None:
            return
        if not isinstance(call.state, LengthProjection):
            raise TypeError(f"linformer: state must be what learned() returns, got {type(call.state).__name__}")
        heads, rank, max_length = call.state.weight.shape
        if (heads, rank) != (q.shape[1], self.rank):
            raise ValueError(
                f"linformer: state has {heads} heads and rank {rank}, but the call has {q.shape[1]} heads "
                f"and rank {self.rank}"
            )
        longest = int(call.mask.key_ranks(k.shape[-2], k.device)[1].amax()) if k.shape[0] else 0
        if longest > max_length:
            raise ValueError(
                f"linformer: {longest} keys exceed max_length={max_length} of the learned projection; shorten the "
                "input, or build the module with a larger max_length"
            )

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.projection == "pooled" and call.state is None:
            return self._pooled(q, k, v, call)
        slots_k, slots_v = self._slots(k, v, call)
        return (q @ slots_k.mT * call.scale).softmax(-1) @ slots_v

    def _slots(self, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return K' = E K (B, H, r, d) and V' = E V."""
        if call.mask.keep is not None:  # move the valid tokens to the front, in their order
            order = place_of_rank(call.mask.keep)[:, None, :, None]
            k, v = (x.take_along_dim(order, dim=2) for x in (k, v))
        rows = self._rows(k.shape[-2], call).to(k.dtype)  # E (H, r, n)
        n = rows.shape[-1]  # a learned E may be shorter than the padded sequence
        return rows @ k[..., :n, :], rows @ v[..., :n, :]

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if call.state is not None:
            slots_k, slots_v = self._slots(k, v, call)
        elif self.projection == "random":
            slots_k, slots_v = (sign_projection(x, call.mask.keep, call.draws, _SIGNS_TAG, self.rank) for x in (k, v))
        else:
            slots_k, slots_v = (native_segments.segment_means(x, call.mask.keep, self.rank) for x in (k, v))
            bias = self._lengths(k, call).to(q.dtype).log().expand(k.shape[0], -1)
            return attend(q, slots_k, slots_v, None, bias, call.scale)[0]
        return attend(q, slots_k, slots_v, None, None, call.scale)[0]

    def _rows(self, n: int, call: Call) -> Tensor:
        """Return the first n columns of E, (H, rank, n)."""
        if call.state is not None:
            weight: Tensor = call.state.weight  # type: ignore[assignment]
            return weight[..., :n]
        bits = call.draws.bits(_SIGNS, n, -(-self.rank // 32))  # 32 signs per word; column j does not depend on n
        signs = (bits.unsqueeze(-1) >> torch.arange(32, device=bits.device)) & 1
        return (signs.flatten(-2)[..., : self.rank].mT.double() * 2 - 1) / self.rank**0.5

    def _pooled(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        ranks, count = call.mask.key_ranks(k.shape[-2], k.device)
        slots_k, slots_v = (segment_means(x, ranks, count, call.mask.keep, self.rank) for x in (k, v))
        lengths = self._lengths(k, call)[:, None, None, :].to(q.dtype)
        weights, _ = dense.softmax(q @ slots_k.mT * call.scale + lengths.log())  # an empty run has a logit of -inf
        return weights @ slots_v

    def _lengths(self, k: Tensor, call: Call) -> Tensor:
        """Return the number of valid tokens of each run, (B or 1, r)."""
        _, count = call.mask.key_ranks(k.shape[-2], k.device)
        ends = torch.arange(self.rank + 1, device=k.device) * count[:, None] // self.rank  # (B or 1, r + 1)
        return ends.diff(dim=-1)

    def exact_target(self) -> Method | None:
        return method("exact") if self.projection == "pooled" else None

    def full_budget(self, shape: Shape) -> Method | None:
        return replace(self, rank=max(shape.keys, 1)) if self.projection == "pooled" else None

    def learned(self, heads: int, head_dim: int, value_dim: int, max_length: int | None) -> nn.Module | None:
        if self.projection == "pooled":
            return None
        if max_length is None:
            raise ValueError(
                "linformer: the learned projection has one column per position; pass max_length, the longest sequence "
                "it will see, or use linformer(projection='pooled'), which learns nothing"
            )
        return LengthProjection(heads, self.rank, max_length)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        units, r = shape.batch * shape.heads, self.rank
        d, e = shape.head_dim, shape.value_dim
        pooled = self.projection == "pooled"
        project = shape.keys * (d + e) * (1 if pooled else 2 * r)
        attend = shape.queries * r * (2 * d + 1 + 2 * e)
        matrix = 0 if pooled else shape.heads * r * shape.keys
        return Cost(
            units * float(project + attend) + shape.projection_flops,
            4.0 * (units * r * (shape.queries + d + e) + matrix),
            r,
        )
