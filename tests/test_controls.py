"""Negative controls: deliberately broken methods must fail the common checks. A check that lets one pass has no power."""

from dataclasses import dataclass, replace

import pytest
import torch

from sparing import Supports
from sparing.maths import dense
from sparing.maths.linalg import inverse_iteration
from sparing.maths.segments import segment_means
from sparing.methods.exact import Exact
from sparing.methods.nystrom import Nystrom
from sparing.methods.random_features import RandomFeatures

from checks import CHECKS
from methods import Row


class Broken(Exact):
    """Exact attention by its plain formula; subclasses break it in one place."""

    name = "_broken"

    def fast(self, q, k, v, call):
        return self.reference(q, k, v, call)


class FutureThroughLandmarks(Nystrom):
    name = "_future_through_landmarks"
    supports = Supports(causal=True, position_based=True)

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, replace(call, is_causal=False))

    fast = reference


class KeyShiftWithEpsilon(RandomFeatures):
    """The usual stabiliser: one constant for all keys, and an epsilon, so that the constant does not cancel."""

    name = "_key_shift_with_epsilon"

    def reference(self, q, k, v, call):
        phi_q, phi_k, log_k = self.log_features(q, k, call)
        phi_k = phi_k * (log_k - log_k.amax(-1, keepdim=True)).exp().unsqueeze(-1) + 1e-4
        weights = (phi_q @ phi_k.mT).tril() if call.is_causal else phi_q @ phi_k.mT
        return weights @ v / weights.sum(-1, keepdim=True)

    fast = reference


class MaskDropped(Broken):
    name = "_mask_dropped"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, replace(call, keep=None, mask=None))


class ZeroKeyInsteadOfZeroFeature(RandomFeatures):
    """A padded key set to zero still has the feature phi(0) > 0."""

    name = "_zero_key"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, replace(call, keep=None))

    fast = reference


class PaddingInLandmarks(Nystrom):
    name = "_padding_in_landmarks"

    def reference(self, q, k, v, call):
        means = segment_means(k, *replace(call, keep=None).key_ranks(k.shape[-2], k.device), None, self.landmarks)
        weights = (q @ means.mT * call.scale).softmax(-1)
        shared, _ = dense.softmax(dense.logits(means, k, call))
        return weights @ (shared @ v)

    fast = reference


class BatchWideNorm(Nystrom):
    """The iteration starts from one norm for all matrices of the batch, as in the public code."""

    name = "_batch_wide_norm"
    iterations: int = 2

    def reference(self, q, k, v, call):
        q_means = segment_means(q, *call.query_ranks(q.shape[-2], q.device), call.influence, self.landmarks)
        k_means = segment_means(k, *call.key_ranks(k.shape[-2], k.device), call.keep, self.landmarks)
        first, middle = ((x @ k_means.mT * call.scale).softmax(-1) for x in (q, q_means))
        last, _ = dense.softmax(dense.logits(q_means, k, call))
        start = middle.mT / middle.sum(-2).max()
        return first @ (inverse_iteration(middle, start, 2) @ (last @ v))

    fast = reference


class SlotKeyedDraws(RandomFeatures):
    """Random rows drawn per batch slot: a sentence changes with its place in the batch."""

    name = "_slot_keyed"

    def reference(self, q, k, v, call):
        outs = []
        for b in range(q.shape[0]):
            draws = replace(call.draws, seed=call.draws.seed + b)
            keep = None if call.keep is None else call.keep[b : b + 1]
            one = replace(call, draws=draws, keep=keep)
            outs.append(super().reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], one))
        return torch.cat(outs)

    fast = reference


class LastTokensDropped(Broken):
    """Works on whole blocks of eight keys and forgets the rest."""

    name = "_last_tokens_dropped"

    def reference(self, q, k, v, call):
        n = k.shape[-2] // 8 * 8 or k.shape[-2]
        keep = torch.arange(k.shape[-2]).expand(k.shape[0], -1) < n
        return super().reference(q, k, v, replace(call, keep=keep if call.keep is None else keep & call.keep))


class TemperatureTwice(Broken):
    name = "_temperature_twice"

    def reference(self, q, k, v, call):
        return super().reference(q * call.scale, k, v, call)


class PaddedCount(Broken):
    """A uniform share that divides by the padded length."""

    name = "_padded_count"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + v.sum(-2, keepdim=True) / k.shape[-2]


class GlobalGenerator(Broken):
    name = "_global_generator"
    supports = replace(Exact.supports, stochastic=True)

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + 1e-3 * torch.rand(())


class ChangesItsInput(Broken):
    name = "_changes_its_input"

    def reference(self, q, k, v, call):
        q.mul_(1.5)
        return super().reference(q, k, v, call)


class DetachedKeys(Broken):
    name = "_detached_keys"

    def reference(self, q, k, v, call):
        return super().reference(q, k.detach() + 0 * k, v, call)


class NanRows(Broken):
    name = "_nan_rows"

    def reference(self, q, k, v, call):
        return dense.logits(q, k, call).softmax(-1) @ v


class WrongLse(Broken):
    name = "_wrong_lse"

    def reference(self, q, k, v, call):
        out = super().reference(q, k, v, call)
        call.note(lse=dense.logits(q, k, call).amax(-1))
        return out


class MeanOfValues(Broken):
    name = "_mean_of_values"

    def reference(self, q, k, v, call):
        return super().reference(q * 0, k, v, call)


class OtherFastPath(Broken):
    name = "_other_fast_path"

    def fast(self, q, k, v, call):
        return self.reference(q, k, v, call) * (1 + 1e-6)


class LooksAtTheDiagonal(Broken):
    """Treats the token order as meaningful without saying so."""

    name = "_looks_at_the_diagonal"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + 0.01 * torch.arange(q.shape[-2])[:, None]


class HalfPrecision(Broken):
    name = "_half_precision"

    def reference(self, q, k, v, call):
        return super().reference(q.bfloat16().to(q.dtype), k, v, call)


@dataclass(frozen=True, kw_only=True)
class ClaimsTooLittle(Broken):
    """Refuses what it is able to do only in words: the claim and the call disagree."""

    name = "_claims_too_little"
    supports = Supports(causal=True, attn_mask="any", dropout=True, lse=False)


CONTROLS = [
    (FutureThroughLandmarks(landmarks=4), "causal leak"),
    (KeyShiftWithEpsilon(features=32), "causal leak"),
    (MaskDropped(), "padded equals packed"),
    (MaskDropped(), "mask formats"),
    (ZeroKeyInsteadOfZeroFeature(features=32), "padded equals packed"),
    (PaddingInLandmarks(landmarks=4), "padded equals packed"),
    (BatchWideNorm(landmarks=8), "batch invariance"),
    (SlotKeyedDraws(features=32), "batch invariance"),
    (LastTokensDropped(), "exact at full budget"),
    (LastTokensDropped(), "permutation"),
    (TemperatureTwice(), "exact at full budget"),
    (PaddedCount(), "padded equals packed"),
    (GlobalGenerator(), "seed"),
    (ChangesItsInput(), "strides"),
    (DetachedKeys(), "gradient"),
    (NanRows(), "finite"),
    (WrongLse(), "lse merge"),
    (MeanOfValues(), "beats the mean"),
    (MeanOfValues(), "exact at full budget"),
    (OtherFastPath(), "fast equals reference"),
    (LooksAtTheDiagonal(), "permutation"),
    (HalfPrecision(), "exact at full budget"),
    (ClaimsTooLittle(), "capabilities"),
]


@pytest.mark.parametrize(("method", "check"), CONTROLS, ids=lambda x: getattr(x, "name", x))
def test_a_broken_method_fails_the_check(method, check):
    row = Row(method, beats_mean=True)
    assert CHECKS[check].applies(row)
    with pytest.raises(AssertionError, match=method.name):
        CHECKS[check](row, "auto")


@pytest.mark.parametrize("check", sorted({check for _, check in CONTROLS}))
def test_the_unbroken_method_passes_the_check(check):
    row = Row(Broken(), beats_mean=True)
    if CHECKS[check].applies(row):
        CHECKS[check](row, "auto")
