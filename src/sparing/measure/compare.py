"""Every method on the same real layers: how wrong, how much work, how fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparing.attention import attention, inspect
from sparing.measure.capture import Layer
from sparing.measure.error import ErrorSplit, error_bar_rank, error_split
from sparing.measure.timing import Interval, speed_ratio
from sparing.method import Method, Shape
from sparing.method import method as _method

BUDGETS: tuple[str, ...] = (
    "exact",
    "kernel(kind=elu)",
    "kernel(kind=poly)",
    "kernel(kind=gaussian)",
    "kernelized",
    "window(size=64)",
    "window(size=256)",
    "window(size=256, sinks=1)",
    "lsh(rounds=4, chunk=16)",
    "lsh(rounds=4, chunk=32)",
    "lsh(rounds=4, chunk=64)",
    "multipole(clusters=32, keys=32, window=16)",
    "multipole(clusters=64, keys=76, window=16)",
    "multipole(clusters=64, keys=160, window=16)",
    "random_features(features=64)",
    "random_features(features=256)",
    "random_features(features=1024)",
    "linformer(rank=64)",
    "linformer(rank=256)",
    "linformer(rank=256, projection=pooled)",
    "nystrom(landmarks=16)",
    "nystrom(landmarks=64)",
    "nystrom(landmarks=128)",
    "skyformer(landmarks=64)",
    "skyformer(landmarks=256)",
    "yoso(hashes=16)",
    "yoso(hashes=64)",
    "yoso(expectation=True)",
    "monte_carlo(alpha=0.1)",
    "monte_carlo(alpha=0.4)",
    "monte_carlo(alpha=0.4, estimator=mean)",
    "top_keys(keys=16)",
    "top_keys(keys=64)",
    "top_keys(keys=128)",
    "value_aware(keys=4)",
    "value_aware(keys=16)",
    "sampled(samples=16)",
    "sampled(samples=64, proposal=value_norm)",
)


class Comparison(NamedTuple):
    """One line of the table."""

    method: Method
    error: ErrorSplit  #: mean over layers
    layers: tuple[float, ...]  #: total error of each
    bars: tuple[float, ...] | None  #: how well the method's error bar ranks the true errors of each; None: it has none
    flops: float  #: FLOPs of the method / FLOPs of exact attention
    speed: Interval | None  #: seconds of SDPA / seconds of the method, above 1 is faster; None for oracles

    @property
    def worst(self) -> float:
        """The largest total error of a layer."""
        return max(self.layers)


@torch.no_grad()
def compare(
    layers: Sequence[Layer],
    specs: Sequence[str | Method] = BUDGETS,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int = 9,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Measure each method on every layer. Times are taken on the middle layer, one sequence, all in one run.

    Work and time of methods on the value projection are compared with exact attention plus that projection.
    """
    chosen = [_method(spec) for spec in specs]
    middle = layers[len(layers) // 2]
    one = Layer(middle.name, middle.query[:1], middle.key[:1], middle.value._replace(x=middle.value.x[:1]))
    rows = []
    for method in chosen:
        progress(f"{method}: time")
        speed = None if method.oracle else _speed(method, one, rounds)
        progress(f"{method}: errors")
        splits = [error_split(method, layer.query, layer.key, layer.value, seeds=seeds) for layer in layers]
        mean = ErrorSplit(*(sum(part) / len(splits) for part in zip(*splits, strict=True)))
        totals = tuple(split.total for split in splits)
        rows.append(Comparison(method, mean, totals, _bars(method, layers, seeds), _flops_ratio(method, one), speed))
    return rows


def _bars(method: Method, layers: Sequence[Layer], seeds: Sequence[int]) -> tuple[float, ...] | None:
    if method.oracle or method.supports.projection:
        return None
    given, found = seeds if method.supports.stochastic else seeds[:1], []
    for layer in layers:
        value = layer.value.project(layer.key.shape[1])
        bar = error_bar_rank(method, layer.query, layer.key, value, seeds=given)
        if bar is None:
            return None
        found.append(bar)
    return tuple(found)


def shape_of(layer: Layer, *, projection: bool) -> Shape:
    """The sizes of a self-attention layer; `projection` counts the value layer in."""
    batch, heads, length, head_dim = layer.query.shape
    width = layer.value.weight.shape[0] // layer.key.shape[1]
    return Shape(
        batch=batch, heads=heads, kv_heads=layer.key.shape[1], queries=length, keys=length, head_dim=head_dim,
        value_dim=width, in_features=layer.value.x.shape[-1] if projection else None,
    )  # fmt: skip


def _flops_ratio(method: Method, layer: Layer) -> float:
    shape = shape_of(layer, projection=method.supports.projection)
    value = layer.value if method.supports.projection else layer.value.project(layer.key.shape[1])
    facts = inspect(layer.query, layer.key, value, method=method, seed=0).statistics
    return method.cost(shape, facts).flops / _method("exact").cost(shape).flops


def _speed(method: Method, layer: Layer, rounds: int) -> Interval:
    projected = layer.value.project(layer.key.shape[1])
    whole = method.supports.projection

    def sdpa() -> object:
        value = layer.value.project(layer.key.shape[1]) if whole else projected
        return scaled_dot_product_attention(layer.query, layer.key, value)

    def candidate() -> object:
        return attention(layer.query, layer.key, layer.value if whole else projected, method=method, seed=0)

    return speed_ratio(sdpa, candidate, rounds=rounds)
