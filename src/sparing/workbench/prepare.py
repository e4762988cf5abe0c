"""Prepare a measurement: load the model and encode the documents."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.documents import Documents, default
from sparing.models import Subject, load, silent
from sparing.models.sentences import is_sentence_model
from sparing.spec import shown
from sparing.transformers.positions import extend_positions
from sparing.transformers.watch import is_approximated

SHORT = 32  #: tokens below which documents say little about attention
#: A model, or its name, its dtype, its extended positions and its fingerprint.
ModelSource = tuple[str, str, int | None, str] | Subject


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model with encoded documents."""

    subject: Subject
    source: ModelSource  #: what other processes load the model from: its name, if it has one
    rows: tuple[Tensor, ...]  #: token ids of each document
    pairs: tuple[Tensor, ...] | None  #: token ids of a second text of each document
    labels: tuple[float, ...] | None  #: of each document, if there are labels
    data: str  #: a name for the documents
    data_fingerprint: str
    longer: int  #: documents that were truncated
    skipped: int  #: documents without text, or of one token
    types: tuple[Tensor, ...] | None = None  #: token types, where a classifier reads two texts as one
    lines: bool = False  #: whether each line of a plain text file is a document

    @property
    def tokens(self) -> int:
        """The length of the longest document."""
        return max(len(ids) for ids in self.rows)

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens, on which alone the model's output depends."""
        beside = [part for part in (self.pairs, self.types) if part is not None]
        return " with ".join(fingerprint(part) for part in (self.rows, *beside))

    @property
    def typical(self) -> Tensor:
        """A document of median length."""
        return sorted(self.rows, key=len)[len(self.rows) // 2]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the model and the documents before trusting any figure."""
        found = [self.subject.note] if self.subject.note else []
        if len(self.typical) < SHORT:
            found.append(
                f"Short documents: half of them have {len(self.typical)} tokens or fewer, of which most methods read "
                "all; this says nothing about longer ones."
                + (
                    " If each text file is one document, read them with --whole (sparing.documents.read(..., "
                    "whole=True))."
                    if self.lines
                    else ""
                )
            )
        cut = self.subject.sentence_length
        if cut is not None and self.tokens > cut:
            found.append(
                f"sentence-transformers cuts texts at {cut} tokens for this model (max_seq_length); these documents "
                f"have up to {self.tokens}."
            )
        return tuple(found)


def prepare(
    model: Any,
    texts: Documents | Sequence[str] | None,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    documents: int,
    extend: bool = False,
    dtype: str = "auto",
    quiet: bool = False,
) -> Prepared:
    """Load the model, and encode at most `documents` of the first texts, truncated, without empty ones.

    quiet: show no progress of loading.
    """
    given = documents_of(texts)
    if documents < 1:
        raise ValueError(f"documents={documents} must be at least 1")
    if length is not None and length < 2:
        raise ValueError(f"length={length} must be at least 2")
    subject = subject_of(model, tokenizer, dtype, quiet=quiet)
    limit, new = subject.positions, None
    if length is not None and limit is not None and length > limit:
        if not extend:
            raise ValueError(
                f"length={length} is more than the {limit} positions of the model; shorten it, or "
                "repeat its positions: --extend-positions, extend_positions=True"
            )
        new = length
        subject = extended(subject, length)
    usual = 1024 if subject.kind == "language model" else 512
    most = length or min(usual, limit or usual)
    pairs = types = None
    if given.pairs is not None and subject.kind == "classifier":
        rows, types, longer = subject.encode_pairs(given.texts[:documents], given.pairs[:documents], most)
    else:
        rows, longer = subject.encode(given.texts[:documents], most)
    if given.pairs is not None and subject.kind == "language model":
        raise ValueError("pair: an encoder compares two texts and a classifier reads both; this is a language model")
    if given.pairs is not None and subject.kind == "encoder":
        pairs, also = subject.encode(given.pairs[:documents], most)
        longer += also
    kept = [number for number, ids in enumerate(rows) if len(ids) > 1 and (pairs is None or len(pairs[number]) > 1)]
    if not kept:
        raise ValueError("texts: none has two tokens")
    source = (str(model), dtype, new, subject.fingerprint) if isinstance(model, str | Path) else subject
    labels = None
    if given.labels is not None:
        labels = tuple(_label(given.labels[number], subject, pairs is not None) for number in kept)
    return Prepared(
        subject, source, tuple(rows[number] for number in kept),
        None if pairs is None else tuple(pairs[number] for number in kept), labels, given.name, given.fingerprint,
        longer, len(rows) - len(kept) + given.empty, None if types is None else tuple(types[number] for number in kept),
        given.lines,
    )  # fmt: skip


def documents_of(texts: Documents | Sequence[str] | None) -> Documents:
    """Return the user's texts as documents; None stands for the default ones."""
    if texts is None or isinstance(texts, Documents):
        return default() if texts is None else texts
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ValueError(f"texts={shown(texts)} must be a list of texts")
    found = tuple(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise ValueError(f"texts[{number}]={shown(text)} must be a text, not {type(text).__name__}")
    return Documents("texts", found)


def extended(subject: Subject, length: int) -> Subject:
    """Return a copy whose learned positions are repeated for so many tokens."""
    model = extend_positions(copy.deepcopy(subject.model), length)
    return replace(subject, name=f"{subject.name} with positions for {length}", model=model)


def fetched(source: ModelSource) -> Subject:
    """Return the model, in whichever process this is."""
    return source if isinstance(source, Subject) else _loaded(*source)


@functools.lru_cache(maxsize=1)
def _loaded(name: str, dtype: str, length: int | None, fingerprint: str) -> Subject:
    """Load a model once per process, and refuse one whose files have changed since."""
    with silent():
        found = load(name, dtype) if length is None else extended(load(name, dtype), length)
    if found.fingerprint != fingerprint:
        raise ValueError(f"model: {name} has changed while it was measured")
    return found


def fingerprint(rows: Sequence[Tensor]) -> str:
    """Return a hash of token ids."""
    return hashlib.sha256(json.dumps([ids.tolist() for ids in rows]).encode()).hexdigest()[:16]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode; the mode of every module is restored afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def subject_of(model: Any, tokenizer: Any, dtype: str, *, quiet: bool = False) -> Subject:
    """Return the model to measure, loaded if it is a name; raise if it is approximated already."""
    with silent() if quiet else nullcontext():
        found = _subject(model, tokenizer, dtype)
    if is_approximated(found.model):
        raise ValueError("model: it is approximated already and would be compared with itself; restore it first")
    return found


def _subject(model: Any, tokenizer: Any, dtype: str) -> Subject:
    if isinstance(model, str | Path):
        return load(str(model), dtype)
    if dtype != "auto":
        raise ValueError(f"dtype={dtype!r} is for models that are loaded by name; convert this one: model.to(...)")
    if isinstance(model, Subject):
        return model
    if is_sentence_model(model):
        found = Subject.of_sentences(type(model).__name__, model)
        return found if tokenizer is None else replace(found, tokenizer=tokenizer)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model={shown(model)} must be a preset, a folder, a name on the hub, or a model object")
    if tokenizer is None:
        raise ValueError(f"tokenizer: {type(model).__name__} came without one; pass tokenizer=")
    found = Subject(type(model).__name__, model, tokenizer)
    # A head that is neither a language model's nor a classifier's: the encoder below it is measured.
    return found if found.kind != "encoder" else Subject(found.name, model.base_model, tokenizer)


def _label(label: Any, subject: Subject, paired: bool) -> float:
    """Return a label as a number: the class of that name, or the number itself."""
    known = getattr(subject.model.config, "label2id", None) or {}
    if subject.kind == "classifier" and isinstance(label, str) and label in known:
        return float(known[label])
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    if subject.kind == "encoder" and not paired:  # equal or not is all that counts
        return float(int(hashlib.sha256(str(label).encode()).hexdigest()[:12], 16))
    names = (
        f", nor a class of the model, such as {next(iter(known))!r}" if subject.kind == "classifier" and known else ""
    )
    raise ValueError(f"label {label!r} is not a number{names}")
