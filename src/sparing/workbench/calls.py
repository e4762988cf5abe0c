"""Build timed calls from one recorded attention call: by SDPA and by a method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparing.contract import Method, Projection, Unsupported
from sparing.contract import method as _method
from sparing.functional import attention
from sparing.models import Subject
from sparing.transformers.watch import ObservedCall, record_calls

Side = Callable[[], object]


def samples_values(method: Method, seen: ObservedCall) -> bool:
    """Return whether the method also does the work of the value layer, so that exact attention must do it, too."""
    return method.supports.projection and isinstance(seen.value, Projection)


def exact_side(seen: ObservedCall, *, with_values: bool) -> Callable[[], Tensor]:
    """Return a call of SDPA; with_values: include the value layer."""
    mask, ready = seen.call["attn_mask"], seen.projected
    return lambda: scaled_dot_product_attention(
        seen.query, seen.key, seen.projected if with_values else ready, attn_mask=mask,
        is_causal=seen.call["is_causal"] and mask is None, scale=seen.call["scale"],
        enable_gqa=seen.call["enable_gqa"],
    )  # fmt: skip


def method_side(seen: ObservedCall, method: Method) -> Side:
    """Return a call of the method on the same inputs."""
    value = seen.value if samples_values(method, seen) else seen.projected
    call = seen.with_method(method)
    return lambda: attention(seen.query, seen.key, value, **call)


def middle_calls(subject: Subject, rows: Sequence[Tensor], specs: Sequence[str]) -> list[ObservedCall]:
    """Return the call of the middle layer for each document [n], among layers that can run one of the methods."""
    # A method that works on the value layer records that layer's input, from which all others can be served.
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
