"""Find the attention layers of a model, and what each can run, before the model runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.transformers.families import KNOWN, Family, family_of

_VALUE_LAYERS = ("value", "v_proj", "v_lin", "v", "linear_v")
_CROSS = re.compile(r"cross|encdec|encoder_attn|encoder_decoder", re.IGNORECASE)
_PROJECTION = re.compile(r"^(q|k|v|query|key|value|qkv|c_attn|in_proj|w_?qkv)($|_)", re.IGNORECASE)


class LinearStandIn(nn.Linear):
    """Base class of layers that sparing puts in the place of a plain linear layer."""


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention module of a model."""

    name: str  #: of the module within the model
    index: int  #: position in the list that `find` returns
    stream: int  #: the layer's number in the model, which selects its random streams
    module: nn.Module
    config: Any  #: the config of its model, or of the part of a model that it belongs to
    configs: tuple[Any, ...]  #: the configs that decide how it is run and which mask it gets
    causal: bool
    cross: bool
    window: int | None  #: width of the window that its mask sets; None: it attends to everything
    biased: bool  #: it adds a position bias to the scores
    value: str | None  #: name of the module's linear layer of the values, if it has one
    unsupported: str | None  #: why it can run nothing but its own attention
    family: Family | None = None  #: set if it computes attention by its own code, for which there is an adapter

    @property
    def target(self) -> str:
        """The attention that the layer was trained with."""
        return "softmax" if self.family is None else self.family.target

    def method(self, spec: str | Method) -> Method:
        """Return the method of a spec; a name alone takes the settings of a layer that runs such a method itself."""
        if self.family is not None and isinstance(spec, str):
            return self.family.own_method(self.module, spec.strip()) or _method(spec)
        return _method(spec)

    def refusal(self, method: Method) -> str | None:
        """Return why this layer cannot run the method, or None if it can."""
        can, name = method.supports, method.name
        if self.unsupported is not None:
            return self.unsupported
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
        if self.family is not None and (why := self.family.refusal(self.module, method)) is not None:
            return why
        if can.projection and self.value is None:
            kind = type(self.module).__name__
            return f"{name} needs a linear layer of the values, and {kind} has no plain one of its own"
        return None


def find(model: nn.Module) -> list[AttentionLayer]:
    """Return the attention layers of a model in the order of `named_modules()`, or raise if there are none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers: list[AttentionLayer] = []
    for name, module, pretrained, makes_causal in _walk(model, "", None, False):
        hooked = uses_hook(module)
        if hooked or family_of(module) is not None or _looks_like_attention(module):
            layers.append(_describe(name, len(layers), module, pretrained, hooked, makes_causal))
    numbers: list[Any] = [getattr(layer.module, "layer_idx", None) for layer in layers]
    if None not in numbers and len(set(numbers)) == len(numbers):  # a part of a model has the numbers of the whole
        layers = [replace(layer, stream=number) for layer, number in zip(layers, numbers, strict=True)]
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no attention modules that sparing knows, and none that gets its "
            "attention from transformers' registry; leave it as it is"
        )
    return layers


def base_name(model: nn.Module, name: str) -> str:
    """Return a layer's name within the base model, so that a recipe fits with and without a head."""
    name = name.removeprefix("_orig_mod.")  # of a compiled model
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return name.removeprefix(prefix) if prefix != "." else name


def _walk(
    module: nn.Module, name: str, pretrained: PreTrainedModel | None, makes_causal: bool, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel | None, bool]]:
    """Yield every module once, with the innermost pretrained model around it and whether its masks are causal."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, PreTrainedModel):
        pretrained, makes_causal = module, False
    made = {name for name in _code(module).co_names if name.startswith("create_") and name.endswith("_mask")}
    if made:
        makes_causal = all("causal" in name for name in made)
    yield name, module, pretrained, makes_causal
    for child, inner in module.named_children():
        yield from _walk(inner, f"{name}.{child}" if name else child, pretrained, makes_causal, seen)


def _describe(
    name: str, index: int, module: nn.Module, pretrained: PreTrainedModel | None, hooked: bool, makes_causal: bool
) -> AttentionLayer:
    kind = type(module).__name__
    config = getattr(module, "config", None)
    family = None if hooked else family_of(module)
    unsupported = None
    if family is not None:
        if "forward" in vars(module):
            family, unsupported = None, f"{kind} has a replaced forward, as by accelerate's hooks"
    elif not hooked:
        unsupported = (
            f"{kind} computes its own attention, for which sparing has no adapter; there are adapters for {KNOWN}, and "
            "other models must get their attention from transformers' registry"
        )
    elif config is None:
        unsupported = f"{kind} has no config that names its attention"
    elif "sdpa" in _constants(_code(module)):
        unsupported = f"{kind} behaves differently under other names than 'sdpa'"
    elif pretrained is not None and not getattr(pretrained, "_supports_sdpa", True):
        unsupported = f"{type(pretrained).__name__} does not run on scaled_dot_product_attention"
    configs = [config] if config is not None else []
    if pretrained is not None and pretrained.config is not config:
        configs.append(pretrained.config)
    cross = bool(getattr(module, "is_cross_attention", False) or _CROSS.search(".".join([*name.split(".")[-3:], kind])))
    causal = makes_causal or getattr(module, "is_causal", False) is True
    causal = causal and getattr(config, "is_causal", True) is not False
    value = next((n for n in _VALUE_LAYERS if _is_plain_linear(getattr(module, n, None))), None)
    return AttentionLayer(
        name=name, index=index, stream=index, module=module,
        config=next(iter(configs), None), configs=tuple(configs) if hooked else (),
        causal=causal and not cross, cross=cross, window=_window(module, config), value=value, family=family,
        biased=(not cross and _adds_bias(module)) or (family is not None and family.biased), unsupported=unsupported,
    )  # fmt: skip


def _adds_bias(module: nn.Module) -> bool:
    """Return whether the module adds relative positions to its scores (T5, and vision models with a table)."""
    tables = ("relative_position_bias", "relative_position_bias_table")
    return hasattr(module, "has_relative_attention_bias") or any(getattr(module, t, None) is not None for t in tables)


def _is_plain_linear(layer: object) -> bool:
    """Return whether the layer computes x W^T + b of plain numbers, without hooks, which a method would bypass."""
    if isinstance(layer, LinearStandIn):
        return True
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return False
    return type(layer.weight) in (nn.Parameter, Tensor)  # others stand for quantised or distributed weights


def _window(module: nn.Module, config: Any) -> int | None:
    """Return the window that a layer's mask sets, or None if it covers every position of the model."""
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
    """Return whether the module gets its attention function from transformers' registry."""
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
    """Return whether the module is torch's attention, or has "Attention" in its class name and projections."""
    return isinstance(module, nn.MultiheadAttention) or (
        "Attention" in type(module).__name__
        and any(_PROJECTION.match(child) for child in dict(module.named_children()))
    )
