"""Assertions about random estimates, each with a stated false-alarm rate.

Z is the two-sided normal limit of 100 simultaneous assertions at a family-wise false-alarm rate of 1e-6. The sampling
unit is one independent draw: the first axis of `errors`.
"""

from __future__ import annotations

import torch
from torch import Tensor

Z = 5.73


def _largest_z(samples: Tensor, wanted: Tensor) -> float:
    """The largest |mean - wanted| in standard errors; samples (draws, ...)."""
    error = samples.std(0) / samples.shape[0] ** 0.5
    # A quantity that never varies must be right up to rounding.
    floor = 1e-12 * samples.abs().amax(0).clamp_min(1e-300)
    return float(((samples.mean(0) - wanted).abs() / error.maximum(floor)).max())


def assert_unbiased(errors: Tensor) -> None:
    """H0: the mean error is zero. Statistic: z of the error along 16 fixed random directions. Threshold: Z."""
    flat = errors.flatten(1)
    gen = torch.Generator().manual_seed(99)
    directions = torch.randn(flat.shape[1], 16, generator=gen, dtype=flat.dtype)
    z = _largest_z(flat @ directions, torch.zeros(16, dtype=flat.dtype))
    assert z < Z, f"biased: |z| = {z:.1f} over {len(errors)} draws"


def assert_second_moment(errors: Tensor, wanted: Tensor) -> None:
    """H0: E|error|^2 is `wanted`; errors (draws, ..., e). Statistic: z from the variance of |error|^2. Threshold: Z."""
    z = _largest_z(errors.square().sum(-1), wanted)
    assert z < Z, f"wrong second moment: |z| = {z:.1f} over {len(errors)} draws"
