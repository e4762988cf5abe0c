"""Small models with a tokenizer of sorts, for tests of comparisons and plans."""

import torch
from transformers import BertConfig, BertForSequenceClassification

from sparing.tasks.subject import Subject

from zoo import SMALL, TOKENS, build


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
