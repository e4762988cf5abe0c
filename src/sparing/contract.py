"""What a method is: a frozen dataclass whose fields are the paper's knobs, and the spec strings that name it.

A method says what it converges to (`target`), what it can do (`supports`) and how it is computed: `reference` is the
specification in plain PyTorch, `fast` (optional) the same numbers from the same samples at the method's real cost,
`native` (optional) the same again by compiled kernels.
Everything that is not mathematics (masks, types, heads, refusals) happens before, in `attention()`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sparing.call import Call, Past
from sparing.draws import Draws
from sparing.spec import parse, shown

T = TypeVar("T")


class Unsupported(NotImplementedError, ValueError):
    """Raised where a method cannot run a call. The message names the method, the argument and the way out."""


@dataclass(frozen=True, kw_only=True)
class Supports:
    """What a method can do. Enforced in `attention()`: what is not claimed here is refused before any computation."""

    causal: bool = False  #: `is_causal=True`; no row depends on a later token
    key_padding: bool = True  #: boolean masks of shape [B, 1, 1, n_k]
    attn_mask: Literal[False, "boolean", "any"] = False  #: masks that differ by query; "any" takes additive ones too
    cross_attention: bool = True  #: n_q != n_k
    packed: bool = False  #: its kernels take packed sequences whole (`Mask.offsets`); else there is a call for each
    mixes_queries: bool = False  #: a row depends on other queries too: no cross attention in a decoder
    gqa: bool = True  #: fewer key and value heads than query heads
    gradient: Literal[False, "values", "full"] = "full"  #: "values": with respect to `value` only
    dropout: bool = False  #: `dropout_p > 0`
    projection: bool = False  #: needs a `Projection`: it works on the values' linear layer
    lse: bool = False  #: `inspect()` also returns the log-sum-exp of the logits, so that parts can be merged
    stochastic: bool = False  #: the result depends on `seed`
    position_based: bool = False  #: the order of the tokens matters, beyond `is_causal`
    decode: bool = False  #: `sparing.Index`: new queries continue a cache
    decode_16bit: bool = False  #: that reads caches of bfloat16 and float16 without converting them
    native_16bit: bool = False  #: its kernels read bfloat16 and float16; other paths get float32
    native_gqa: bool = False  #: its kernels read key heads that query heads share; other paths get them repeated
    adopt: bool = False  #: `sparing.Index.adopt`: of a cache that was filled before, keys and values are enough
    training_free: bool = False  #: meant for weights that were trained with softmax attention


class Projection(NamedTuple):
    """A value before its linear layer: value = x @ weight.T + bias, split into heads.

    x is [B, n_k, in_features]; weight, as in `nn.Linear`, [H_kv * e, in_features]; bias [H_kv * e] or None.
    Methods that can use it sample the product; all others see the projected tensor.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Projection:
        """Apply fn to each tensor."""
        return Projection(fn(self.x), fn(self.weight), None if self.bias is None else fn(self.bias))

    def project(self, heads: int) -> Tensor:
        """Return the values as [B, heads, n_k, e]."""
        return nn.functional.linear(self.x, self.weight, self.bias).unflatten(-1, (heads, -1)).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that a cost depends on."""

    batch: int = 1
    heads: int = 1
    queries: int
    keys: int
    kv_heads: int | None = None  #: None for as many as `heads`
    head_dim: int
    value_dim: int
    causal: bool = False
    in_features: int | None = None  #: width of a Projection's x; None when the values come projected

    @property
    def pairs(self) -> float:
        """Number of query-key pairs that exact attention computes per head."""
        if not self.causal:
            return float(self.queries * self.keys)
        corner = min(self.queries, self.keys)
        return corner * (corner + 1) / 2 + max(self.queries - self.keys, 0) * self.keys

    @property
    def projection_flops(self) -> float:
        """FLOPs of projecting the values of all key-value heads."""
        return 2.0 * self.batch * self.keys * (self.in_features or 0) * (self.kv_heads or self.heads) * self.value_dim


class Cost(NamedTuple):
    """Work of one call on all batch items and heads. A multiply-add counts as two FLOPs, an exponential as one."""

    flops: float
    bytes: float  #: temporary memory in float32, inputs and output excluded
    keys: float | None = None  #: keys, summaries or features that a query touches


_MOST: dict[type, float] = {int: 2**31 - 1, float: 1e30}  # maximum of a field that names none


def knob(
    default: T,
    *,
    kind: type | None = None,
    kinds: tuple[type, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> T:
    """Declare a field of a method with its default and its allowed range.

    kind: the type of the field if the default is None; otherwise that of the default. kinds: all allowed types, if
        there are several.
    maximum: 2^31 - 1 for integers and 1e30 for floats if it is not given, so that nothing overflows later.
    """
    if maximum is None and choices is None:
        maximum = next((most for each, most in _MOST.items() if each in (kinds or (kind or type(default),))), None)
    limits = {"kind": kind, "kinds": kinds, "minimum": minimum, "above": above, "maximum": maximum, "choices": choices}
    return field(default=default, metadata={k: v for k, v in limits.items() if v is not None})


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods. A subclass with a `name` is registered and can be named in spec strings."""

    name: ClassVar[str] = ""
    target: ClassVar[str] = "softmax"  #: the attention that the method converges to
    budget: ClassVar[str | None] = None  #: the field that trades work for accuracy; always shown by `str()`
    moved: ClassVar[Mapping[str, str]] = {}  #: fields that another method has now -> what an error says about them
    oracle: ClassVar[bool] = False  #: a yardstick that needs the exact result, not a product
    supports: ClassVar[Supports] = Supports()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_method(cls)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_field(self, f.name, f.default, f.metadata)
        object.__setattr__(self, "supports", self.claims())

    def claims(self) -> Supports:
        """Return what this setting supports, where it differs from the class's; read it as `method.supports`."""
        return type(self).supports

    def for_length(self, max_length: int | None) -> Method:
        """Return the setting that runs in a model made for inputs of up to max_length tokens; None: it does not say.

        Modules and models call it for each call, so that all inputs of a model, short or long, run the same setting.
        """
        return self

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute the specification: q (B, H, n_q, d), k (B, H, n_k, d), v (B, H, n_k, e) -> (B, H, n_q, e)."""
        raise NotImplementedError

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Compute the same numbers from the same samples as `reference`, at the method's real cost."""
        return self.reference(q, k, v, call)

    def native(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """Compute the same numbers from the same samples by kernels; return None where these do not cover the call.

        Only called where kernels are loaded for the device and the type of q. With `supports.native_16bit`, q, k and v
        may be bfloat16 or float16, and the result is in float32 or in their type. With `supports.native_gqa`, k and v
        have H_kv heads: head h of q reads head h // call.groups of them.
        """
        return None

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        """Refuse what this *setting* of the method cannot do (the class's limits are in `supports`)."""

    def exact_target(self) -> Method | None:
        """Return a method that computes `target` without approximation; None if the method is its own target."""
        return method("exact")

    def full_budget(self, shape: Shape) -> Method | None:
        """Return the setting at which the method reaches its target for this shape; None if there is none."""
        return None

    def cost(self, shape: Shape, statistics: Mapping[str, Tensor] | None = None) -> Cost:
        """Return the work of one call; `statistics` of `inspect()` refine it where it depends on the data."""
        raise NotImplementedError

    def reach(self, n_q: int, n_k: int, device: torch.device, call: Call) -> Tensor | None:
        """Return which keys a query may use at all, boolean, broadcastable to (B, H, n_q, n_k); None for all.

        For patterns fixed by position: an infinite or NaN key spoils only the rows that reach it.
        """
        return None

    def covers(self, n_k: int) -> bool:
        """Return whether this budget holds as many keys as there are, so that a call may as well be exact."""
        return False

    def past(self, q: Tensor, k: Tensor, v: Tensor, draws: Draws, scale: float) -> Past | None:
        """Return the state that the method keeps of a growing sequence; None if it has none and uses `step` instead.

        q: (B, H, ., d). k, v: (B, H_kv, ., .).
        """
        return None

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return causal attention of the last positions, and the statistics for `inspect()`.

        q: (B, H, n_q, d) of the last n_q positions. k, v: (B, H_kv, n, .). keep: (B, n), False for padded keys; rows of
        padding give zeros.
        """
        raise NotImplementedError

    def step_flops(self, shown: float, touched: float, head_dim: int, value_dim: int) -> float:
        """Return the work of steps whose queries see `shown` keys in all and read `touched` of them."""
        return (shown if self.oracle else touched) * (2.0 * (head_dim + value_dim) + 1.0)  # oracles score every key

    def learned(self, heads: int, head_dim: int, value_dim: int, max_length: int | None) -> nn.Module | None:
        """Return the learned state that `sparing.nn` keeps for this method, or None."""
        return None

    def __str__(self) -> str:
        shown = [f.name for f in fields(self) if getattr(self, f.name) != f.default or f.name == self.budget]
        inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{self.name}({inside})" if inside else self.name


_REGISTRY: dict[str, type[Method]] = {}
_ALIASES: dict[str, str] = {"kernelized": "kernel(kind='gaussian', normalize='none')"}


def register_method(cls: type[Method]) -> None:
    """Let spec strings name a class; each class with a `name` does so itself where it is defined."""
    if "name" in cls.__dict__ and not cls.name.startswith("_"):
        known = _REGISTRY.get(cls.name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"a method named {cls.name!r} exists already: {known.__module__}.{known.__qualname__}")
        _REGISTRY[cls.name] = cls
        _parsed.cache_clear()  # a class that is defined again replaces the old one


def list_methods() -> dict[str, type[Method]]:
    """Return all registered methods, name -> class, sorted by name."""
    return dict(sorted(_REGISTRY.items()))


def method(spec: str | Method) -> Method:
    """Return the method that a spec string names: `"nystrom"`, `"yoso(hashes=32)"`, `"kernel(kind=elu)"`.

    The grammar is a Python call with literal keyword values; a bare word is a string. Nothing is evaluated.
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"method must be a Method or a spec string such as 'nystrom(landmarks=64)', got {spec!r}")
    return _parsed(spec)


@functools.lru_cache(maxsize=256)
def _parsed(spec: str) -> Method:
    name, settings = parse(spec)
    if name in _ALIASES:
        name, preset = parse(_ALIASES[name])
        settings = {**preset, **settings}
    if name not in _REGISTRY:
        known = ", ".join([*list_methods(), *_ALIASES])
        raise ValueError(f"method: unknown name {shown(name)} in {shown(spec)}; known methods: {known}")
    cls = _REGISTRY[name]
    known_fields = [f.name for f in fields(cls)]
    for key in settings:
        if key not in known_fields:
            has = f"its fields are {', '.join(known_fields)}" if known_fields else "it has no fields"
            moved = f"; {cls.moved[key]}" if key in cls.moved else ""
            raise ValueError(f"method: {name} has no field {shown(key)} (in {shown(spec)}); {has}{moved}")
    return cls(**settings)


def _check_field(owner: Method, name: str, default: Any, limits: Mapping[str, Any]) -> None:
    value = getattr(owner, name)
    label = f"{owner.name or type(owner).__name__}: {name}={shown(value)}"
    if "choices" in limits:
        if not any(value == c and type(value) is type(c) for c in limits["choices"]):
            raise ValueError(f"{label} is not one of {', '.join(map(repr, limits['choices']))}")
        return
    if value is default:
        return
    kind = limits.get("kind", type(default))
    if kind is float and type(value) is int:
        value = float(value) if value.bit_length() < 1000 else math.inf
        object.__setattr__(owner, name, value)
    kinds = limits.get("kinds", (kind,))
    if type(value) not in kinds and default is not MISSING:
        names = " or ".join([each.__name__ for each in kinds] + ["None"] * (default is None))
        raise TypeError(f"{label} must be of type {names}")
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{label} must be finite")
    for key, ok, sign in (
        ("minimum", lambda x, y: x >= y, "at least"),
        ("above", lambda x, y: x > y, "above"),
        ("maximum", lambda x, y: x <= y, "at most"),
    ):
        if key in limits and not ok(value, limits[key]):
            raise ValueError(f"{label} must be {sign} {limits[key]}")
