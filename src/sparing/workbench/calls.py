"""One attention call of a layer, as SDPA makes it and as a method does, ready to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparing.contract import Method, Projection, Unsupported
from sparing.contract import method as _method
from sparing.functional import attention
from sparing.models import Subject
from sparing.transformers.watch import Seen, record_calls

Side = Callable[[], object]


def samples_values(method: Method, seen: Seen) -> bool:
    """Whether the method does the work of the values' linear layer, too, so that its rival must."""
    return method.supports.projection and isinstance(seen.value, Projection)


def exact_side(seen: Seen, *, with_values: bool) -> Side:
    """SDPA, and the values' linear layer, if it is to count."""
    mask, ready = seen.call["attn_mask"], seen.projected
    return lambda: scaled_dot_product_attention(
        seen.query, seen.key, seen.projected if with_values else ready, attn_mask=mask,
        is_causal=seen.call["is_causal"] and mask is None, scale=seen.call["scale"],
        enable_gqa=seen.call["enable_gqa"],
    )  # fmt: skip


def method_side(seen: Seen, method: Method) -> Side:
    """The method on the same call."""
    value = seen.value if samples_values(method, seen) else seen.projected
    call = {**seen.call, "method": method}
    return lambda: attention(seen.query, seen.key, value, **call)


def middle_calls(subject: Subject, rows: Sequence[Tensor], specs: Sequence[str]) -> list[Seen]:
    """What the middle layer, of those that can run one of the methods, is given for each document [n]."""
    # A method on the value layer is shown that layer's input, which serves the others, too.
    for spec in sorted(specs, key=lambda spec: not _method(spec).supports.projection):
        found = []
        try:
            for ids in rows:
                calls = record_calls(subject.model, spec, functools.partial(subject.run, ids))
                found += calls[len(calls) // 2 : len(calls) // 2 + 1]
        except Unsupported:
            continue
        if found:
            return found
    return []
