"""Spectral errors of approximate attention on the inputs of a model's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.functional import attention
from sparing_lab.studies.rows import Row

#: In the paper's figure Skyformer is the lifted Nystrom method on the softmax kernel, with normalised rows. Landmarks
#: are drawn as in its Definition 1, and M is not damped.
SPECS = {
    "Skyformer": "skyformer(landmarks={}, kernel=softmax, gamma=0, sampling=iid)",
    "Nystromformer": "nystrom(landmarks={})",
    "Performer": "random_features(features={})",
}
#: Skyformer as it is meant: with its own kernel, compared with the dense form of that kernel.
OWN = "skyformer(landmarks={})"


class LayerInputs(NamedTuple):
    """The inputs of one layer on one text, and the outputs of dense attention."""

    q: Tensor  # [1, H, n, d]
    k: Tensor
    v: Tensor
    exact: Tensor
    own: Tensor  # Skyformer's target: the dense form of its kernel


def spectral_errors(name: str, budget: int, inputs: Sequence[LayerInputs], seed: int) -> Row:
    """Measure the spectral norm of the error of a head's output, and this norm over that of the target.

    Means over layers and heads. name: a key of `SPECS`; "own": Skyformer's against the dense form of its own kernel;
    "values": the mean of all values in place of attention; with it, what the queries and keys are like.
    """
    errors, relative = [], []
    for q, k, v, exact, own in inputs:
        target = own if name == "own" else exact
        if name == "values":
            found = v.mean(-2, keepdim=True).expand_as(v)
        else:
            spec = OWN if name == "own" else SPECS[name]
            found = attention(q, k, v, method=spec.format(budget), seed=seed)
        error, size = (torch.linalg.matrix_norm(x.double(), 2) for x in (found - target, target))
        errors += error.flatten().tolist()
        relative += (error / size).flatten().tolist()
    facts = {} if name != "values" else _facts(inputs)
    return {"error": fmean(errors), "relative": fmean(relative), "heads": len(errors), **facts}


def _facts(inputs: Sequence[LayerInputs]) -> Row:
    """Return medians over heads: how near queries and keys are, how unequal keys, how peaked rows of weights.

    kernel: the Gaussian kernel of a typical pair. spread: the logarithm of the largest over the least factor
    exp(s |k|^2 / 2), which turns it into softmax's. keys: the exponential of the entropy of a typical row of weights.
    """
    kernel, spread, keys = [], [], []
    for q, k, *_ in inputs:
        q, k = q[..., :: max(q.shape[-2] // 256, 1), :].double(), k.double()
        scale = q.shape[-1] ** -0.5
        kernel.append((torch.cdist(q, k).square() * (-scale / 2)).exp().flatten(-2).median(-1).values)
        factor = scale / 2 * k.square().sum(-1)
        spread.append(factor.amax(-1) - factor.amin(-1))
        logs = (q @ k.mT * scale).log_softmax(-1)
        keys.append(-(logs.exp() * logs).sum(-1).median(-1).values)
    medians = (float(torch.cat([x.flatten() for x in each]).median()) for each in (kernel, spread, keys))
    typical, factors, entropy = medians
    return {"kernel": typical, "spread": factors, "keys": math.exp(entropy)}


def layer_inputs(q: Tensor, k: Tensor, v: Tensor) -> LayerInputs:
    """Return queries, keys and values with both targets."""
    return LayerInputs(q, k, v, *(attention(q, k, v, method=name) for name in ("exact", "kernelized")))
