"""Causal calls: every row has its own sample counts, which do not depend on later tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Cost, Projection, Shape, method
from sparing.draws import Draws
from sparing.maths import dense
from sparing.methods.monte_carlo.estimator import Estimator, kept_keys
from sparing.methods.monte_carlo.levels import (
    block_pairs,
    level_of,
    levels,
    project_blocks,
    running_maximum,
    used_levels,
    versions,
    weigh,
    weigh_versions,
)
from sparing.methods.monte_carlo.row_blocks import RowBlock, cut_rows, row_facts, row_work, stack_facts, weigh_rows
from sparing.methods.monte_carlo.sampling import draw_features, feature_law, sampled_product
from sparing.methods.monte_carlo.weights import attend_finite


def reference(estimator: Estimator, q: Tensor, k: Tensor, v: Projection, call: Call) -> Tensor:
    """Compute a causal call by the specification, with r_ij in place of r_j."""
    (batch, _, n_q, _), n_k, d = q.shape, k.shape[2], v.x.shape[-1]
    heads = q.shape[1] // call.groups
    weights, lse = dense.softmax(dense.logits(q, k, call))  # A (B, H, n_q, n_k), exact
    visible = call.mask.visible(n_q, n_k, q.device)
    assert visible is not None
    seen = visible.expand(batch, q.shape[1], n_q, n_k).unflatten(1, (heads, -1)).any(2)
    received = weights.detach().unflatten(1, (heads, -1)).amax(2)
    if call.mask.influence is not None:
        received = received.masked_fill(~call.mask.influence[:, None, :, None], 0.0)
    received = running_maximum(received)  # M (B, H_kv, n_q, n_k)
    counts = estimator.count(received, seen.sum(-1), d)  # r
    values, w = v.project(heads), v.weight.unflatten(0, (heads, -1)).mT
    bias = 0.0 if v.bias is None else v.bias.view(heads, 1, -1)

    def grouped(t: Tensor) -> Tensor:
        return t.repeat_interleave(call.groups, dim=1)

    if estimator.samples:
        counts = torch.tensor(levels(d), device=q.device)[level_of(counts, d).long()]
        out, law = torch.zeros((), dtype=q.dtype, device=q.device), feature_law(w)
        lists = estimator.lists(kept_keys(call, batch, heads, n_k), call)
        for r in counts.unique().tolist():
            if r < d:
                same = torch.full((batch, heads, n_k), r, device=q.device)
                picks = draw_features(law, same, lists)
                values_r = sampled_product(v.x.unsqueeze(1), w, law, picks, same) + bias
            else:
                values_r = values
            out = out + weigh(weights * grouped(counts == r), grouped(values_r))
    else:
        exact = grouped(counts == d)
        center = v.x.new_zeros(1, 1, 1, d)
        if estimator.kind == "mean":
            center = seen.to(q.dtype) / seen.sum(-1, keepdim=True).clamp_min(1) @ v.x.unsqueeze(1)
        rough = (center @ w + bias).expand(batch, heads, -1, -1)  # (B, H_kv, n_q or 1, e)
        out = weigh(weights * exact, grouped(values)) + (weights * ~exact).sum(-1, keepdim=True) * grouped(rough)
    if call.statistics is not None:
        by_head = weights.unflatten(1, (heads, -1)), lse.unflatten(1, (heads, -1))
        facts = []
        for i in range(batch * heads):
            b, h = divmod(i, heads)
            blocks = cut_rows(by_head[0][b, h], by_head[1][b, h], seen[b, h], counts[b, h], d)
            facts.append(_facts(estimator, blocks, v, b, h, heads, call))
        _note_rows(estimator, facts, batch, kept_keys(call, batch, heads, n_k), call)
    return out


def fast(estimator: Estimator, q: Tensor, k: Tensor, v: Projection, call: Call) -> Tensor:
    """Compute `reference` by key-value head: samples are drawn when the weights of all its rows are known."""
    (batch, _, n_q, _), n_k, d = q.shape, k.shape[2], v.x.shape[-1]
    heads = q.shape[1] // call.groups
    if estimator.alpha == 0 and not call.noted:
        return attend_finite(q, k, v.project(heads), call)
    visible = call.mask.visible(n_q, n_k, q.device)
    assert visible is not None
    bias = call.mask.bias

    def of_head(t: Tensor, b: int, h: int) -> Tensor:  # (g or 1, n_q, n_k)
        t = t[b if len(t) > 1 else 0].expand(-1, n_q, n_k)
        return t if len(t) == 1 else t[h * call.groups : (h + 1) * call.groups]

    def budget(received: Tensor, tokens: Tensor) -> Tensor:
        return estimator.count(received, tokens, d)

    kept = kept_keys(call, batch, heads, n_k)
    lists = estimator.lists(kept, call)
    xs, ws = v.x.unbind(0), v.weight.unflatten(0, (heads, -1)).mT.unbind(0)
    bs = None if v.bias is None else v.bias.view(heads, -1).unbind(0)
    qs = q.unflatten(1, (heads, -1)).flatten(0, 1).unbind(0)
    ks = k[:, :: call.groups].flatten(0, 1).unbind(0)
    outs, facts = [], []
    for i, (mine, keys) in enumerate(zip(qs, ks, strict=True)):
        b, h = divmod(i, heads)
        blocks = weigh_rows(
            mine, keys, of_head(visible, b, h), None if bias is None else of_head(bias, b, h),
            None if call.mask.influence is None else call.mask.influence[b], call.scale, budget, d,
        )  # fmt: skip
        used = used_levels([block.codes for block in blocks], n_k, d)
        if estimator.samples:
            stream = Draws(lists.draws.seed, lists.draws.streams[h : h + 1])
            own = replace(lists, ranks=lists.ranks[b, h], draws=stream)
            table = versions(xs[b], ws[h], used, own)
            parts = [weigh_versions(a.weights, table[:, : a.codes.shape[-1]], a.codes) for a in blocks]
        else:
            parts = _whole_rows(estimator, blocks, xs[b], ws[h], used[-1])
        if bs is not None:
            parts = [part + a.weights.sum(-1, keepdim=True) * bs[h] for part, a in zip(parts, blocks, strict=True)]
        outs.append(torch.cat(parts, dim=1))
        if call.statistics is not None:
            facts.append(_facts(estimator, blocks, v, b, h, heads, call))
    if call.statistics is not None:
        _note_rows(estimator, facts, batch, kept, call)
    return torch.stack(outs).unflatten(0, (batch, heads)).flatten(1, 2)


def _whole_rows(estimator: Estimator, blocks: list[RowBlock], x: Tensor, w: Tensor, exact: Tensor) -> list[Tensor]:
    """Compute the baselines' rows without the bias. "mean" projects all tokens, whose mean is the projected mean."""
    if estimator.kind == "drop":
        values = project_blocks(x, w, exact)
        return [weigh(a.weights * (a.codes > 0), values[: a.codes.shape[-1]]) for a in blocks]
    values = x @ w
    parts = []
    for a in blocks:
        rest = (a.weights * (a.codes == 0)).sum(-1, keepdim=True)
        parts.append(weigh(a.weights * (a.codes > 0) + rest * a.share, values[: a.codes.shape[-1]]))
    return parts


def _facts(
    estimator: Estimator, blocks: list[RowBlock], v: Projection, b: int, h: int, heads: int, call: Call
) -> dict[str, Tensor]:
    """Return what `inspect()` notes of key-value head h of batch item b."""
    used = used_levels([block.codes for block in blocks], v.x.shape[1], v.x.shape[-1])
    work = row_work(blocks, used, v.x.shape[-1], estimator=estimator.kind)
    if not call.noted:
        return work
    size = v.weight.unflatten(0, (heads, -1))[h].norm()
    return work | row_facts(blocks, used, v.x[b], size, estimator=estimator.kind)


def _note_rows(estimator: Estimator, facts: list[dict[str, Tensor]], batch: int, kept: Tensor, call: Call) -> None:
    found = stack_facts(facts, batch)
    if "bound" in found:
        bound = found.pop("bound")
        if estimator.samples:
            found["bound"] = estimator.alpha * bound
        for name in ("lse", "certificate"):
            found[name] = found[name].flatten(1, 2)
    call.note(**found, tokens=kept.sum(-1))


def cost(estimator: Estimator, shape: Shape, statistics: Mapping[str, Tensor] | None) -> Cost:
    """Return the work of a causal call; without statistics one product and all features are assumed."""
    heads, d, e = shape.kv_heads or shape.heads, shape.in_features or 0, shape.value_dim
    units, tokens = shape.batch * shape.heads, shape.batch * heads * shape.keys
    if estimator.alpha == 0:
        exact = method("exact").cost(shape)
        return exact._replace(bytes=exact.bytes + 4.0 * tokens * e)
    products, terms = 1.0, float(d)
    if statistics is not None:
        if "products" not in statistics:
            raise ValueError("statistics: no 'products' for a causal shape; inspect() a call with is_causal=True")
        products, terms = (float(statistics[name].double().mean()) for name in ("products", "terms"))
    pairs = block_pairs(shape.queries, shape.keys)
    flops = units * pairs * (2.0 * shape.head_dim + 1 + 2 * e * products) + 2.0 * e * tokens * terms
    # Memory of one key-value head: its weights and level numbers, the versions of its values, its draws.
    room = pairs * (shape.heads / heads + 0.25) + shape.keys * e * len(levels(d)) + 32 * shape.keys * terms
    visible = shape.batch * shape.queries * shape.keys / 4
    return Cost(flops, 4.0 * (room + visible), shape.pairs / max(shape.queries, 1))
