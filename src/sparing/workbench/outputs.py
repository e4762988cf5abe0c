"""Digests of a model's outputs as plain data, and figures that compare two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.from_json import build
from sparing.models import Subject

Digest = dict[str, Any]  #: of one document's output: numbers and lists of them, which JSON keeps to the bit


def digest(subject: Subject, ids: Tensor, output: Any, *, item: int = 0) -> Digest:
    """Return what `END_OF` needs of the model's output for the tokens [n] of a document.

    item: the number of the document in a batch without padding.
    """
    if subject.kind == "encoder":
        return {"embedding": subject.embedding(output.last_hidden_state[item]).tolist()}
    if subject.kind == "language model":
        logits, wanted = output.logits[item, :-1], ids[1:].to(output.logits.device)
        loss = float(torch.nn.functional.cross_entropy(logits.float(), wanted))
        return {"loss": loss, "next": logits.argmax(-1).tolist()}
    apart = getattr(subject.model.config, "problem_type", None) == "multi_label_classification"
    return {"logits": output.logits[item].double().tolist(), "apart": apart}


@dataclass(frozen=True)
class _EncoderDigest:
    embedding: tuple[float, ...]


@dataclass(frozen=True)
class _LanguageModelDigest:
    loss: float
    next: tuple[int, ...]


@dataclass(frozen=True)
class _ClassifierDigest:
    logits: tuple[float, ...]
    apart: Any


_DIGESTS: dict[str, type[_EncoderDigest | _LanguageModelDigest | _ClassifierDigest]] = {
    "encoder": _EncoderDigest,
    "language model": _LanguageModelDigest,
    "classifier": _ClassifierDigest,
}


def check_digest(kind: str, kept: Any) -> None:
    """Raise ValueError where `kept` is not a digest of this kind of model."""
    build(_DIGESTS[kind], kept)


def embedding(kept: Digest) -> Tensor:
    """Return the embedding in an encoder's digest."""
    return torch.tensor(kept["embedding"], dtype=torch.float64)


def _of_encoder(exact: Digest, found: Digest) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(embedding(exact), embedding(found), dim=0)
    return {"cosine": float(cosine), "change": 1 - float(cosine)}


def _of_language_model(exact: Digest, found: Digest) -> dict[str, float]:
    """Compare losses in nats per token; `change` is that of the perplexity."""
    same = [a == b for a, b in zip(exact["next"], found["next"], strict=True)]
    change = float(torch.tensor(found["loss"] - exact["loss"]).double().expm1())
    agree = sum(same) / len(same)
    return {"exact_loss": exact["loss"], "loss": found["loss"], "agreement": agree, "change": change}


def _of_classifier(exact: Digest, found: Digest) -> dict[str, float]:
    """Compare classes; `change` is the largest difference of a class's probability, or of the only score."""
    a, b = (torch.tensor(kept["logits"], dtype=torch.float64) for kept in (exact, found))
    if len(a) == 1:
        return {"exact_score": float(a), "score": float(b), "change": abs(float(a - b))}
    likely = torch.sigmoid if exact["apart"] else lambda x: x.softmax(-1)
    change = float((likely(a) - likely(b)).abs().max())
    same = float(a.argmax() == b.argmax())
    return {
        "exact_class": float(a.argmax()),
        "class": float(b.argmax()),
        "agreement": same,
        "change": change,
        "classes": len(a),
    }


#: Figures of a document by kind of model, from the digests of its two outputs, the exact one first;
#: `change` is 0 where nothing changed.
END_OF = {"encoder": _of_encoder, "language model": _of_language_model, "classifier": _of_classifier}


def end_of(kind: str, exact: Sequence[Digest], found: Sequence[Digest]) -> dict[str, float]:
    """Return the figures of a document of one text or two: means, and the similarity of the two (`score`)."""
    each = [END_OF[kind](a, b) for a, b in zip(exact, found, strict=True)]
    means = {name: sum(end[name] for end in each) / len(each) for name in each[0]}
    if len(each) == 1:
        return means
    similar = torch.nn.functional.cosine_similarity
    for name, (first, second) in (("exact_score", exact), ("score", found)):
        means[name] = float(similar(embedding(first), embedding(second), dim=0))
    return means


def nearest(outputs: Sequence[tuple[Digest, Digest]]) -> list[dict[str, float]]:
    """Return the number of each document's nearest other document by cosine, exact and approximated.

    The list is empty without embeddings, or with fewer than three: two documents are always each other's nearest.
    """
    if len(outputs) < 3 or "embedding" not in outputs[0][0]:
        return []
    sides = []
    for side in zip(*outputs, strict=True):
        rows = torch.nn.functional.normalize(torch.stack([embedding(kept) for kept in side]), dim=-1)
        sides.append((rows @ rows.mT).fill_diagonal_(-torch.inf).argmax(-1).tolist())
    return [{"exact_neighbour": float(a), "neighbour": float(b)} for a, b in zip(*sides, strict=True)]
