"""Methods that are wrong about masks, padding, the order of time or NaN."""

import torch

from sparing import Supports
from sparing.maths import dense
from sparing.maths.segments import segment_means
from sparing.methods.nystrom.method import Nystrom
from sparing.methods.random_features import RandomFeatures
from tests.support.broken_methods import Broken


class FutureThroughLandmarks(Nystrom):
    name = "_future_through_landmarks"
    supports = Supports(causal=True, position_based=True)

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call.with_mask(causal=False))

    fast = reference


class KeyShiftWithEpsilon(RandomFeatures):
    """The usual stabiliser: one constant for all keys, and an epsilon, so that the constant does not cancel."""

    name = "_key_shift_with_epsilon"

    def reference(self, q, k, v, call):
        phi_q, phi_k, log_k = self.log_features(q, k, call)
        phi_k = phi_k * (log_k - log_k.amax(-1, keepdim=True)).exp().unsqueeze(-1) + 1e-4
        weights = (phi_q @ phi_k.mT).tril() if call.mask.causal else phi_q @ phi_k.mT
        return weights @ v / weights.sum(-1, keepdim=True)

    fast = reference


class FutureGradient(Broken):
    """A straight-through term: no output depends on later values, but their gradient does not vanish."""

    name = "_future_gradient"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + (v - v.detach()).mean(-2, keepdim=True)


class SequencesSeeEachOther(Broken):
    """Its kernel takes packs whole, and ignores where sequences begin."""

    name = "_sequences_see_each_other"

    def native(self, q, k, v, call):
        return self.reference(q, k, v, call.with_mask(offsets=None))


class MaskDropped(Broken):
    name = "_mask_dropped"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call.with_mask(keep=None, pattern=None))


class ZeroKeyInsteadOfZeroFeature(RandomFeatures):
    """A padded key set to zero still has the feature phi(0) > 0."""

    name = "_zero_key"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call.with_mask(keep=None))

    fast = reference


class PaddingInLandmarks(Nystrom):
    name = "_padding_in_landmarks"

    def reference(self, q, k, v, call):
        means = segment_means(k, *call.with_mask(keep=None).mask.key_ranks(k.shape[-2], k.device), None, self.landmarks)
        weights = (q @ means.mT * call.scale).softmax(-1)
        shared, _ = dense.softmax(dense.logits(means, k, call))
        return weights @ (shared @ v)

    fast = reference


class PaddedCount(Broken):
    """A uniform share that divides by the padded length."""

    name = "_padded_count"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + v.sum(-2, keepdim=True) / k.shape[-2]


class PaddedQueriesInMaximum(Broken):
    """A constant that should cancel is taken over all queries, padded ones too, and does not cancel."""

    name = "_padded_queries_in_maximum"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + 1e-3 * q.amax((-2, -1), keepdim=True)


class QueryMaskIgnored(Nystrom):
    name = "_query_mask_ignored"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call.with_mask(influence=None))

    fast = reference


class ReachesNothing(Broken):
    """Says that no query reaches any key, so that a NaN key spoils nothing."""

    name = "_reaches_nothing"

    def reach(self, n_q, n_k, device, call):
        return torch.zeros(n_q, n_k, dtype=torch.bool)


class WrongLse(Broken):
    name = "_wrong_lse"

    def reference(self, q, k, v, call):
        out = super().reference(q, k, v, call)
        call.note(lse=dense.logits(q, k, call).amax(-1))
        return out
