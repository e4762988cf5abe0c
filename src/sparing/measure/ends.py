"""What happened at the end of a model: outputs in little, as plain data, and what tells two of them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.tasks.subject import Subject

Digest = dict[str, Any]  #: of one document's output; numbers and lists of them, so that JSON keeps it to the bit


def digest(subject: Subject, ids: Tensor, output: Any) -> Digest:
    """What is kept of the model's output for the tokens [n] of a document: all that `END_OF` looks at."""
    if subject.kind == "encoder":
        return {"embedding": output.last_hidden_state[0].double().mean(0).tolist()}
    if subject.kind == "language model":
        logits, wanted = output.logits[0, :-1], ids[1:].to(output.logits.device)
        loss = float(torch.nn.functional.cross_entropy(logits.float(), wanted))
        return {"loss": loss, "next": logits.argmax(-1).tolist()}
    apart = getattr(subject.model.config, "problem_type", None) == "multi_label_classification"
    return {"logits": output.logits[0].double().tolist(), "apart": apart}


def embedding(kept: Digest) -> Tensor:
    """Of an encoder's digest."""
    return torch.tensor(kept["embedding"], dtype=torch.float64)


def _of_encoder(exact: Digest, found: Digest) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(embedding(exact), embedding(found), dim=0)
    return {"cosine": float(cosine), "change": 1 - float(cosine)}


def _of_language_model(exact: Digest, found: Digest) -> dict[str, float]:
    """Losses in nats per token; `change`: of the perplexity."""
    same = [a == b for a, b in zip(exact["next"], found["next"], strict=True)]
    change = float(torch.tensor(found["loss"] - exact["loss"]).double().expm1())
    agree = sum(same) / len(same)
    return {"exact_loss": exact["loss"], "loss": found["loss"], "agreement": agree, "change": change}


def _of_classifier(exact: Digest, found: Digest) -> dict[str, float]:
    """`change`: the largest difference of a class's probability, or of the score, if there is one only."""
    a, b = (torch.tensor(kept["logits"], dtype=torch.float64) for kept in (exact, found))
    if len(a) == 1:
        return {"exact_score": float(a), "score": float(b), "change": abs(float(a - b))}
    likely = torch.sigmoid if exact["apart"] else lambda x: x.softmax(-1)
    change = float((likely(a) - likely(b)).abs().max())
    same = float(a.argmax() == b.argmax())
    return {"exact_class": float(a.argmax()), "class": float(b.argmax()), "agreement": same, "change": change}


#: What is said about a document, by kind of model, from the digests of its two outputs, the exact one first;
#: `change` is 0 where nothing happened.
END_OF = {"encoder": _of_encoder, "language model": _of_language_model, "classifier": _of_classifier}
