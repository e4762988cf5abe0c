"""Load the model to measure: a preset, a local folder, a name on the hub, or the user's own object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.from_json import parse
from sparing.models import minilm, smollm2
from sparing.models.sentences import Pooling, load_sentences, parts_of, pools_otherwise
from sparing.store import readable

PRESETS: dict[str, Callable[[], tuple[Any, Any]]] = {"minilm": minilm.load, "smollm2": smollm2.load}
DTYPES = ("auto", "float32", "bfloat16", "float16")  #: of a model that is loaded
#: Kinds of models by their output: an embedding, the next token, or classes.
KINDS = ("encoder", "language model", "classifier")


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to measure, with its tokenizer and a name."""

    name: str
    model: Any
    tokenizer: Any
    pooling: Pooling | None = None  #: what makes the embedding of an encoder; None: the mean over tokens
    max_length: int | None = None  #: tokens at which sentence-transformers cuts texts, where it made the model
    prompt: str = ""  #: before every text, by sentence-transformers
    note: str = ""  #: what the user should know about the model

    @classmethod
    def of_sentences(cls, name: str, model: Any) -> Subject:
        """Return the model inside a `SentenceTransformer` or a `CrossEncoder`, with its own pooling."""
        found = parts_of(model)
        return cls(name, found.model, found.tokenizer, found.pooling, found.max_length, found.prompt)

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        name = type(self.model).__name__
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return "language model"
        return "classifier" if name.endswith("ForSequenceClassification") else "encoder"

    @property
    def dtype(self) -> str:
        """The type of the model's weights."""
        found: torch.dtype = self.model.dtype
        return str(found).removeprefix("torch.")

    @property
    def positions(self) -> int | None:
        """The longest input that the model was made for, or None if its config does not say."""
        config = self.model.config
        found: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        if found is None:
            return None
        # RoBERTa's positions, and those of its descendants, start after that of the padding.
        tables = [part for name, part in self.model.named_modules() if name.endswith("position_embeddings")]
        padding = next((x for table in tables if (x := getattr(table, "padding_idx", None)) is not None), -1)
        return found - padding - 1

    @property
    def sentence_length(self) -> int | None:
        """The number of tokens at which sentence-transformers cuts texts for this model; None: it has no such limit."""
        if self.max_length is not None:
            return self.max_length
        from transformers.utils.hub import cached_file

        try:
            file = cached_file(
                self.model.config.name_or_path, "sentence_bert_config.json", local_files_only=True,
                _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )  # fmt: skip
            found = None if file is None else parse(Path(file).read_text(encoding="utf-8")).get("max_seq_length")
        except (OSError, ValueError, AttributeError):  # a model that was not loaded by name
            return None
        return found if isinstance(found, int) else None

    @property
    def fingerprint(self) -> str:
        """A hash of the architecture, the config and the weights."""
        digest = hashlib.sha256(type(self.model).__name__.encode())
        settings = {k: v for k, v in self.model.config.to_dict().items() if not k.startswith("_") and k not in _NOT_IT}
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        pooled = {} if self.pooling is None else self.pooling.state_dict()
        if self.pooling is not None or self.prompt:
            digest.update(f"{self.pooling} {self.prompt}".encode())
        for name, weight in sorted({**self.model.state_dict(), **pooled}.items()):
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def embedding(self, hidden: Tensor) -> Tensor:
        """Return the embedding of a text from the hidden states [n, d] of an encoder, in float64."""
        return hidden.double().mean(0) if self.pooling is None else self.pooling(hidden).double()

    def run(self, ids: Tensor, types: Tensor | None = None) -> Any:
        """Run the model on the tokens [n] of one document, unpadded; types: see `encode_pairs`."""
        kinds = {} if types is None else {"token_type_ids": types[None].to(self.model.device)}
        return self.model(input_ids=ids[None].to(self.model.device), **kinds, **self._extra)

    def run_batch(self, rows: Sequence[Tensor], types: Sequence[Tensor] | None = None) -> Any:
        """Run the model on several documents as one batch, padded on the right."""
        longest = max(len(ids) for ids in rows)
        padding = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids = torch.full((len(rows), longest), padding)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        device = self.model.device
        kinds = {}
        if types is not None:
            kinds["token_type_ids"] = torch.nn.utils.rnn.pad_sequence(list(types), batch_first=True).to(device)
        return self.model(input_ids=ids.to(device), attention_mask=mask.to(device), **kinds, **self._extra)

    @property
    def _extra(self) -> dict[str, Any]:
        return {"use_cache": False} if self.kind == "language model" else {}

    def encode(self, texts: Sequence[str], length: int) -> tuple[list[Tensor], int]:
        """Return token ids [n] of each text, at most `length`, and how many texts were truncated."""
        rows, longer = [], 0
        for given in texts:
            text = self.prompt + given
            ids = self.tokenizer(text, truncation=False, verbose=False)["input_ids"]
            if len(ids) > length:
                longer += 1
                ids = self.tokenizer(text, truncation=True, max_length=length)["input_ids"][:length]
            rows.append(torch.tensor(ids))
        return rows, longer

    def encode_pairs(
        self, texts: Sequence[str], pairs: Sequence[str], length: int
    ) -> tuple[list[Tensor], list[Tensor] | None, int]:
        """Encode two texts as one document, as classifiers of pairs read them.

        Return token ids [n] of each document, at most `length`; the token types where the tokenizer gives them, else
        None; and how many documents were truncated. The longer text is truncated first.
        """
        found, longer = [], 0
        for text, pair in zip(texts, pairs, strict=True):
            one = self.tokenizer(text, pair, truncation=False, verbose=False)
            if len(one["input_ids"]) > length:
                longer += 1
                one = self.tokenizer(text, pair, truncation="longest_first", max_length=length)
            found.append(one)
        rows = [torch.tensor(one["input_ids"]) for one in found]
        if not found or "token_type_ids" not in found[0]:
            return rows, None, longer
        return rows, [torch.tensor(one["token_type_ids"]) for one in found], longer


_TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")  # how their files begin
_NOT_IT = ("transformers_version", "sparing", "attn_implementation", "name_or_path")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def silent() -> Iterator[None]:
    """Silence the progress bars of transformers and the hub for a while."""
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:  # there is nothing to silence, and `load` says what is missing
        yield
        return
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def load(name: str, dtype: str = "auto") -> Subject:
    """Load a preset (`minilm`, `smollm2`), a local folder or a name on the hub, in evaluation mode.

    dtype: one of `DTYPES`; "auto" is the type that the checkpoint has, float32 for presets.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if name in PRESETS:
        model, tokenizer = PRESETS[name]()
        return Subject(name, model if dtype == "auto" else model.to(getattr(torch, dtype)), tokenizer)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None
    if not Path(name).exists() and (name.count("/") > 1 or name.startswith((".", "~", "/"))):
        raise ValueError(f"model: there is no folder {name}; presets are {', '.join(PRESETS)}")
    if Path(name).is_dir() and not any(found.name.startswith(_TOKENIZERS) for found in Path(name).iterdir()):
        raise ValueError(f"model: {name} has no tokenizer; save it there: tokenizer.save_pretrained(...)")
    path = Path(name)
    of_a_run = path.name == "model" and path.parent.name  # where `sparing train` writes it
    label = readable(of_a_run or path.name)
    kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        sentences = load_sentences(name, kind)
        if sentences is not None:
            return Subject.of_sentences(label, sentences.eval())
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        wanted = (config.architectures or [""])[0]
        if wanted.endswith(("ForCausalLM", "LMHeadModel")):
            auto: Any = transformers.AutoModelForCausalLM
        elif wanted.endswith("ForSequenceClassification"):
            auto = transformers.AutoModelForSequenceClassification
        else:
            auto = transformers.AutoModel
        model, info = auto.from_pretrained(
            name,
            dtype=kind,
            output_loading_info=True,
            trust_remote_code=False,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # files can be wrong in any way
        raise ValueError(f"model: {name} cannot be loaded: {first_line(error)}") from None
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)  # which an embedding does not use
    if missing:
        raise ValueError(
            f"model: {name} has no weights for {missing[0]}{' and others' * (len(missing) > 1)}, which would be "
            "initialised at random; train it first, or save it with the architecture that it has"
        )
    note = ""
    if pools_otherwise(name):
        note = (
            "This model makes embeddings in its own way (modules.json), and here they are means over tokens: "
            "pip install sentence-transformers, which knows how."
        )
    return Subject(label, model.eval(), tokenizer, note=note)
