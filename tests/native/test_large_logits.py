"""Softmax kernels where scores are so large that their log-sum-exp has no digits left for the sum."""

import math

import pytest
import torch

from sparing import native
from sparing.methods.lsh.native import lsh
from sparing.methods.window.native import window
from sparing.native.attend import attend
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse

pytestmark = needs_kernels


def inputs(n_q, n_k, size):
    """All scores are near `size`, and the same numbers in float32 and float64."""
    gen = torch.Generator().manual_seed(n_k)
    q = torch.randint(-1, 2, (2, 2, n_q, 6), generator=gen).float()
    k = torch.randint(-1, 2, (2, 2, n_k, 6), generator=gen).float()
    q[..., 0], k[..., 0] = size, 1.0
    return q, k, torch.randn(2, 2, n_k, 5, generator=gen)


def by_attend(q, k, v):
    return attend(q, k, v, None, None, 1.0)


def by_window(q, k, v):
    n = q.shape[2]
    return window(q, k, v, None, None, n, n, False, 1.0)


def by_lsh(q, k, v):
    """Three rounds in which every query sees every key."""
    in_q, in_k = (torch.zeros(3, *x.shape[:3], dtype=torch.int32) for x in (q, k))
    out, lse, _ = lsh(q, k, v, in_q, in_k, None, None, k.shape[2], "bucket", False, 1.0)
    return out, lse - math.log(3)


def specification(q, k, v):
    """The log-sum-exp of what exceeds a constant: the gradient of torch's own is exp(score - lse), which is rounded."""
    scores = q @ k.mT
    top = scores.detach().amax(-1, keepdim=True)
    return scores.softmax(-1) @ v, (scores - top).logsumexp(-1) + top.squeeze(-1)


# Few keys stand in the lanes of `attend`, or else the queries do.
@every_instruction_set
@pytest.mark.parametrize("size", [1e4, 1e7, 2.0**100])
@pytest.mark.parametrize(
    ("kernel", "n_q", "n_k"), [(by_attend, 40, 37), (by_attend, 3, 70), (by_window, 70, 70), (by_lsh, 70, 70)]
)
def test_no_worse_than_plain_float32(isa, kernel, n_q, n_k, size):
    with native.instruction_set(isa):
        no_worse(kernel, specification, inputs(n_q, n_k, size), what=isa)
