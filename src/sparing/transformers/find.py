"""The attention layers of a model, and what can be known of each before it runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.transformers.adapters import KNOWN, adapter_of
from sparing.transformers.deferred import Deferred

if TYPE_CHECKING:
    from sparing.transformers.own import Served

_VALUE_LAYERS = ("value", "v_proj", "v_lin", "v", "linear_v")
_CROSS = re.compile(r"cross|encdec|encoder_attn|encoder_decoder", re.IGNORECASE)
_PROJECTION = re.compile(r"^(q|k|v|query|key|value|qkv|c_attn|in_proj|w_?qkv)($|_)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention module of a model."""

    name: str  #: within the model that was given
    index: int
    stream: int  #: what keys its random streams: its number in the model
    module: nn.Module
    hosts: tuple[Any, ...]  #: the configs that decide how it is run and which mask it gets
    causal: bool
    cross: bool
    window: int | None  #: it attends within a window, by its mask
    biased: bool  #: it adds a position bias to the scores
    value: str | None  #: the name of its own linear layer of the values
    foreign: str | None  #: why it cannot run anything but what it has
    own: type[Served] | None = None  #: it computes its own attention, and takes on this class to run methods

    @property
    def target(self) -> str:
        """The attention that the layer was trained with."""
        return "softmax" if self.own is None else self.own.target

    def method(self, spec: str | Method) -> Method:
        """What a spec means here: a bare name takes the settings of a layer that runs such a method by itself."""
        if self.own is not None and isinstance(spec, str):
            return self.own.settings(self.module, spec.strip()) or _method(spec)
        return _method(spec)

    def refusal(self, method: Method) -> str | None:
        """Why this layer cannot run the method; None where it can."""
        can, name = method.supports, method.name
        if self.foreign is not None:
            return self.foreign
        if name == "exact":
            return None
        if self.causal and not can.causal:
            return f"it is causal, and {name} is not"
        if self.cross and not can.cross_attention:
            return f"it is cross attention, which {name} does not support"
        if self.cross and can.mixes_queries:
            return f"it is cross attention, and {name} would let later tokens of the target change earlier ones"
        if self.biased and can.attn_mask != "any":
            return f"it adds a position bias to the scores, which {name} does not support"
        if self.own is not None and (why := self.own.refusal(self.module, method)) is not None:
            return why
        if can.projection and self.value is None:
            kind = type(self.module).__name__
            return f"{name} needs a linear layer of the values, and {kind} has no plain one of its own"
        return None


def find(model: nn.Module) -> list[Layer]:
    """The attention layers, in the order of `named_modules()`; an error where there are none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers: list[Layer] = []
    for name, module, host, makes_causal in _walk(model, "", None, False):
        hooked = uses_hook(module)
        if hooked or adapter_of(module) is not None or _looks_like_attention(module):
            layers.append(_describe(name, len(layers), module, host, hooked, makes_causal))
    numbers: list[Any] = [getattr(layer.module, "layer_idx", None) for layer in layers]
    if None not in numbers and len(set(numbers)) == len(numbers):  # a part of a model is numbered like the whole
        layers = [replace(layer, stream=number) for layer, number in zip(layers, numbers, strict=True)]
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no attention modules that sparing knows, none that asks transformers' "
            "registry for its attention; leave it as it is"
        )
    return layers


def _walk(
    module: nn.Module, name: str, host: PreTrainedModel | None, makes_causal: bool, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel | None, bool]]:
    """Every module once, with the innermost pretrained model around it, and whether causal masks are made for it."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, PreTrainedModel):
        host, makes_causal = module, False
    made = {name for name in _code(module).co_names if name.startswith("create_") and name.endswith("_mask")}
    if made:
        makes_causal = all("causal" in name for name in made)
    yield name, module, host, makes_causal
    for child, inner in module.named_children():
        yield from _walk(inner, f"{name}.{child}" if name else child, host, makes_causal, seen)


def _describe(
    name: str, index: int, module: nn.Module, host: PreTrainedModel | None, hooked: bool, makes_causal: bool
) -> Layer:
    kind = type(module).__name__
    config = getattr(module, "config", None)
    own = None if hooked else adapter_of(module)
    foreign = None
    if own is not None:
        if "forward" in vars(module):
            own, foreign = None, f"{kind} got another forward, by accelerate's hooks for example"
    elif not hooked:
        foreign = (
            f"{kind} computes its own attention, for which sparing has no adapter; there are adapters for {KNOWN}, and "
            "other models must ask transformers' registry for their attention"
        )
    elif config is None:
        foreign = f"{kind} has no config that names its attention"
    elif "sdpa" in _constants(_code(module)):
        foreign = f"{kind} does other things under other names than 'sdpa'"
    elif host is not None and not getattr(host, "_supports_sdpa", True):
        foreign = f"{type(host).__name__} does not run on scaled_dot_product_attention"
    hosts = [config] if config is not None else []
    if host is not None and host.config is not config:
        hosts.append(host.config)
    cross = bool(getattr(module, "is_cross_attention", False) or _CROSS.search(".".join([*name.split(".")[-3:], kind])))
    causal = makes_causal or getattr(module, "is_causal", False) is True
    causal = causal and getattr(config, "is_causal", True) is not False
    value = next((n for n in _VALUE_LAYERS if _is_plain_linear(getattr(module, n, None))), None)
    return Layer(
        name=name, index=index, stream=index, module=module, hosts=tuple(hosts) if hooked else (), foreign=foreign,
        cross=cross,
        causal=causal and not cross, value=value, window=_window(module, config),
        biased=(not cross and _adds_bias(module)) or (own is not None and own.biased),
        own=own,
    )  # fmt: skip


def _adds_bias(module: nn.Module) -> bool:
    """Whether it has relative positions that go into the scores: T5, and vision models with a table of them."""
    tables = ("relative_position_bias", "relative_position_bias_table")
    return hasattr(module, "has_relative_attention_bias") or any(getattr(module, t, None) is not None for t in tables)


def _is_plain_linear(layer: object) -> bool:
    """Whether x W^T + b is all it does: nothing hangs on it that a method on x and W would pass by."""
    if isinstance(layer, Deferred):
        return True
    hooked = isinstance(layer, nn.Module) and (layer._forward_hooks or layer._forward_pre_hooks)
    return type(layer) is nn.Linear and not hooked and "forward" not in vars(layer)


def _window(module: nn.Module, config: Any) -> int | None:
    """The width of a layer that is local by its mask; None where it covers every position the model has."""
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and number is not None and number < len(kinds):
        local = kinds[number] in ("sliding_attention", "chunked_attention")
    else:
        local = not kinds
    width = getattr(module, "sliding_window", None) or (local and getattr(config, "sliding_window", None)) or None
    if kinds and local and width is None:
        width = getattr(config, "attention_chunk_size", None) or 1
    longest = getattr(config, "max_position_embeddings", None)
    return width if width is not None and (longest is None or width < longest) else None


def uses_hook(module: nn.Module) -> bool:
    """Whether the module asks transformers' registry for its attention function."""
    return "ALL_ATTENTION_FUNCTIONS" in _code(module).co_names


def _code(module: nn.Module) -> CodeType:
    forward = inspect.unwrap(type(module).forward)
    return getattr(forward, "__code__", find.__code__)


def _constants(code: CodeType) -> set[Any]:
    found: set[Any] = set()
    for constant in code.co_consts:
        found.update(constant if isinstance(constant, tuple | frozenset) else (constant,))
    return found


def _looks_like_attention(module: nn.Module) -> bool:
    """torch's attention, or a class of that name with projections of its own."""
    return isinstance(module, nn.MultiheadAttention) or (
        "Attention" in type(module).__name__
        and any(_PROJECTION.match(child) for child in dict(module.named_children()))
    )
