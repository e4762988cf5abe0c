"""`attention()` and `inspect()`: check a call, normalise it and pass it to a method. There is no other way to one.

Everything that could go silently wrong in a method is handled here once: masks, types, head groups, padding, seeds,
unsupported calls, and non-finite entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing import compiled, native
from sparing.call import Call, Impl, Past
from sparing.check import check_call
from sparing.contract import Method, Projection, Unsupported
from sparing.contract import method as _method
from sparing.layout import Layout, four_dimensional
from sparing.native.tensors import wide_type
from sparing.notebook import block, table
from sparing.packed import each_sequence, four_dimensional_pack, read_offsets
from sparing.quarantine import Wide, quarantine

#: Parts of torch's messages for a lack of memory, and for a tensor whose number of bytes exceeds 64 bits.
_NO_MEMORY = (
    "aoti_torch_empty_strided",
    "can't allocate memory",
    "not enough memory",
    "size calculation overflowed",
    "std::bad_alloc",
)


class Inspection(NamedTuple):
    """What `inspect()` returns."""

    output: Tensor
    lse: Tensor | None  #: [B, H, n_q] log-sum-exp of the logits that the output was normalised with
    statistics: dict[str, Tensor]  #: facts the method noted: sample counts, bounds, indices, keys touched

    def __repr__(self) -> str:
        return f"<Inspection: {', '.join(f'{name} {said}' for name, said in self._parts())}>"

    def _repr_html_(self) -> str:
        return block("Inspection") + table(["part", "shape"], self._parts())

    def _parts(self) -> list[tuple[str, str]]:
        """Return the name and the shape of each part."""
        held = {"output": self.output, "lse": self.lse, **self.statistics}
        return [(name, "None" if part is None else str(list(part.shape))) for name, part in held.items()]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str | Method = "exact",
    seed: int | None = None,
    impl: Impl = "auto",
    query_mask: Tensor | None = None,
    streams: Sequence[int] | None = None,
    state: nn.Module | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute attention by any method; the first eight arguments are those of `scaled_dot_product_attention`.

    query is [B, H, n_q, d], key [B, H_kv, n_k, d], value [B, H_kv, n_k, e] or a `Projection`; returns [B, H, n_q, e].
    Tensors may have fewer or more dimensions before the length, and broadcast there, as SDPA's may: [B, n, d] is one
    head, and of five or more dimensions all before the heads are the batch. Where d is 0, all logits are 0.

    attn_mask: boolean (True = attend) or additive, broadcastable to [B, H, n_q, n_k]; -inf, or the lowest number of
        its type, hides a key. A mask that shows the same keys to all queries and heads, such as one of shape
        [B, 1, 1, n_k], is key padding, which every method supports. Unlike SDPA, it may be combined with is_causal.
    is_causal: query i sees keys 0..i (upper-left aligned, like SDPA).
    method: a `Method` or its spec string, such as "nystrom(landmarks=64)".
    seed: fixes all random choices; the result then depends on nothing but the arguments (dropout: all batch items drop
        the same weights). An integer, used modulo 2^64. None draws one number from torch's global generator.
    impl: "auto" takes the fastest path that covers the call, a compiled kernel where there is one; "reference" takes
        the plain specification; "native" insists on a kernel and raises where none covers the call.
    query_mask: boolean [B, n_q]; rows of False give zeros and influence no other row. None: every row is computed, and
        where n_q == n_k the queries at padded key positions (self-attention) influence no other row.
    streams: one random stream number per key-value head; None numbers them 0, 1, 2, ...
    state: the learned state of the method, when a module owns one.
    cu_seqlens: offsets of packed sequences and their total, int32 or int64 [sequences + 1], as flash attention takes
        them. Tensors are [1, H, total, d] or [total, H, d]. Each sequence sees itself alone, as in a call of its own.

    A query with nothing to attend to gives zeros. A method raises `Unsupported` for what it cannot do; the message
    names the way out.

    >>> q, k, v = torch.randn(3, 1, 8, 256, 64).unbind(0)
    >>> sparing.attention(q, k, v, method="nystrom(landmarks=32)", seed=0).shape
    torch.Size([1, 8, 256, 64])
    """
    shaped = _shaped(query, key, value, attn_mask, enable_gqa, cu_seqlens)
    query, key, value, attn_mask, *_ = shaped
    arguments: dict[str, Any] = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
        "enable_gqa": enable_gqa, "impl": impl, "query_mask": query_mask, "streams": streams, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    if torch.compiler.is_compiling() and state is None and (spec := compiled.spec_of(method)) is not None:
        x, weight, bias = value if isinstance(value, Projection) else (value, None, None)
        number = torch.randint(2**63 - 1, ()) if seed is None else torch.tensor((seed + 2**63) % 2**64 - 2**63)
        given = [t for t in (query, key, x, weight, bias) if t is not None]
        tracked = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        out = compiled.attention(
            query, key, x, weight, bias, seed=number, seeded=seed is not None, spec=spec, tracked=tracked, **arguments
        )
    else:
        out = compute(query, key, value, method, seed=seed, state=state, **arguments)
    return shaped.restore(out)


def inspect(
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str | Method = "exact",
    seed: int | None = None,
    impl: Impl = "auto",
    query_mask: Tensor | None = None,
    streams: Sequence[int] | None = None,
    state: nn.Module | None = None,
    cu_seqlens: Tensor | None = None,
    brief: bool = False,
    past: Past | None = None,
) -> Inspection:
    """Run `attention()` and return what the method knows about its result: log-sum-exp and statistics.

    brief: return only statistics that cost nothing, so that the call costs what `attention()` does.
    past: the state that the `Index` of a prompt keeps, so that nothing is computed twice.
    cu_seqlens: of packed sequences, only statistics with an entry for each row are returned.
    """
    notes: dict[str, Tensor] = {}
    shaped = _shaped(query, key, value, attn_mask, enable_gqa, cu_seqlens)
    query, key, value, attn_mask, *_ = shaped
    output = compute(
        query, key, value, method, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa, seed=seed, impl=impl, query_mask=query_mask, streams=streams, state=state,
        cu_seqlens=cu_seqlens, statistics=notes, brief=brief, past=past,
    )  # fmt: skip
    notes = {name: shaped.restore(note) if note.shape[:2] == output.shape[:2] else note for name, note in notes.items()}
    return Inspection(shaped.restore(output), notes.pop("lse", None), notes)


@contextmanager
def memory_errors_named(chosen: Method, **tensors: Tensor) -> Iterator[None]:
    """Turn torch's errors for a lack of memory into a MemoryError that names the method, the tensors and the way out.

    A backward pass runs later, outside of this context: there, torch's own error remains.
    """
    try:
        yield
    except RuntimeError as error:
        why = next((line for line in str(error).splitlines() if any(map(line.__contains__, _NO_MEMORY))), None)
        if why is None:
            raise
        sizes = " and ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        lower = "" if chosen.budget is None else f"lower {chosen.budget}, or "
        raise MemoryError(
            f"{chosen}: {sizes} need more memory than there is; {lower}pass fewer sequences or heads at once ({why})"
        ) from None


def _shaped(
    query: Tensor, key: Tensor, value: Tensor | Projection, attn_mask: Tensor | None, enable_gqa: bool,
    cu_seqlens: Tensor | None,
) -> Layout:  # fmt: skip
    """Return the tensors of a call with four dimensions each."""
    if cu_seqlens is None:
        return four_dimensional(query, key, value, attn_mask, enable_gqa)
    query, key, value, flat = four_dimensional_pack(query, key, value)
    return Layout(query, key, value, attn_mask, None, flat)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    method: str | Method,
    *,
    cu_seqlens: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """Check a call on four-dimensional tensors and run it. arguments: the other arguments of `check_call`."""
    chosen = _method(method)
    if cu_seqlens is not None:
        masks = {name: arguments.get(name) for name in ("attn_mask", "query_mask")}
        offsets = read_offsets(cu_seqlens, query, key, **masks)
        if not chosen.supports.packed:
            notes = arguments.pop("statistics", None)
            return each_sequence(
                lambda q, k, v, noted: compute(q, k, v, chosen, statistics=noted, **arguments),
                offsets, query, key, value, notes,
            )  # fmt: skip
        arguments["offsets"] = offsets
    with memory_errors_named(chosen, query=query, key=key):
        call = check_call(query, key, value, chosen, **arguments)
        # Methods compute in float32 or float64; autocast around the call would undo that.
        with torch.autocast(query.device.type, enabled=False):
            return _run(query, key, value, chosen, call).to(query.dtype)


def _run(query: Tensor, key: Tensor, value: Tensor | Projection, chosen: Method, call: Call) -> Tensor:
    """Run a checked call in its working type, `call.dtype`."""
    v = value if not isinstance(value, Projection) or chosen.supports.projection else value.project(key.shape[1])
    short = _reads_16bit(chosen, query, key, v, call)
    q, k, v = (query, key, v) if short else _convert(query, key, v, call.dtype)
    chosen.check(q, k, call)
    width = v.weight.shape[0] // max(key.shape[1], 1) if isinstance(v, Projection) else v.shape[3]
    shape = (*query.shape[:3], width)
    if 0 in (*shape, key.shape[2]):
        if chosen.supports.lse:
            call.note(lse=q.new_full(query.shape[:3], -torch.inf, dtype=call.dtype))
        given = [query, key, *(t for t in (value if isinstance(value, Projection) else (value,)) if t is not None)]
        nothing = sum(t[..., :0].sum() for t in given)  # keeps every input in the graph
        return q.new_zeros(shape, dtype=call.dtype) + nothing

    clean = quarantine(q, k, v, chosen, call, balance=call.past is None)
    out = _by_head(chosen, clean.q, clean.k, clean.v, clean.call, shape)
    if clean.wide is not None:
        out = _merge_wide(out, clean.wide, clean.call, chosen)
    lse = None if call.statistics is None else call.statistics.get("lse")
    if clean.spoiled is not None:
        out = out.masked_fill(clean.spoiled, torch.nan)
        lse = None if lse is None else lse.masked_fill(clean.spoiled.any(-1), torch.nan)
    if (rows := call.mask.queries) is not None:
        out = out.masked_fill(~rows[:, None, :, None], 0.0)
        lse = None if lse is None else lse.masked_fill(~rows[:, None, :], -torch.inf)
    if lse is not None:
        call.note(lse=lse)
    return out


def _reads_16bit(chosen: Method, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> bool:
    """Return whether kernels get q, k and v in 16 bits as they are.

    Not where a gradient is asked for: the parts that a tensor's gradient is summed from would be rounded to 16 bits.
    """
    short = q.dtype in (torch.bfloat16, torch.float16) and call.dtype == torch.float32
    if not short or not chosen.supports.native_16bit or call.impl == "reference":
        return False
    values = v if isinstance(v, Projection) else (v,)
    tracked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, *values))
    return not tracked and native.ready(q, half=True) and _native_is_current(type(chosen))


def _convert(
    q: Tensor, k: Tensor, v: Tensor | Projection, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | Projection]:
    return q.to(dtype), k.to(dtype), v.map(lambda t: t.to(dtype)) if isinstance(v, Projection) else v.to(dtype)


def _by_head(
    chosen: Method, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call, shape: tuple[int, ...]
) -> Tensor:
    """Run the method, and check what it returns. shape: the shape of the output."""
    out = _dispatch(chosen, q, k, v, call)
    if out.shape != shape:
        raise RuntimeError(f"{chosen}: the method returned {list(out.shape)} for a call that needs {list(shape)}")
    return out


def _merge_wide(out: Tensor, wide: Wide, call: Call, chosen: Method) -> Tensor:
    """Replace the rows of `out`, and of statistics, that see an extreme entry by those of a call in float64."""
    notes: dict[str, Tensor] | None = None if call.statistics is None else {}
    call_64 = replace(call, statistics=notes, past=None)
    if call.mask.bias is not None:
        call_64 = call_64.with_mask(pattern=call.mask.bias.double())
    found = _by_head(chosen, wide.q, wide.k, wide.v, call_64, tuple(out.shape))
    rows = wide.rows.any(-1).expand(out.shape[:3])
    for name, note in (notes or {}).items():
        before = (call.statistics or {}).get(name)
        if before is None or before.shape != note.shape:  # cannot be merged row by row
            call.note(**{name: note})
            continue
        taken = (
            rows if note.shape[:3] == rows.shape else rows.any(-1) if note.shape[:2] == rows.shape[:2] else rows.any()
        )
        taken = taken.view(*taken.shape, *[1] * (note.ndim - taken.ndim))
        call.note(**{name: torch.where(taken, note.to(before.dtype), before)})
    return torch.where(wide.rows, found.to(out.dtype), out)


def _dispatch(chosen: Method, q: Tensor, k: Tensor, v: Tensor | Projection, call: Call) -> Tensor:
    """Run kernels where they cover the call, else plain PyTorch; the specification if asked for."""
    if call.impl == "reference":
        return _by_sequence(chosen.reference, q, *_repeated(k, v, call.groups), call)
    own = native.ready(q, half=True) and _native_is_current(type(chosen))
    if not chosen.supports.native_gqa:
        k, v = _repeated(k, v, call.groups)
    out = chosen.native(q, k, v, call) if own else None  # type: ignore[arg-type]
    if out is None and call.impl == "native":
        raise Unsupported(f"impl='native': {_why_not_native(chosen, q)}; use impl='auto'")
    if out is None:
        if chosen.supports.native_gqa:
            k, v = _repeated(k, v, call.groups)
        q, k, v = _convert(q, k, v, wide_type(q))
        return _by_sequence(chosen.fast, q, k, v, call)
    return out


def _by_sequence(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor | Projection, call: Call
) -> Tensor:  # v is a Projection only where the method asked for one
    """Run `reference` or `fast` of a method, which know no packs, on each packed sequence."""
    if call.mask.offsets is None:
        return run(q, k, v, call)
    alone = call.with_mask(offsets=None)
    return each_sequence(
        lambda q, k, v, noted: run(q, k, v, replace(alone, statistics=noted)), call.mask.offsets, q, k, v,
        call.statistics,
    )  # fmt: skip


def _repeated(k: Tensor, v: Tensor | Projection, groups: int) -> tuple[Tensor, Tensor | Projection]:
    """Return keys and values with their heads repeated to the query heads."""
    if groups == 1:
        return k, v
    repeated = k.repeat_interleave(groups, dim=1)
    return repeated, v if isinstance(v, Projection) else v.repeat_interleave(groups, dim=1)


def _native_is_current(cls: type[Method]) -> bool:
    """Return whether the kernels match the class: False if a subclass overrides the mathematics but not `native`."""

    def depth(name: str) -> int:
        return next(i for i, base in enumerate(cls.__mro__) if name in base.__dict__)

    return depth("native") <= min(depth("reference"), depth("fast"))


def _why_not_native(chosen: Method, q: Tensor) -> str:
    if not native.ready(q, half=True):
        return f"no kernels run for {chosen.name}: {native.why_not(q)}"
    return f"the kernels of {chosen} do not cover this call"


compiled.serve(compute)
