"""Methods that are wrong about results: targets, budgets, precision, range."""

import torch

from sparing.maths import dense
from sparing.methods.nystrom.method import Nystrom
from tests.support.broken_methods import Broken


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


class MeanOfValues(Broken):
    name = "_mean_of_values"

    def reference(self, q, k, v, call):
        return super().reference(q * 0, k, v, call)


class BudgetIgnored(Nystrom):
    name = "_budget_ignored"

    def reference(self, q, k, v, call):
        return Nystrom(landmarks=4).reference(q, k, v, call)

    fast = reference


class LooksAtTheDiagonal(Broken):
    """Treats the token order as meaningful without saying so."""

    name = "_looks_at_the_diagonal"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + 0.01 * torch.arange(q.shape[-2])[:, None]


class NanRows(Broken):
    name = "_nan_rows"

    def reference(self, q, k, v, call):
        return dense.logits(q, k, call).softmax(-1) @ v


class HidesBeforeScaling(Broken):
    """-inf times a scale of zero is NaN."""

    name = "_hides_before_scaling"

    def fast(self, q, k, v, call):
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        scores = q @ k.mT
        scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        return (scores * call.scale).softmax(-1) @ v


class HalfPrecision(Broken):
    name = "_half_precision"

    def reference(self, q, k, v, call):
        return super().reference(q.bfloat16().to(q.dtype), k, v, call)


class SixteenBitsInside(Broken):
    name = "_sixteen_bits_inside"

    def reference(self, q, k, v, call):
        return super().reference(q.bfloat16().float() if q.dtype == torch.float32 else q, k, v, call)


class FloatInside(Broken):
    name = "_float_inside"

    def reference(self, q, k, v, call):
        return super().reference(q.float(), k.float(), v.float(), call).to(v.dtype)


class OtherFastPath(Broken):
    name = "_other_fast_path"

    def fast(self, q, k, v, call):
        return self.reference(q, k, v, call) * (1 + 1e-6)
