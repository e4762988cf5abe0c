"""Methods that are broken in one place each: the negative controls of the common checks."""

from dataclasses import dataclass, replace

import torch

from sparing import Supports
from sparing.contract import Cost, knob
from sparing.maths import dense
from sparing.maths.linalg import inverse_iteration
from sparing.maths.segments import segment_means
from sparing.methods.exact import Exact
from sparing.methods.nystrom.method import Nystrom
from sparing.methods.random_features import RandomFeatures


# Exact attention by its plain formula; subclasses break it in one place.
class Broken(Exact):
    name = "_broken"
    __doc__ = Exact.__doc__

    def fast(self, q, k, v, call):
        return self.reference(q, k, v, call)


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


class BatchWideNorm(Nystrom):
    """The iteration starts from one norm for all matrices of the batch, as in the public code."""

    name = "_batch_wide_norm"
    iterations: int = 2

    def reference(self, q, k, v, call):
        q_means = segment_means(q, *call.mask.query_ranks(q.shape[-2], q.device), call.mask.influence, self.landmarks)
        k_means = segment_means(k, *call.mask.key_ranks(k.shape[-2], k.device), call.mask.keep, self.landmarks)
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
            keep = None if call.mask.keep is None else call.mask.keep[b : b + 1]
            one = replace(call.with_mask(keep=keep), draws=draws)
            outs.append(super().reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], one))
        return torch.cat(outs)

    fast = reference


class LastTokensDropped(Broken):
    """Works on whole blocks of eight keys and forgets the rest."""

    name = "_last_tokens_dropped"

    def reference(self, q, k, v, call):
        n = k.shape[-2] // 8 * 8 or k.shape[-2]
        keep = torch.arange(k.shape[-2]).expand(k.shape[0], -1) < n
        return super().reference(
            q, k, v, call.with_mask(keep=keep if call.mask.keep is None else keep & call.mask.keep)
        )


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


class HidesBeforeScaling(Broken):
    """-inf times a scale of zero is NaN."""

    name = "_hides_before_scaling"

    def fast(self, q, k, v, call):
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        scores = q @ k.mT
        scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        return (scores * call.scale).softmax(-1) @ v


class BudgetIgnored(Nystrom):
    name = "_budget_ignored"

    def reference(self, q, k, v, call):
        return Nystrom(landmarks=4).reference(q, k, v, call)

    fast = reference


class KeyedByQueryHead(RandomFeatures):
    """Numbers the streams itself: heads of a group draw differently, and a group alone draws what the first one does."""

    name = "_keyed_by_query_head"

    def reference(self, q, k, v, call):
        draws = replace(call.draws, streams=torch.arange(q.shape[1]))
        return super().reference(q, k, v, replace(call, draws=draws))

    fast = reference


class GradientToPaddedQueries(Broken):
    """The numbers are right, but every query gets a share of the gradient."""

    name = "_gradient_to_padded_queries"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + (q - q.detach()).mean((-2, -1), keepdim=True)


class GradientOfEmptyRows(Broken):
    """Rows that see nothing are zeros, but not constants."""

    name = "_gradient_of_empty_rows"

    def reference(self, q, k, v, call):
        out = super().reference(q, k, v, call)
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        if visible is None:
            return out
        return out + (q - q.detach()).mean(-1, keepdim=True) * ~visible.any(-1, keepdim=True)


class FirstDerivativeOnly(torch.autograd.Function):
    """x, marked by torch's own decorator, which refuses second derivatives in `backward()` alone."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad


class SilentSecondDerivative(Broken):
    name = "_silent_second_derivative"

    def reference(self, q, k, v, call):
        return FirstDerivativeOnly.apply(super().reference(q, k, v, call))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + 0 * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[0]


class SavedTensorsReadTwice(Broken):
    """Harmless by itself, but a checkpoint hands out saved tensors once."""

    name = "_saved_tensors_read_twice"

    def reference(self, q, k, v, call):
        return ReadsTwice.apply(super().reference(q, k, v, call)) / 2


class LosesTangents(Broken):
    name = "_loses_tangents"

    def reference(self, q, k, v, call):
        return torch.autograd.forward_ad.unpack_dual(super().reference(q, k, v, call)).primal


class FutureGradient(Broken):
    """A straight-through term: no output depends on later values, but their gradient does not vanish."""

    name = "_future_gradient"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + (v - v.detach()).mean(-2, keepdim=True)


class ReachesNothing(Broken):
    """Says that no query reaches any key, so that a NaN key spoils nothing."""

    name = "_reaches_nothing"

    def reach(self, n_q, n_k, device, call):
        return torch.zeros(n_q, n_k, dtype=torch.bool)


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


class SixteenBitsInside(Broken):
    name = "_sixteen_bits_inside"

    def reference(self, q, k, v, call):
        return super().reference(q.bfloat16().float() if q.dtype == torch.float32 else q, k, v, call)


class FloatInside(Broken):
    name = "_float_inside"

    def reference(self, q, k, v, call):
        return super().reference(q.float(), k.float(), v.float(), call).to(v.dtype)


class FlatCost(Broken):
    name = "_flat_cost"
    __doc__ = Exact.__doc__

    def cost(self, shape, statistics=None):
        return Cost(100.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class UndocumentedField(Broken):
    name = "_undocumented_field"
    __doc__ = Exact.__doc__
    extra: int = knob(1)


class ThreadCount(Broken):
    name = "_thread_count"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) * (1 + 1e-3 * torch.get_num_threads())


class SmallSeeds(RandomFeatures):
    name = "_small_seeds"

    def reference(self, q, k, v, call):
        draws = replace(call.draws, seed=call.draws.seed & 0xFFFFFFFF)
        return super().reference(q, k, v, replace(call, draws=draws))

    fast = reference


class BatchWideClamp(Broken):
    """Large inputs are scaled down, by the mean size of the whole batch."""

    name = "_batch_wide_clamp"

    def reference(self, q, k, v, call):
        return super().reference(q / (q.abs().mean() / 20).clamp_min(1), k, v, call)


@dataclass(frozen=True, kw_only=True)
class ClaimsTooLittle(Broken):
    """Refuses what it is able to do only in words: the claim and the call disagree."""

    name = "_claims_too_little"
    supports = Supports(causal=True, attn_mask="any", dropout=True, lse=False)
