"""Make the masks of a model, and read the mask of each call.

`mask_function` makes the masks of a whole model, in a small form. `read_mask` reads the mask that a layer gets as a
`ModelMask`, which gives `attention()`, SDPA and an index the form that each of them takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from sparing.transformers.families import misreads_masks
from sparing.transformers.state import NAME


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | None:
    """Return the mask that transformers asks for, in its smallest form.

    None: nothing but causality hides keys. [B, n_q] boolean: the padding of a causal prompt. [B, 1, n_q, n_k] boolean:
    anything else; a view of the padding if nothing else hides keys.
    """
    tracing = torch.compiler.is_compiling()
    kind: type = type(others.get("config"))
    if not tracing and misreads_masks(kind):
        raise RuntimeError(
            f"models of {kind.__name__} compute attention by their own code, and would misread the mask of "
            f"attn_implementation={NAME!r}; load the model without it, then call sparing.approximate(model, method)"
        )
    padding = None if attention_mask is None else attention_mask[:, : kv_length + kv_offset]
    within = others.get("local_size") is not None and kv_length < others["local_size"]  # a window that hides nothing
    start = kv_offset == 0 and (isinstance(q_offset, int) or not tracing) and bool(q_offset == 0)
    causal = (mask_function is masking_utils.causal_mask_function or within) and allow_is_causal_skip
    full = (mask_function is masking_utils.bidirectional_mask_function or within) and allow_is_bidirectional_skip
    if causal and start and q_length > 1:
        padding = None if padding is None else padding[:, :q_length]
        if padding is None or padding.shape[1] == q_length:
            return None if padding is None or (not tracing and bool(padding.all())) else padding
    if full and kv_offset == 0:
        if padding is None or (not tracing and padding.shape[1] == kv_length and bool(padding.all())):
            return None
        if padding.shape[1] == kv_length:
            return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    return masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip, **others,
    )  # fmt: skip


@dataclass(eq=False)
class ModelMask:
    """The mask of one call: n_q queries, which are the last of n_k positions if they continue a cache."""

    tensor: Tensor | None  #: [B, n_q] boolean, the padding of a causal prompt; or [B, 1 or H, n_q, n_k], any mask
    written_out: bool  #: `tensor` has an entry for each query and key, and includes causality
    causal: bool  #: later keys are hidden too, which `tensor` does not include
    n_q: int
    n_k: int

    def for_sdpa(self) -> Tensor | None:
        """Return the mask as SDPA takes it."""
        return self.tensor if self.tensor is None or self.written_out else _causal_square(self.tensor, self.n_k)

    def for_door(self, bias: Tensor | None) -> Tensor | None:
        """Return the mask as `attention()` takes it beside `is_causal`, with a position bias added."""
        mask = self.tensor if self.tensor is None or self.written_out else self.tensor[:, None, None, :]
        return mask if bias is None else add_bias(bias, mask)

    def padding(self) -> tuple[bool, Tensor | None]:
        """Return whether causality and padding are all that the mask hides, and the padding, [B, n_k] or None."""
        if self.tensor is None or not self.written_out:
            return True, self.tensor
        found = _padding_of(self.tensor, self.n_q, self.n_k, padded_rows=False)
        return found is not None, found


def read_mask(mask: Tensor | None, n_q: int, n_k: int, *, looks_back: bool, simplify: bool) -> ModelMask:
    """Read the mask that a model passes to a layer.

    looks_back: queries see no later keys.
    simplify: read a full causal mask with padding as its padding; not while torch.compile traces.
    """
    if mask is not None and simplify and n_q == n_k > 1 and mask.ndim == 4:
        found = _padding_of(mask, n_q, n_k, padded_rows=True)
        mask = mask if found is None else found
    written_out = mask is not None and mask.ndim != 2
    return ModelMask(mask, written_out, looks_back and n_q > 1 and not written_out, n_q, n_k)


def hides_rest(mask: Tensor | None, *, written_out: bool) -> bool:
    """Return whether the mask of n_q causal queries hides all keys after the first n_q: a prompt in a static cache.

    written_out: look into masks [., ., n_q, n_k] too, which older versions of transformers make for such prompts.
    """
    if mask is None or mask.ndim == 2:
        return True
    return written_out and not torch.compiler.is_compiling() and bool(_hidden(mask[..., mask.shape[-2] :]).all())


def cut_mask(mask: Tensor | None, filled: int) -> Tensor | None:
    """Return a mask without the empty positions at the end of a static cache; None if it hides nothing else."""
    if mask is None or mask.ndim == 2:  # of the queries' own length
        return mask
    mask = mask[..., :filled]
    return None if mask.dtype == torch.bool and mask.shape[-2] == 1 and bool(mask.all()) else mask


def add_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return the bias with -inf where the mask hides a key; a sum in 16 bits may exceed the lowest number."""
    if mask is None:
        return bias
    total = bias if mask.dtype == torch.bool else bias + mask
    return total.masked_fill(_hidden(mask), -torch.inf)


def shown_keys(mask: Tensor) -> Tensor:
    """Return which keys at least one query of one head may see, [B, 1, 1, n_k], from a boolean or additive mask."""
    return (~_hidden(mask)).any(-2, keepdim=True).any(1, keepdim=True)


def is_padding(mask: Tensor | None) -> bool:
    """Return whether a mask hides the same keys from all queries and heads, or nothing, by its shape and storage."""
    if mask is None:
        return True
    return mask.dtype == torch.bool and all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (1, -2))


def count_valid_keys(mask: Tensor | None, batch: int, n_k: int) -> list[int]:
    """Return the number of valid keys of each item; n_k unless the mask is nothing but padding."""
    if mask is None or not is_padding(mask):
        return [n_k] * batch
    found: list[int] = mask[:, 0, 0].sum(-1).tolist()
    return found if len(found) == batch else found * batch


def _hidden(mask: Tensor) -> Tensor:
    """Return where a mask, boolean or additive, hides a key."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def _causal_square(padding: Tensor, n_k: int) -> Tensor:
    """Return the full mask [B, 1, n_q, n_k] of a causal prompt with padding [B, n_q]; keys after it are hidden."""
    n_q = padding.shape[1]
    causal = torch.ones(n_q, n_k, dtype=torch.bool, device=padding.device).tril()
    return causal & nn.functional.pad(padding, (0, n_k - n_q))[:, None, None, :]


def _padding_of(mask: Tensor, n_q: int, n_k: int, *, padded_rows: bool) -> Tensor | None:
    """Return the padding [B, n_k] of a mask of the last n_q of n_k positions; None if it hides anything else.

    padded_rows: the rows of padded queries must be causal too; else they are ignored.
    """
    if mask.shape[1] != 1 or mask.shape[2:] != (n_q, n_k) or mask.requires_grad:
        return None
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((mask[~shown] <= torch.finfo(mask.dtype).min).all()):
        return None
    padding = shown[:, 0, -1]
    if n_q > 1:
        causal = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril(n_k - n_q) & padding[:, None]
        rows = shown[:, 0]
        if not padded_rows:
            valid = padding[:, n_k - n_q :, None]
            causal, rows = causal & valid, rows & valid
        if not torch.equal(rows, causal):
            return None
    return padding
