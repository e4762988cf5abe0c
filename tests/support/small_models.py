"""Small models with a tokenizer of sorts, for tests of comparisons and plans."""

import torch
from transformers import BertConfig, BertForSequenceClassification

from sparing.models import Subject
from tests.support.model_zoo import SMALL, TOKENS, build


class Bytes:
    """A tokenizer of sorts."""

    def __call__(self, text, truncation=False, max_length=None, **options):
        ids = [3 + b % 90 for b in text.encode()]
        return {"input_ids": ids[:max_length] if truncation else ids}


TEXTS = [f"{i} {chr(97 + i) * 7} {'some words and more of them, ' * 3}"[: 80 - i] for i in range(5)]


def subject(name="bert", **options):
    return Subject(name, build(name, **options).eval(), Bytes())


def classifier(labels):
    torch.manual_seed(0)
    config = BertConfig(**TOKENS, **SMALL, num_labels=labels)
    return Subject("classifier", BertForSequenceClassification(config).eval(), Bytes())


def saved(folder, name="bert", **changes):
    """A folder that `sparing compare` takes for a model: a small one, and a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    words = [*special.values(), *map(chr, range(32, 127))][: TOKENS["vocab_size"]]
    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    build(name, **changes).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder)
    return folder
