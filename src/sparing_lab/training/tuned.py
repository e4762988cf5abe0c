"""A pretrained encoder with a new head for a task, and any method in its attention layers."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.contract import Unsupported
from sparing.contract import method as _method
from sparing.models import first_line
from sparing.models.minilm import weights_folder
from sparing_lab.tasks.trainable import Task
from sparing_lab.tasks.tuning import USUAL, tokenizer_of
from sparing_lab.training.config import Config

# Names of dropout settings: for hidden states, and for attention weights, which few methods support.
_STATES = ("hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop", "classifier_dropout", "seq_classif_dropout")
_WEIGHTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


class Tuned(nn.Module):
    """A transformers model that returns classes or a score, with the signature of `sparing.nn.Classifier`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        """[B, n] each -> [B, classes]"""
        kinds = {} if segments is None else {"token_type_ids": segments}
        return self.model(input_ids=tokens, attention_mask=mask.long(), **kinds).logits


def tuned(task: Task, config: Config) -> Tuned:
    """Return the pretrained model with a new head for the task."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    from sparing.transformers import approximate

    chosen = _method(config.method)
    if chosen.supports.gradient != "full":
        raise Unsupported(f"{chosen} has no gradient for queries and keys, so no model can be trained with it")
    if chosen.learned(1, 8, 8, task.length) is not None:
        raise Unsupported(
            f"{chosen} has parameters of its own, for which a pretrained model has no place; tasks other than glue "
            "train models that have them"
        )
    name: Any = weights_folder() if config.pretrained in (None, USUAL) else config.pretrained
    names = task.labels or ([f"LABEL_{number}" for number in range(task.classes)])
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn that the head is new, which is intended
    try:
        settings = AutoConfig.from_pretrained(name, num_labels=task.classes, trust_remote_code=False)
        room = min(
            getattr(settings, "max_position_embeddings", math.inf),
            tokenizer_of(config.pretrained or USUAL).model_max_length,
        )
        settings.finetuning_task = task.part  # where textattack's models name it
        settings.id2label, settings.label2id = dict(enumerate(names)), {word: n for n, word in enumerate(names)}
        for names_, value in ((_STATES, config.dropout), (_WEIGHTS, 0.0)):
            for each in names_:
                if hasattr(settings, each):
                    setattr(settings, each, value)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, config=settings, dtype=torch.float32, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds of errors for bad files
        raise ValueError(f"pretrained={config.pretrained!r} cannot be loaded: {first_line(error)}") from None
    finally:
        logging.set_verbosity(before)
    if task.length > room:
        raise ValueError(f"max_length={task.length} is more than the {room} positions of the pretrained model")
    if config.method != "exact":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it would warn that the method needs training, which follows
            approximate(model, config.method, seed=None)  # each step draws its own numbers from the run's seed
    return Tuned(model)


def export(model: Tuned, config: Config, folder: Path) -> None:
    """Write the model and its tokenizer as a folder that transformers loads, atomically."""
    new, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    if old.exists() and not folder.exists():  # a process was killed between the two renames below
        os.replace(old, folder)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        model.model.save_pretrained(new)
        tokenizer_of(config.pretrained or USUAL).save_pretrained(new)
    except Exception as error:  # each library raises its own error for a full disk
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"{folder} cannot be written: {first_line(error)}") from None
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def freeze(model: nn.Module, words: str | None) -> None:
    """Freeze the parameters whose names contain one of these comma-separated words."""
    weights = dict(model.named_parameters())
    for word in () if words is None else map(str.strip, words.split(",")):
        found = [name for name in weights if word and word in name]
        if not found:
            parts = sorted({part for name in weights for part in name.split(".") if part.isidentifier()})
            raise ValueError(
                f"frozen={words!r}: no parameter has {word!r} in its name; their names contain {', '.join(parts)}"
            )
        for name in found:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ValueError(f"frozen={words!r} freezes every parameter")
