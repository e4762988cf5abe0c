"""Count what the layers of an approximated model have done: calls, sampling rates, work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.contract import Method, Projection, Shape
from sparing.contract import method as _method

_PENDING = 256  # steps whose counts are read together
_counting = threading.Lock()  # threads may share a model


class _Step(NamedTuple):
    """A step that a tally has not counted yet."""

    method: Method
    queries: torch.Size
    keys: int
    width: int
    valid: int | None  #: keys of all items together that are not padding; None: all
    facts: Mapping[str, Tensor] | None  #: None: all keys were read


@dataclass
class Tally:
    """Sums over the calls of one layer. FLOPs are counted on valid tokens, as if padding had been removed."""

    calls: int = 0  #: calls that ran the method
    steps: int = 0  #: calls that ran the method on tokens which continue a cache
    exact_calls: int = 0  #: calls that ran the model's own exact attention
    reasons: Counter[str] = field(default_factory=Counter)  #: exact calls by why decoding stayed exact
    covered: int = 0  #: calls that were exact because the method's budget covers every key
    queries: int = 0  #: queries of all heads, in calls and steps
    touched: float = 0.0  #: keys, summaries or features that the queries read
    shown: float = 0.0  #: keys that the queries could have read
    tokens: int = 0  #: valid keys
    positions: int = 0  #: valid keys and padding
    rate: float = 0.0  #: shares of the features that were sampled, summed over valid keys (mean over heads)
    global_tokens: int = 0  #: part of `tokens`: of a value layer that only global tokens read (Longformer)
    global_rate: float = 0.0  #: part of `rate`, likewise
    flops: float = 0.0
    exact_flops: float = 0.0
    pending: list[_Step] = field(default_factory=list, repr=False)  #: steps that are not counted yet

    def add(
        self, method: Method, query: Tensor, key: Tensor, value: Tensor | Projection, lengths: list[int],
        is_causal: bool, facts: Mapping[str, Tensor], *, is_call: bool = True,
    ) -> None:  # fmt: skip
        """Count one call. lengths: the valid keys of each item. facts: the statistics of the method.

        is_call: False for a sequence of a pack, which is a part of a call.
        """
        batch, heads, n_q, head_dim = query.shape
        kv_heads, n_k = key.shape[1], key.shape[2]
        width = value.weight.shape[0] // kv_heads if isinstance(value, Projection) else value.shape[-1]
        features = value.x.shape[-1] if isinstance(value, Projection) else None
        self.calls += is_call
        self.covered += is_call and method.covers(n_k)
        self.positions += batch * n_k
        for item, length in enumerate(lengths):
            shape = Shape(
                heads=heads, kv_heads=kv_heads, queries=length if n_q == n_k else n_q, keys=length, head_dim=head_dim,
                value_dim=width, causal=is_causal, in_features=features,
            )  # fmt: skip
            own = _valid_part({name: fact[item] for name, fact in facts.items()}, length, features)
            self.tokens += length
            self.rate += length * (float(own["padded_rate"]) if own else 1.0)
            self.exact_flops += _method("exact").cost(shape).flops
            cost = (_method("exact") if method.covers(n_k) else method).cost(shape, own)
            self.flops += cost.flops
            rows, most = heads * shape.queries, shape.pairs / max(shape.queries, 1)
            read = facts["touched"][item].double().mean() if "touched" in facts else min(cost.keys or most, most)
            self.queries += rows
            self.shown += heads * shape.pairs
            self.touched += rows * float(read)

    def add_step(
        self,
        method: Method,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor | None,
        facts: Mapping[str, Tensor] | None,
    ) -> None:
        """Count a call that continued a cache, without the work of extending the index.

        facts: the statistics of the index; None if the call was exact because the budget covers every key.
        """
        valid = None if keep is None else int(keep.sum())
        step = _Step(method, query.shape, key.shape[2], value.shape[3], valid, facts)
        with _counting:
            self.steps += facts is not None
            self.covered += facts is None
            self.pending.append(step)
        if len(self.pending) >= _PENDING:
            self.count_pending()

    def count_pending(self) -> Tally:
        """Count the pending steps, which are kept so that generation does not wait for it, and return the tally."""
        with _counting:
            for method, (batch, heads, n_q, head_dim), n_k, width, valid, facts in self.pending:
                keys = batch * n_k if valid is None else valid
                shown, each = float(heads * (n_q * keys - batch * n_q * (n_q - 1) // 2)), 2.0 * (head_dim + width) + 1.0
                touched = shown if facts is None else float(facts["touched"].sum())
                self.queries += batch * heads * n_q
                self.shown += shown
                self.touched += touched
                self.exact_flops += each * shown
                self.flops += method.step_flops(shown, touched, head_dim, width)
            self.pending = []
        return self

    def add_values(
        self, counts: Tensor, valid: Tensor, features: int, width: int, other_flops: float, *, for_global: bool
    ) -> None:
        """Count a call whose values were sampled; `other_flops` is the work of everything else.

        counts: (B, H, n) samples of each token; valid: (B, n); width: entries of a value; for_global: only global
        tokens read them.
        """
        self.positions += valid.numel()
        tokens = int(valid.sum())
        self.tokens += tokens
        shares = float((counts.double() * valid[:, None]).sum()) / (features * counts.shape[1])
        self.rate += shares
        if for_global:
            self.global_tokens += tokens
            self.global_rate += shares
        per_token = 2.0 * features * counts.shape[1] * width
        self.flops += other_flops + shares * per_token
        self.exact_flops += other_flops + tokens * per_token


@dataclass(frozen=True)
class LayerStatistics:
    """The calls of one layer since it was approximated. Ratios above 1 are savings of FLOPs, not of time."""

    name: str
    method: Method
    tally: Tally = field(repr=False)

    @property
    def calls(self) -> int:
        return self.tally.calls

    @property
    def exact_calls(self) -> int:
        return self.tally.exact_calls

    @property
    def exact_reasons(self) -> dict[str, int]:
        """Exact calls that continued a cache although a method was asked for, by their reason."""
        return dict(self.tally.reasons)

    @property
    def steps(self) -> int:
        return self.tally.steps

    @property
    def covered(self) -> int:
        return self.tally.covered

    @property
    def keys_read(self) -> float | None:
        """Keys, or summaries or features, that a query read on average; None before the first call."""
        return self.tally.touched / self.tally.queries if self.tally.queries else None

    @property
    def share_read(self) -> float | None:
        """Keys that a query read, as a share of those that it could have read."""
        return self.tally.touched / self.tally.shown if self.tally.shown else None

    @property
    def rate(self) -> float | None:
        """The mean of r / d over valid tokens, for methods that sample the values' linear layer."""
        return self._per(self.tally.tokens)

    @property
    def paper_rate(self) -> float | None:
        """The mean of r / d over all positions, as in the paper: padding counts as tokens without samples."""
        return self._per(self.tally.positions)

    @property
    def paper_reduction(self) -> float | None:
        """FLOPs saved as the paper counts them: of the linear layer alone, padding included."""
        return None if not self.paper_rate else 1 / self.paper_rate

    @property
    def padding_reduction(self) -> float:
        """FLOPs of the linear layer that removing the padding would save by itself."""
        return self.tally.positions / max(self.tally.tokens, 1)

    @property
    def projection_reduction(self) -> float | None:
        """FLOPs saved of the linear layer alone, on valid tokens."""
        return None if not self.rate else 1 / self.rate

    @property
    def reduction(self) -> float:
        """FLOPs saved of the whole attention (the linear layer of the values too, where it is sampled)."""
        return self.tally.exact_flops / self.tally.flops if self.tally.flops else 1.0

    def _per(self, count: int) -> float | None:
        return self.tally.rate / count if self.method.supports.projection and count else None


@dataclass(frozen=True)
class Statistics:
    """What `Handle.statistics()` returns: one entry for each approximated layer, and the whole model's `total`."""

    layers: tuple[LayerStatistics, ...]
    compiled: bool = False  #: the model also ran compiled, and calls of compiled graphs are not counted

    @property
    def total(self) -> LayerStatistics:
        """All layers together; only those that sample the values, if there are any."""
        sampled = [layer for layer in self.layers if layer.method.supports.projection] or list(self.layers)
        whole = Tally()
        for layer in sampled:
            for name, value in vars(layer.tally).items():
                setattr(whole, name, getattr(whole, name) + value)
        return LayerStatistics("total", sampled[0].method if sampled else _method("exact"), whole)

    def __str__(self) -> str:
        head = (
            "layer", "method", "calls", "steps", "exact calls", "covered", "keys read", "rate",
            "FLOPs saved: paper's", "projection", "attention", "exact because",
        )  # fmt: skip
        rows: list[tuple[str, ...]] = [head]
        for layer in (*self.layers, *([self.total] if len(self.layers) > 1 else [])):
            rows.append((
                layer.name, str(layer.method), str(layer.calls), str(layer.steps), str(layer.exact_calls),
                str(layer.covered), _count(layer.keys_read), _share(layer.rate), _ratio(layer.paper_reduction),
                _ratio(layer.projection_reduction), _ratio(layer.reduction if layer.tally.flops else None),
                "; ".join(f"{why} ({count})" for why, count in layer.exact_reasons.items()) or "-",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.compiled:
            lines.append("calls of compiled graphs are not counted; run the model without torch.compile to count them")
        return "\n".join(lines)


def _valid_part(facts: Mapping[str, Tensor], length: int, features: int | None) -> dict[str, Tensor] | None:
    """Return the facts of one item about its sampled values, averaged over its valid keys alone."""
    if "counts" not in facts or not features:
        return None
    # Padding has no samples, but if all values are projected exactly, it is projected too.
    rate = (facts["counts"].double().sum(-1) / (max(length, 1) * features)).clamp_max(1.0)  # (H_kv,)
    part = {"counts": facts["counts"], "padded_rate": rate.mean()}
    if "products" in facts:
        part |= {"products": facts["products"], "terms": facts["terms"].double().sum(-1) / max(length, 1)}
    return part


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
