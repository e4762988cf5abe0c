"""Oracles on weights other than softmax: those of a kernel that a model was trained with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Method, Supports


def weights_of(kernel: Method, q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Return the weights (B, H, n_q, n_k) that a method gives to keys, in float64, from one-hot values."""
    rows = torch.eye(k.shape[-2], dtype=torch.float64, device=k.device).expand(*k.shape[:3], -1)
    return kernel.reference(q.double(), k.double(), rows, replace(call, statistics=None))


@dataclass(frozen=True, kw_only=True)
class OracleOf(Method):
    """An oracle that takes its weights from a kernel, as in Table 2 of Gupta and Berant (2021).

    softmax(log kappa) is kappa / sum kappa, so the oracle gets the logarithms of the weights as its scores. It always
    runs its `reference`, also where a shortcut exists. It is for measurements and cannot be named in spec strings.

    kernel: the method whose weights are used; its rows sum to one.
    choice: the oracle, `top_keys` or `value_aware`.
    """

    name = "_oracle_of"
    target = "kernel"
    oracle = True
    supports = Supports(causal=True, attn_mask="boolean", gradient=False)

    kernel: Method
    choice: Method

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        weights = weights_of(self.kernel, q, k, call)
        # Keys of weight zero may be used; only hidden keys may not.
        scores = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        none_q, none_k = (x[..., :1].double() * 0 for x in (q, k))
        return self.choice.reference(none_q, none_k, v.double(), call.with_mask(pattern=scores)).to(v.dtype)

    def exact_target(self) -> Method:
        return self.kernel
