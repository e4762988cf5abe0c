"""`attention()` under `torch.compile`: one opaque operator, so that any call is a single node of a full graph.

What `attention()` decides by looking at numbers (padding, non-finite entries, short items) cannot be traced. The
operator runs the same code as eager mode, so results are equal to the bit. Only its inputs are saved for the backward
pass, which runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparing.contract import Method, Projection, list_methods, method

F = TypeVar("F", bound=Callable[..., Any])
_compute: Any = None


def serve(compute: Any) -> None:
    """Register the function that computes a call; `functional.py` does so, since this module cannot import it."""
    global _compute
    _compute = compute


def run_while_tracing(function: F) -> F:
    """Let torch.compile run a function while it traces a call of it, and take its result as a constant.

    `torch.compiler.assume_constant_result` does no more, but loads the whole compiler, which takes as long as torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@run_while_tracing
def spec_of(chosen: str | Method) -> str | None:
    """Return the spec string of a method, also while tracing; None for a method that spec strings cannot name."""
    found = method(chosen)
    return str(found) if list_methods().get(found.name) is type(found) else None


def for_length(chosen: Method, max_length: int | None) -> str | Method:
    """Return the setting of a method in a model made for inputs of that length: its spec string while tracing."""
    if torch.compiler.is_compiling() and (spec := _spec_for_length(chosen, max_length)) is not None:
        return spec
    return chosen.for_length(max_length)


@run_while_tracing
def _spec_for_length(chosen: Method, max_length: int | None) -> str | None:
    """Return the spec string of a setting that the length changes; None where it changes nothing."""
    found = chosen.for_length(max_length)
    return None if found is chosen else spec_of(found)


def _value(value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | Projection:
    return value if weight is None else Projection(value, weight, bias)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor,
    seeded: bool,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    spec: str,
    impl: str,
    streams: Sequence[int] | None,
    tracked: bool,
) -> Tensor:
    """Compute `sparing.attention` with the parts of a `Projection` and the seed as tensors.

    Both operators take these arguments. seeded: whether the caller passed the seed; otherwise it was drawn. tracked:
    whether the caller may ask for a gradient; autograd does not record inside an operator.
    """
    out: Tensor = _compute(
        query, key, _value(value, weight, bias), spec, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
        scale=scale, enable_gqa=enable_gqa, seed=int(seed), seeded=seeded, impl=impl, query_mask=query_mask,
        cu_seqlens=cu_seqlens, streams=streams, tracked=tracked,
    )  # fmt: skip
    return out.contiguous()


attention = torch.library.custom_op("sparing::attention", _attend, mutates_args=())
_ARGUMENTS = torch.library.infer_schema(_attend, mutates_args=()).removeprefix("(").partition(") -> ")[0]
_LEAVES = 6  # leading arguments that may need a gradient: query, key, value, weight, bias and attn_mask
_TENSORS = 9  # leading arguments that are tensors: also query_mask, cu_seqlens and seed, which need no gradient


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, *others: Any) -> Tensor:
    width = value.shape[-1] if weight is None else weight.shape[0] // key.shape[1]
    return query.new_empty(*query.shape[:3], width)


@contextmanager
def _recording() -> Iterator[None]:
    """Switch autograd on inside an operator, where torch switches it off at a level that `enable_grad` cannot reach."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        torch._C.DispatchKey.AutogradOther,
        torch._C.DispatchKey.AutogradCPU,
        torch._C.DispatchKey.AutogradCUDA,
    ):
        keys = keys | torch._C.DispatchKeySet(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden - keys),
        torch.enable_grad(),
    ):
        yield


@torch.library.custom_op(
    "sparing::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, bool[] needed, {_ARGUMENTS}) -> Tensor[]",
)
def attention_backward(grad: Tensor, needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    """Return the gradients of those of query, key, value, weight, bias and attn_mask that `needed` marks."""
    given, others = arguments[:_LEAVES], arguments[_LEAVES:]
    leaves: list[Any] = [
        t if t is None else t.detach().requires_grad_(want) for t, want in zip(given, needed, strict=True)
    ]
    with _recording():
        out = _attend(*leaves, *others)
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    # An operator's outputs must not share memory with each other or with its inputs, and their strides must be those
    # of the fake below.
    return [
        t.new_zeros(t.shape) if g is None else g.clone(memory_format=torch.contiguous_format)
        for t, g in zip(wanted, found, strict=True)
    ]


@attention_backward.register_fake
def _(grad: Tensor, needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, want in zip(arguments[:_LEAVES], needed, strict=True) if want]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:_LEAVES])
    found = iter(attention_backward(grad, needed, *ctx.saved_tensors, *ctx.settings))
    return tuple(next(found) if want else None for want in needed) + (None,) * (len(ctx.needs_input_grad) - _LEAVES)


attention.register_autograd(_backward, setup_context=_setup)
