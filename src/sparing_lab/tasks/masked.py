"""Masked language modelling with a pretrained model: examples with hidden tokens, and the model's error on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparing.models import first_line

HIDDEN = 0.15  #: share of the tokens; 80 % of these are masked, 10 % replaced, 10 % kept (Devlin et al. 2019)
NONE = -100  #: label of tokens that are not predicted


def load(name: str) -> tuple[Any, Any]:
    """Load a masked language model and its tokenizer from a local folder or by a name on the hub."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None
    try:
        model, info = transformers.AutoModelForMaskedLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with the files, or with the way to the hub
        raise ValueError(f"model: {name} cannot be loaded as a masked language model: {first_line(error)}") from None
    if info["missing_keys"]:
        raise ValueError(
            f"model: {name} has no weights for {min(info['missing_keys'])}; it is not a masked language model"
        )
    return model.eval(), tokenizer


def examples(texts: Sequence[str], tokenizer: Any, *, length: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs [count, length], and labels [count, length]: the hidden tokens, `NONE` elsewhere.

    The texts are joined by the separator and cut into pieces that fill the length, with special tokens around each,
    as for RoBERTa (Liu et al. 2019).
    """
    room = length - tokenizer.num_special_tokens_to_add()
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(tokenizer.sep_token_id)
        if len(ids) >= room * count:
            break
    else:
        raise ValueError(f"the texts have {len(ids)} tokens, too few for {count} pieces of {length}")
    pieces = [tokenizer.build_inputs_with_special_tokens(ids[room * i : room * (i + 1)]) for i in range(count)]
    return hide(torch.tensor(pieces), tokenizer, seed=seed)


def hide(ids: Tensor, tokenizer: Any, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return token ids [documents, n] with some of them hidden, and the labels: what these were."""
    random = torch.Generator().manual_seed(seed)
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(ids.shape, generator=random) < HIDDEN) & ~special
    fate = torch.rand(ids.shape, generator=random)
    other = torch.randint(len(tokenizer), ids.shape, generator=random)
    inputs = torch.where(chosen & (fate < 0.8), torch.full_like(ids, tokenizer.mask_token_id), ids)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), other, inputs)
    return inputs, torch.where(chosen, ids, torch.full_like(ids, NONE))


@torch.no_grad()
def wrong(model: Any, inputs: Tensor, hidden: Tensor) -> float:
    """Return the share of the hidden tokens that are not the model's first choice."""
    asked = missed = 0
    for ids, tokens in zip(inputs, hidden, strict=True):
        at = tokens != NONE
        found = model(input_ids=ids[None]).logits[0, at].argmax(-1)
        asked += int(at.sum())
        missed += int((found != tokens[at]).sum())
    if not asked:
        raise ValueError("no token is hidden")
    return missed / asked
