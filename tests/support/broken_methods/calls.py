"""Methods that are wrong about batches, head groups, seeds, threads, claims or costs."""

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
from tests.support.broken_methods import Broken


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


class BatchWideClamp(Broken):
    """Large inputs are scaled down, by the mean size of the whole batch."""

    name = "_batch_wide_clamp"

    def reference(self, q, k, v, call):
        return super().reference(q / (q.abs().mean() / 20).clamp_min(1), k, v, call)


class KeyedByQueryHead(RandomFeatures):
    """Numbers the streams itself: heads of a group draw differently, and a group alone draws what the first one does."""

    name = "_keyed_by_query_head"

    def reference(self, q, k, v, call):
        draws = replace(call.draws, streams=torch.arange(q.shape[1]))
        return super().reference(q, k, v, replace(call, draws=draws))

    fast = reference


class ChangesItsInput(Broken):
    name = "_changes_its_input"

    def reference(self, q, k, v, call):
        q.mul_(1.5)
        return super().reference(q, k, v, call)


class GlobalGenerator(Broken):
    name = "_global_generator"
    supports = replace(Exact.supports, stochastic=True)

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + 1e-3 * torch.rand(())


class SmallSeeds(RandomFeatures):
    name = "_small_seeds"

    def reference(self, q, k, v, call):
        draws = replace(call.draws, seed=call.draws.seed & 0xFFFFFFFF)
        return super().reference(q, k, v, replace(call, draws=draws))

    fast = reference


class ThreadCount(Broken):
    name = "_thread_count"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) * (1 + 1e-3 * torch.get_num_threads())


@dataclass(frozen=True, kw_only=True)
class ClaimsTooLittle(Broken):
    """Refuses what it is able to do only in words: the claim and the call disagree."""

    name = "_claims_too_little"
    supports = Supports(causal=True, attn_mask="any", dropout=True, lse=False)


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
