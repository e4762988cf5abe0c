"""Race the attention calls of methods against exact attention at growing lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.contract import Projection, Unsupported
from sparing.contract import method as _method
from sparing.transformers.watch import ObservedCall
from sparing.workbench.calls import Side, exact_side, method_side, samples_values
from sparing.workbench.timing import Interval, interval, race, undisturbed

#: Lengths that are raced, as long as a round takes no more than `PATIENCE` seconds.
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PATIENCE = 6.0
_ROUNDS = 3


@dataclass(frozen=True)
class RacePoint:
    """The speed of a method at one length."""

    length: int
    ratio: Interval  #: time of SDPA / time of the method


@torch.no_grad()
def race_at(
    seen: Sequence[ObservedCall], specs: Sequence[str], length: int
) -> tuple[dict[str, Interval | None], float, str]:
    """Return time of SDPA / time of each method on real queries and keys, joined or repeated up to the length.

    seen: calls of one layer. A method that cannot run there has None. All sides are interleaved in one race. The other
    results are the shortest time of a round in seconds, and what disturbed the race.
    """
    joined = _joined(seen, length)
    sides: dict[str, Side] = {"sdpa": exact_side(joined, with_values=False)}
    if any(samples_values(_method(spec), joined) for spec in specs):
        sides["sdpa with values"] = exact_side(joined, with_values=True)
    for spec in specs:
        side = method_side(joined, _method(spec))
        try:
            side()  # warms up
        except Unsupported:
            continue
        sides[spec] = side
    times, disturbed = undisturbed(lambda: race(list(sides.values()), [_ROUNDS] * len(sides)), lambda found: found[0])
    taken = dict(zip(sides, times, strict=True))

    def ratio(spec: str) -> Interval | None:
        if spec not in taken:
            return None
        rival = taken["sdpa with values" if samples_values(_method(spec), joined) else "sdpa"]
        return interval([a / b for a, b in zip(rival, taken[spec], strict=True)])

    return {spec: ratio(spec) for spec in specs}, sum(map(min, taken.values())), disturbed


def _joined(seen: Sequence[ObservedCall], length: int) -> ObservedCall:
    """Join or repeat calls to one of so many tokens."""

    def along(tensors: Sequence[Tensor], dim: int) -> Tensor:
        whole = torch.cat(list(tensors), dim)
        times = [1] * whole.dim()
        times[dim] = -(-length // whole.shape[dim])
        return whole.repeat(times).narrow(dim, 0, length).contiguous()

    first = seen[0]
    value: Any
    if isinstance(first.value, Projection):
        inputs = along([each.value.x for each in seen if isinstance(each.value, Projection)], 1)
        value = Projection(inputs, first.value.weight, first.value.bias)
    else:
        value = along([each.projected for each in seen], 2)
    query, key = along([each.query for each in seen], 2), along([each.key for each in seen], 2)
    return ObservedCall(first.layer, query, key, value, {**first.call, "attn_mask": None}, first.max_length)
