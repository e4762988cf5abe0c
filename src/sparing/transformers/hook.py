"""The function and the mask that transformers calls under the name "sparing".

Both are registered or neither: with an attention function alone, transformers makes no mask, and padding and causality
are lost without a word. So the function looks at the registry at every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparing.contract import Projection, Unsupported
from sparing.transformers.adapters import misreads_masks
from sparing.transformers.decode import decode, start
from sparing.transformers.deferred import Deferred
from sparing.transformers.masks import biased
from sparing.transformers.resolve import resolve
from sparing.transformers.serve import serve
from sparing.transformers.slot import Slot, slot_of
from sparing.transformers.switch import CHOSEN, NAME

#: Arguments that change no result, or that are already in the mask: a window's width, positions of packed sequences.
_HARMLESS = {
    "cache_position", "deterministic", "hidden_states", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
    "position_ids", "return_dict", "sliding_window", "target_dtype", "use_cache",
}  # fmt: skip


def register() -> None:
    """Make `attn_implementation="sparing"` known to transformers; harmless when repeated."""
    for name in (NAME, CHOSEN):
        AttentionInterface.register(name, attention_function)
        AttentionMaskInterface.register(name, mask_function)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, n_q, d], key and value [B, H_kv, n_k, .] -> ([B, n_q, H, e], no weights)."""
    known = AttentionMaskInterface._global_mapping
    if known.get(NAME) is not mask_function or known.get(CHOSEN) is not mask_function:
        raise RuntimeError(
            f"the mask function registered under {NAME!r} is not sparing's, so padding and causality would be lost; "
            "call sparing.transformers.register() again"
        )
    found = slot_of(module)
    slot = resolve(module) if found is None else found
    for name, argument in others.items():
        if name not in _HARMLESS and argument is not None and argument is not False:
            raise Unsupported(f"{slot.name}: the model passes {name}, which sparing does not know; leave it exact")
    tracing = torch.compiler.is_compiling()
    if not tracing:
        slot.served = True
    given: Tensor | Projection = value
    if slot.projects:
        given = _taken(module, slot, value, query)

    n_q, n_k = query.shape[2], key.shape[2]
    choice = slot.choice
    exact = choice is None or choice.exact
    looks_back = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if looks_back and not exact and n_q == n_k > 1 and attention_mask is not None and attention_mask.ndim == 4:
        attention_mask = _reduced(attention_mask)
    small = attention_mask is None or attention_mask.ndim == 2  # the mask function left causality to us
    causal = looks_back and n_q > 1 and small
    if attention_mask is not None and small and not causal:
        raise RuntimeError(f"{slot.name}: a causal mask of shape {list(attention_mask.shape)} in a layer that is not")

    continues = (n_q == 1 and n_k > 1) or (n_q < n_k and not small and not slot.cross)
    follows = looks_back and position_bias is None and isinstance(given, Tensor) and not tracing
    if choice is not None and continues and follows and choice.decodes:
        steps = decode(slot, choice, query, key, given, attention_mask, dropout)  # type: ignore[arg-type]
        if steps is not None:
            return (steps.transpose(1, 2).contiguous() if n_q > 1 else steps.reshape(-1, 1, *steps.shape[1::2])), None
    elif choice is not None and not tracing and (exact or continues or choice.when == "decode"):
        choice.tally.exact_calls += 1

    begun = None
    if choice is not None and follows and not continues and choice.decodes:
        begun = start(slot, choice, query, key, given, attention_mask, scaling, unasked=found is None)  # type: ignore[arg-type]
    if choice is None or exact or continues or choice.when == "decode":
        whole = given.project(key.shape[1]) if isinstance(given, Projection) else given
        mask = _square(attention_mask, n_k) if attention_mask is not None and small else attention_mask
        if position_bias is not None:
            others["position_bias"] = position_bias
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, whole, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    else:
        keys, values, mask = key, given, attention_mask
        if causal and n_k > n_q:  # the prompt in a static cache, whose other slots are empty
            keys, values = key[:, :, :n_q], given[:, :, :n_q] if isinstance(given, Tensor) else given
            position_bias = None if position_bias is None else position_bias[..., :n_q]
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None, :]
        if position_bias is not None:
            mask = biased(position_bias, mask)
        out = serve(
            slot, choice, query, keys, values, mask, is_causal=causal, scale=scaling, dropout=dropout,
            past=None if begun is None else begun.past,
        )  # fmt: skip
        out = out.transpose(1, 2).contiguous()
    if begun is not None:
        begun.learn(query, key, given)  # type: ignore[arg-type]
    return out, None


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masks.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | None:
    """The mask in its smallest form.

    None: nothing is hidden, beyond causality. [B, n_q] boolean: a causal prompt with padding. [B, 1, n_q, n_k] boolean:
    anything else; without memory of its own where only padding hides keys.
    """
    tracing = torch.compiler.is_compiling()
    kind: type = type(others.get("config"))
    if not tracing and misreads_masks(kind):
        raise RuntimeError(
            f"models of {kind.__name__} compute their attention by themselves, and would misread the mask of "
            f"attn_implementation={NAME!r}; load the model without it, then call sparing.approximate(model, method)"
        )
    padding = None if attention_mask is None else attention_mask[:, : kv_length + kv_offset]
    within = others.get("local_size") is not None and kv_length < others["local_size"]  # a window that hides nothing
    start = kv_offset == 0 and (isinstance(q_offset, int) or not tracing) and bool(q_offset == 0)
    causal = (mask_function is masks.causal_mask_function or within) and allow_is_causal_skip
    full = (mask_function is masks.bidirectional_mask_function or within) and allow_is_bidirectional_skip
    if causal and start and q_length > 1:
        padding = None if padding is None else padding[:, :q_length]
        if padding is None or padding.shape[1] == q_length:
            return None if padding is None or (not tracing and bool(padding.all())) else padding
    if full and kv_offset == 0:
        if padding is None or (not tracing and padding.shape[1] == kv_length and bool(padding.all())):
            return None
        if padding.shape[1] == kv_length:
            return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    return masks.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip, **others,
    )  # fmt: skip


def _taken(module: nn.Module, slot: Slot, value: Tensor, query: Tensor) -> Projection:
    """The projection that the layer's values stand for."""
    layer = getattr(module, slot.value or "", None)
    if not isinstance(layer, Deferred):
        raise Unsupported(
            f"{slot.name}.{slot.value} is another layer than when the model was approximated; restore the model and "
            "approximate it again"
        )
    return layer.take(value, query)


def _square(padding: Tensor, n_k: int) -> Tensor:
    """[B, n_q] of a causal prompt -> [B, 1, n_q, n_k], which SDPA takes; keys after the prompt are empty slots."""
    n_q = padding.shape[1]
    causal = torch.ones(n_q, n_k, dtype=torch.bool, device=padding.device).tril()
    return causal & nn.functional.pad(padding, (0, n_k - n_q))[:, None, None, :]


def _reduced(mask: Tensor) -> Tensor:
    """A causal mask with padding that was written out, as its padding [B, n]; any other mask as it is."""
    if torch.compiler.is_compiling() or mask.shape[1] != 1 or mask.requires_grad:
        return mask
    shown = mask if mask.dtype == torch.bool else mask == 0
    padding = shown[:, 0, -1]
    plain = torch.equal(shown, _square(padding, padding.shape[1]))
    if plain and mask.dtype != torch.bool:  # nothing but 0 and the lowest number
        plain = bool((mask[~shown] <= torch.finfo(mask.dtype).min).all())
    return padding if plain else mask
