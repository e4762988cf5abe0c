"""Multipole attention: keys of large weight are read, all others count by copies of few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing.call import Call, Past
from sparing.contract import Cost, Method, Shape, Supports, knob, method
from sparing.draws import Draws
from sparing.maths import dense
from sparing.maths.by_kernel import ByKernel
from sparing.maths.packing import place_of_rank, valid_first
from sparing.methods.multipole import native
from sparing.methods.multipole.copies import (
    GROUP,
    Copy,
    copy_keys,
    copy_values,
    estimate,
    missed_variance,
    round_weights,
)
from sparing.methods.multipole.past import MultipolePast

_SCORES = 2**22  # logits that are held at once
_MOST_VARIANCE = 4.0  # of a logit, that its weight is corrected for
#: Groups are left out that weigh less than this share of the keys that are read, divided by the number of groups.
_LIGHT = 2.0**-20


@dataclass(frozen=True, kw_only=True)
class Multipole(Method):
    """Softmax attention that reads the keys that matter, and copies of few bits of all others.

    out_i = softmax_j(l_ij) u_ij,  l_ij = s q_i.k_j,  u_ij = v_j    if key j is read,
                                   l_ij = s q_i.k'_j, u_ij = v'_j  otherwise

    k' is a copy of the keys in 4 bits. v' is a copy of the values, in 4 bits or, if causal, where it is kept beside a
    cache, in 2. Each channel of a block of keys has its own range. The copies give an estimate of every logit; a query
    reads the keys whose estimated share of its attention exceeds the tolerance. The error of an estimate has a known
    standard deviation: the weights of copies are corrected for it, and keys are read that may exceed the tolerance by
    it. Keys in no complete block are read: those of a query's own block if causal, else the last of all.

    For pretrained weights, without training. Related: quantised caches (KIVI, Liu et al. 2024), and methods that choose
    keys by a few of their channels (SparQ, Ribar et al. 2024) and drop the others; here the others keep their weight.
    `inspect()` notes, each [B, H, n_q], `error`: the predicted distance to exact attention, and `touched`: the number
    of keys that a query read. The gradient takes copies for the keys and values themselves.

    tolerance: share of a query's attention from which on a key is read, or twice that share if not causal, where a copy
        errs half as much; 0 reads all keys.
    sinks: number of first keys that every query reads.
    block: number of keys that share the ranges of their copies; a multiple of 16.

    >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    >>> sparing.attention(q, k, v, method="multipole(tolerance=0.02)", is_causal=True).shape
    torch.Size([1, 2, 300, 16])
    """

    name = "multipole"
    budget = "tolerance"
    moved = dict.fromkeys(("clusters", "keys", "window"), "attention to clusters of keys is called key_clusters")
    supports = Supports(
        causal=True, lse=True, position_based=True, decode=True, decode_16bit=True, native_16bit=True, adopt=True,
        training_free=True,
    )  # fmt: skip

    tolerance: float = knob(0.001, minimum=0.0)
    sinks: int = knob(4, minimum=0)
    block: int = knob(128, minimum=GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % GROUP:
            raise ValueError(f"multipole: block={self.block} must be a multiple of {GROUP}")

    def value_bits(self, causal: bool) -> int:
        """Return the bits of a value's copy: 2 where it is kept beside a cache."""
        return 2 if causal else 4

    def least_share(self, bits: int) -> float:
        """Return the share of a query's attention from which on a key is read, for values of so many bits.

        Logits and values of a copy err together by 0.4 standard deviations of the values at 2 bits, by 0.2 at 4.
        """
        return self.tolerance * bits / 2

    def extents(self, call: Call, n_q: int, n_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return, (B or 1, n_q) each, how many keys a query sees and the rank from which on it reads all of them."""
        ranks, count = call.mask.key_ranks(n_k, device)
        if not call.mask.causal:
            seen = count[:, None].expand(-1, n_q)
            return seen, seen // self.block * self.block
        position = torch.arange(n_q, device=device).clamp_max(n_k - 1)
        present = torch.ones_like(ranks) if call.mask.keep is None else call.mask.keep.long()
        seen = present.cumsum(-1)[:, position]
        return seen, (seen - 1).clamp_min(0) // self.block * self.block

    def copies(self, k: Tensor, v: Tensor, causal: bool) -> tuple[Copy, Copy]:
        """Return the copies of keys and values in complete blocks, valid ones first."""
        return copy_keys(k, self.block, self.sinks), copy_values(v, self.block, self.value_bits(causal))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        k, v = valid_first(call.mask.keep, k, v)
        seen, near = self.extents(call, q.shape[2], k.shape[2], q.device)
        with torch.no_grad():
            copies = self.copies(k, v, call.mask.causal)
        n_q, at_once = q.shape[2], max(_SCORES // max(q.shape[0] * q.shape[1] * k.shape[2], 1), 1)
        parts = [
            self.rows(
                q[:, :, i : i + at_once], k, v, copies, seen[:, i : i + at_once], near[:, i : i + at_once], call.scale
            )
            for i in range(0, max(n_q, 1), at_once)
        ]
        out, lse, error, read = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        call.note(lse=lse, error=error, touched=read)
        return out

    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, copies: tuple[Copy, Copy], seen: Tensor, near: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        """Return output, log-sum-exp, predicted error and number of keys read, of queries with these extents."""
        keys, values = copies
        n, held = k.shape[2], keys.codes.shape[2] * self.block  # keys, and those that have a copy
        key = torch.arange(n, device=k.device)
        visible = (key < seen.unsqueeze(-1))[:, None]  # (B, 1, n_q, n)
        sure = visible & ((key >= near.unsqueeze(-1)) | (key < self.sinks))[:, None]
        logits = q @ k.mT * scale
        with torch.no_grad():
            guess = estimate(q, keys, scale)
            noise = guess.sigma.square().clamp_max(_MOST_VARIANCE)
            sigma, variance = (x.repeat_interleave(self.block, -1) for x in (guess.sigma, noise))  # (B, H, n_q, held)
            far = (visible & ~sure)[..., :held]
            guessed = (guess.logits.flatten(-2) - variance / 2).masked_fill(~far, -torch.inf)
            known = logits.masked_fill(~sure, -torch.inf)
            total = torch.logaddexp(known.logsumexp(-1), guessed.logsumexp(-1)).unsqueeze(-1)
            bar = total + torch.tensor(self.least_share(values.bits), dtype=total.dtype).log()  # -inf reads everything
            read = sure.expand_as(logits).clone()
            read[..., :held] |= (guess.logits.flatten(-2) >= bar - sigma) & far
        # The rest counts by its copies; their gradient is that of the keys and values themselves.
        rest = logits[..., :held] + (guessed - logits[..., :held]).detach()
        rest = rest.masked_fill(read[..., :held] | ~far, -torch.inf)
        exact = logits.masked_fill(~read, -torch.inf)
        top = dense.finite_or_zero(torch.maximum(exact.amax(-1), _amax(rest)).detach()).unsqueeze(-1)
        weights, mass = (exact - top).exp(), (rest - top).exp()
        with torch.no_grad():
            group = GROUP * mass.unflatten(-1, (-1, GROUP)).amax(-1, keepdim=True)
            lightest = _LIGHT * weights.sum(-1).div(
                (near + self.block - 1).div(self.block, rounding_mode="floor").clamp_min(1)[:, None]
                * (self.block // GROUP)
            )
            heavy = (group > lightest[..., None, None]).expand(*group.shape[:-1], GROUP).flatten(-2)
        mass = mass * heavy
        middle = values.middle().repeat_interleave(self.block, 2)
        copied = values.numbers()
        fine = mass @ middle + round_weights(mass.detach()) @ (copied - middle)
        through = mass @ v[:, :, :held]
        sums = weights @ v + through + (fine - through).detach()
        whole = weights.sum(-1, keepdim=True) + mass.sum(-1, keepdim=True)
        out, lse = dense.divide_rows(sums, whole), (whole.log() + top).squeeze(-1)
        squares = mass.detach().square().unflatten(-1, (-1, self.block)).sum(-1)
        missed = (squares * missed_variance(values, noise)).sum(-1).sqrt()
        error = dense.divide_rows(missed.unsqueeze(-1), whole.detach()).squeeze(-1)
        return out, lse, error, read.sum(-1)

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.covers(k.shape[2]) and not call.noted:
            return method("exact").fast(q, k, v, call)
        return self.reference(q, k, v, call)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        if self.covers(k.shape[2]) and not call.noted:
            return method("exact").native(q, k, v, call)
        return ByKernel.apply(q, k, v, self, call)

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute `reference` by the kernel, without a gradient."""
        k, v = k[:, :: call.groups], v[:, :: call.groups]  # heads of a group are the same
        place = None if call.mask.keep is None else place_of_rank(call.mask.keep)
        first_k, first_v = valid_first(call.mask.keep, k, v)
        packed = native.Packed.of(*self.copies(first_k, first_v, call.mask.causal))
        if isinstance(call.past, MultipolePast):
            call.past.ready = packed
        seen, near = (
            x.expand(q.shape[0], -1).contiguous() for x in self.extents(call, q.shape[2], k.shape[2], q.device)
        )
        bits = self.value_bits(call.mask.causal)
        out, notes = native.multipole(
            q, k, v, (place, seen, near), packed, (self.block, bits, self.sinks, self.least_share(bits), call.scale)
        )
        call.note(lse=notes[0], error=notes[1], touched=notes[2].long())
        return out

    def covers(self, n_k: int) -> bool:
        return self.tolerance == 0 or n_k < self.block

    def past(self, q: Tensor, k: Tensor, v: Tensor, draws: Draws, scale: float) -> Past:
        return MultipolePast(self, q, k, v, scale)

    def full_budget(self, shape: Shape) -> Method:
        return replace(self, tolerance=0.0)

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        d, e, units = shape.head_dim, shape.value_dim, shape.batch * shape.heads
        pairs = shape.pairs / max(shape.queries, 1)
        # Keys beyond the query's own block: fitted to SmolLM2 at 4,000 tokens and tolerances of 0.0003 to 0.01.
        touched = min(self.sinks + self.block / 2 + 0.25 * max(self.tolerance, 1e-9) ** -0.75, pairs)
        if statistics is not None and "touched" in statistics:
            touched = float(statistics["touched"].double().mean())
        # All pairs in few bits, and the keys that are read once more in full.
        work = shape.queries * (pairs * (2 * d + 2 * e + 4) + touched * (2 * d + 2 * e + 1)) + 6 * shape.keys * (d + e)
        bits = 4 * d + self.value_bits(shape.causal) * e + 64 * (d + e) / self.block
        return Cost(units * work + shape.projection_flops, units * shape.keys * (bits / 8 + 4), touched)


def _amax(x: Tensor) -> Tensor:
    """Return the largest of the last axis; -inf where it is empty."""
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
