"""The kernels' ops on any arguments: they compute, or they raise; they never read or write beyond a tensor.

Valid arguments are recorded from small calls of the library, so that a new op is covered by the call that uses it. Then
one or two arguments are spoilt: sizes, strides, types, indices, numbers. Under AddressSanitizer (`make fuzz`) a bad
access ends the process, which is a finding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparing
from sparing import native
from sparing.native.tensors import widened
from tests.fuzz.cases import Refused
from tests.fuzz.door_inputs import build
from tests.support.common_checks.tools import gradients, tracked

NAME = "kernels"

METHODS = (
    "nystrom(landmarks=3)", "random_features(features=7)", "random_features(features=40, orthogonal=False)",
    "kernel(kind=elu)", "kernel(kind=elu, normalize=none)", "linformer(rank=8)", "linformer(rank=40)",
    "monte_carlo(alpha=2.0)", "monte_carlo(alpha=2.0, estimator=stratified, samples=shared)", "window(size=8)",
    "window(size=6, sinks=3)", "window(size=10, sinks=1, global_tokens=2)",
    "key_clusters(clusters=6, keys=8, window=4, chunk=16)", "key_clusters(clusters=0.25, keys=5, order=1, chunk=12)",
    "multipole(tolerance=0.05, block=16)", "skip(threshold=0.2)", "skip(threshold=0.7, stride=9)",
    "skyformer(landmarks=6)", "skyformer(landmarks=6, kernel=softmax, solver=newton_schulz)", "yoso(hashes=8)",
    "yoso(hashes=7, bits=4, gradient=exact)", "yoso(hashes=8, hash=gaussian, normalize=none)", "lsh(rounds=2, chunk=4)",
    "lsh(rounds=2, chunk=8, combine=sum, align=rank)", "top_keys(keys=4)",
)  # fmt: skip
DECODING = (
    "window(size=8)",
    "multipole(tolerance=0.05, block=16)",
    "skip(threshold=0.2)",
    "top_keys(keys=4)",
)
CHOOSING = (
    "key_clusters",
    "multipole",
    "skip",
    "top_keys",
    "summaries",
)  #: near ties may fall to either side in float32
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError, OverflowError)
INTEGERS = (-(2**62), -2, -1, 0, 1, 3, 2**62, 2**63 - 1)
MOVED = ("columns", "transposed", "sliced")  #: changes that leave the numbers of a tensor as they are
REPEATED = ("steps",)  #: how often something is done: a large number is valid, and takes its time
TYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "bool")
SHORT = ("bfloat16", "float16")
COMPILED_BY_TYPE = (
    "multipole",
    "skip_step",
    "window_step",
)  #: ops whose last place may depend on the type of their inputs
TOLERANCE = {
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-11,
}  #: of the size of a result, or 1 where that is larger


class _Recorder(TorchDispatchMode):
    """Keeps the calls of sparing's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "sparing":
            self.calls.append((func, [_copy(x) for x in args]))
        return func(*args, **(kwargs or {}))


def _copy(x: Any) -> Any:
    """A tensor of the same strides that shares nothing with the old one."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) if 0 not in x.stride() else x.clone()


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw a small call of the library, one of the ops that it calls, and what is changed about its arguments."""
    step = rng.random() < 0.15
    method = rng.choice(DECODING if step else METHODS)
    can = sparing.method(method).supports
    kv_heads, groups = rng.choice((1, 2)), rng.choice((1, 1, 2))
    n = rng.choice((1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 40, 64, 65, 100))
    cross = can.cross_attention and rng.random() < 0.3 and not step
    reads_short = can.decode_16bit if step else can.native_16bit
    types = ("float32", "float64", *(SHORT if reads_short else ()))
    case = {
        "method": method, "impl": "auto", "dtype": rng.choice(types), "batch": rng.choice((1, 2)),
        "heads": groups * kv_heads, "kv_heads": kv_heads, "n_q": n, "n_k": rng.choice((1, 5, 16, 33, 70)) if cross else n,
        "d": rng.choice((1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64)), "e": rng.choice((1, 2, 3, 5, 8, 16, 17, 33)),
        "causal": step or (can.causal and rng.random() < 0.4), "mask": rng.choice((None, None, "padding")),
        "layout": "plain", "data": rng.randrange(2**31), "seed": rng.randrange(2**31), "scale": rng.choice((None, 0.3)),
        "q": ["normal", 1.0], "k": ["normal", 1.0], "v": ["normal", 1.0], "step": step, "inspect": rng.random() < 0.2,
        "which": rng.randrange(1000),
    }  # fmt: skip
    case["changes"] = [_change(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    return case


def _change(rng: random.Random) -> dict[str, Any]:
    """What happens to one argument, whatever it turns out to be."""
    return {
        "argument": rng.randrange(1000), "number": rng.choice(INTEGERS), "real": rng.choice((0.0, -1.0, 1e30, "nan")),
        "tensor": rng.choice(("longer", "shorter", "empty", "one", "fewer_axes", "more_axes", "type", "none", "entry",
                              "entry", "entry", "columns", "transposed", "sliced", "expanded")),
        "axis": rng.randrange(12), "type": rng.choice(TYPES), "place": rng.randrange(2**31),
    }  # fmt: skip


def calls(case: dict[str, Any]) -> int:
    """Return the ops called: the recorded ones apart, one for each instruction set that is compared."""
    return 1 if case["changes"] else len(native.info().available)


def shrink(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the case with less changed, or smaller."""
    for i in range(len(case["changes"])):
        yield {**case, "changes": case["changes"][:i] + case["changes"][i + 1 :]}
    for name in ("n_q", "n_k", "d", "e"):
        for small in (1, 2, 3, 8, 17):
            if small < case[name]:
                yield {**case, name: small, **({"n_k": small} if name == "n_q" and case["n_q"] == case["n_k"] else {})}
    if case["heads"] > 1:
        yield {**case, "heads": 1, "kv_heads": 1}
    if case["batch"] > 1:
        yield {**case, "batch": 1}
    if case["mask"] is not None:
        yield {**case, "mask": None}


def check(case: dict[str, Any]) -> None:
    """The op computes the same on all instruction sets, or raises where its arguments were spoilt."""
    recorded = record(case)
    if not recorded:
        return
    op, args = recorded[case["which"] % len(recorded)]
    name = op.name().removeprefix("sparing::")
    names = [argument.name for argument in op._schema.arguments]
    changed = list(args)
    for change in case["changes"]:
        i = change["argument"] % len(changed)
        changed[i] = _changed(changed[i], change, names[i])
    spoilt = bool(case["changes"])
    refusal = None
    try:
        found = _results(op, changed)
    except REFUSALS as error:
        refusal = str(error)
    if refusal is not None:
        assert spoilt, f"{name}: refused valid arguments: {refusal}"
        assert refusal, f"{name}: an error without a message"
        raise Refused(refusal)
    if spoilt:
        if all(isinstance(args[c["argument"] % len(args)], Tensor) and c["tensor"] in MOVED for c in case["changes"]):
            for i, (a, b) in enumerate(zip(_results(op, args), found, strict=True)):
                _compare(f"{name}: output {i} for the same numbers elsewhere", name, a, b, 0.0)
        return
    if case["dtype"] in SHORT and name not in COMPILED_BY_TYPE:
        for i, (a, b) in enumerate(zip(_results(op, [_wide(x) for x in changed]), found, strict=True)):
            assert torch.equal(a.to(b.dtype), b), f"{name}: output {i} differs from that in float32"
    for isa in native.info().available[1:]:
        with native.instruction_set(isa):
            other = _results(op, changed)
        noise = _noise(op, [_wide(x) for x in changed], found)  # a rounding of float32, which 16 bits cannot hold
        for i, (a, b) in enumerate(zip(found, other, strict=True)):
            _compare(f"{name}: output {i} by {isa}", name, a, b, noise[i])


def record(case: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
    """Return the ops that the call makes, forward and backward, with their arguments."""
    built = build({**case, "checks": []})
    full = built.method.supports.gradient == "full" and not (case["step"] or case["inspect"])
    full = full and case["dtype"] not in SHORT  # the door converts those to float32 where there is a gradient
    with _Recorder() as recorder:
        if case["step"]:
            _decode(built, case)
        elif case["inspect"]:
            sparing.inspect(built.x.q, built.x.k, built.x.value, **built.options)
        else:
            x = tracked(built.x) if full else built.x
            out = built.run(x)
            if full:
                gradients(x, out, torch.ones_like(out))
    return recorder.calls


def _decode(built: Any, case: dict[str, Any]) -> None:
    """A prompt, and two steps after it."""
    index = sparing.Index(built.method, seed=case["seed"], scale=case["scale"])
    x = built.x
    for end in range(max(case["n_k"] - 2, 1), case["n_k"] + 1):
        keep = None if built.keep is None else built.keep[:, :end]
        index.attention(x.q[:, :, index.length : end], x.k[:, :, :end], x.value[:, :, :end], keep)


def _results(op: Any, args: list[Any]) -> list[Tensor]:
    found = op(*(_copy(x) if isinstance(x, Tensor) and x.numel() < 2**20 else x for x in args))
    if isinstance(found, bool):
        return [torch.tensor(found)]
    return [found] if isinstance(found, Tensor) else list(found)


def _wide(x: Any) -> Any:
    return widened(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _noise(op: Any, args: list[Any], found: list[Tensor]) -> list[float]:
    """Return how much each result changes when every real entry of the arguments moves by one rounding."""
    gen = torch.Generator().manual_seed(1)

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        roundings = torch.finfo(x.dtype).eps * torch.randint(-1, 2, x.shape, generator=gen).double()
        return (x * (1 + roundings)).to(x.dtype)

    most = [0.0] * len(found)
    for _ in range(3):
        for i, (a, b) in enumerate(zip(found, _results(op, [move(x) for x in args]), strict=True)):
            if a.is_floating_point() and a.numel():
                most[i] = max(most[i], float((a.double() - b.double()).abs().nan_to_num(0.0).max()))
    return most


def _compare(what: str, name: str, a: Tensor, b: Tensor, noise: float) -> None:
    assert a.shape == b.shape, f"{what}: shape {list(b.shape)} instead of {list(a.shape)}"
    if not a.is_floating_point():
        assert torch.equal(a, b), f"{what}: other whole numbers"
        return
    if not a.numel() or (name in CHOOSING and a.dtype != torch.float64):
        return
    assert torch.equal(a.isfinite(), b.isfinite()), f"{what}: other entries are finite"
    error = (a.double() - b.double()).abs().nan_to_num(0.0)
    size = a.double().abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(1.0)  # inputs are of size one; terms may cancel
    allowed = TOLERANCE[a.dtype] * size + 16 * noise
    assert bool((error <= allowed).all()), f"{what}: error {error.max():.3g} > {float(allowed):.3g}"


def _changed(x: Any, change: dict[str, Any], name: str) -> Any:
    """The argument with the change that fits its kind."""
    if isinstance(x, Tensor):
        return _changed_tensor(x, change)
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return min(max(change["number"], -2), 3) if name in REPEATED else change["number"]
    if isinstance(x, float):
        return float(change["real"])
    if isinstance(x, list | tuple):
        return list(x)[: change["axis"] % (len(x) + 1)]
    return None if change["axis"] % 2 else torch.ones(change["axis"], dtype=getattr(torch, change["type"]))


def _changed_tensor(x: Tensor, change: dict[str, Any]) -> Tensor | None:
    how = change["tensor"]
    if how == "none":
        return None
    if how == "more_axes":
        return x[None]
    if how == "type":
        return x.to(getattr(torch, change["type"]))
    if not x.ndim:
        return x
    axis = change["axis"] % x.ndim
    size = x.shape[axis]
    if how == "fewer_axes":
        return x.select(axis, 0) if size else x.flatten()
    if how == "longer":
        return torch.cat([x, x.narrow(axis, 0, 1)], axis) if size else x
    if how == "shorter":
        return x.narrow(axis, 0, max(size - 1, 0))
    if how == "empty":
        return x.narrow(axis, 0, 0)
    if how == "one":
        return x.narrow(axis, 0, min(size, 1))
    if how == "columns":
        return x.repeat_interleave(2, axis).unflatten(axis, (size, 2)).select(axis + 1, 0) if size else x
    if how == "transposed":
        return x.transpose(axis, -1).contiguous().transpose(axis, -1)
    if how == "sliced":
        return torch.cat([x, x, x], axis).narrow(axis, size, size)
    if how == "expanded":
        return x.narrow(axis, 0, 1).expand(x.shape) if size else x
    x = x.clone(memory_format=torch.contiguous_format)  # an entry
    if x.numel():
        flat, place = x.view(-1), change["place"] % x.numel()
        if x.dtype == torch.bool:
            flat[place] = not flat[place]
        elif x.is_floating_point():
            flat[place] = float(change["real"])
        else:
            limits = torch.iinfo(x.dtype)
            flat[place] = min(max(change["number"], limits.min), limits.max)
    return x
