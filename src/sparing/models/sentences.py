"""Models of sentence-transformers: the encoder inside, and what makes one embedding of its tokens.

The package is optional. Its models are recognised by the module of their class, so that nothing is imported for others.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.from_json import parse

_MEANS = ("pooling_mode_mean_tokens", "pooling_mode")  # entries of a pooling's config that name the mean


class SentenceParts(NamedTuple):
    """What a model of sentence-transformers is made of."""

    model: Any  #: of transformers
    tokenizer: Any
    pooling: Pooling | None  #: None: it ends in scores, not in an embedding (CrossEncoder)
    max_length: int | None  #: tokens at which texts are cut
    prompt: str = ""  #: before every text


class Pooling:
    """The modules behind the encoder, which end in the embedding of a text."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the embedding [d] of the hidden states [n, d] of a text."""
        mask = torch.ones(1, len(hidden), dtype=torch.long, device=hidden.device)
        features: dict[str, Any] = {"token_embeddings": hidden[None], "attention_mask": mask}
        for module in self.modules:
            features = module(features)
        found: Tensor = features["sentence_embedding"][0]
        return found

    def __repr__(self) -> str:
        return " -> ".join(str(module) for module in self.modules)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights of its modules, as of a dense layer."""
        found: dict[str, Tensor] = {}
        for number, module in enumerate(self.modules):
            found |= {f"pooling.{number}.{name}": weight for name, weight in module.state_dict().items()}
        return found


def is_sentence_model(model: Any) -> bool:
    """Return whether a model is one of sentence-transformers."""
    return any(cls.__module__.partition(".")[0] == "sentence_transformers" for cls in type(model).__mro__)


def parts_of(model: Any) -> SentenceParts:
    """Return the parts of a `SentenceTransformer` or a `CrossEncoder`, or raise if it has others."""
    kind = type(model).__name__
    inside = [part for part in model.children() if hasattr(part, "auto_model")]
    found = inside[0].auto_model if inside else getattr(model, "model", None)
    if found is None or not hasattr(found, "config"):
        raise ValueError(f"model: {kind} holds no model of transformers in its first module; pass the one to measure")
    length = getattr(model, "max_seq_length", None) or getattr(model, "max_length", None)
    if kind == "CrossEncoder":
        return SentenceParts(found, model.tokenizer, None, length)
    modules = list(model.children())
    if not inside or modules[0] is not inside[0]:
        raise ValueError(f"model: {kind} does not begin with an encoder; pass the encoder to measure")
    prompt = (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None), "")
    return SentenceParts(found, model.tokenizer, Pooling(modules[1:]), length, prompt)


def load_sentences(folder: str, dtype: torch.dtype | str) -> Any | None:
    """Return the `SentenceTransformer` of a local folder; None if it is none, or the package is not installed."""
    if not (Path(folder) / "modules.json").is_file() or find_spec("sentence_transformers") is None:
        return None
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype}, trust_remote_code=False)


def pools_otherwise(folder: str) -> bool:
    """Return whether a local folder says that its embeddings are not plain means over tokens, normalised or not."""
    try:
        listed = parse((Path(folder) / "modules.json").read_text(encoding="utf-8"))
        for each in listed[1:]:
            kind = each["type"].rpartition(".")[2]
            if kind == "Pooling":
                config = parse((Path(folder) / each["path"] / "config.json").read_text(encoding="utf-8"))
                chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
                if chosen != [_MEANS[0]] and config.get(_MEANS[1]) != "mean":
                    return True
            elif kind != "Normalize":
                return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return False
