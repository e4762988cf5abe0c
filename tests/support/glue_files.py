"""A small classifier and files of GLUE's form, made in a test."""

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from sparing_lab.tasks.glue import TASKS

WORDS = ["a", "b", "c", "d", "e", "f", "good", "bad", "film", "very", "not", "it", "is"]


def classifier(folder, labels=2, layers=2, encoder=False):
    """BERT with random weights and a tokenizer of few words; encoder: without its head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=32, num_attention_heads=4, num_hidden_layers=layers, intermediate_size=32,
        num_labels=labels, initializer_range=0.4, max_position_embeddings=140,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    (model.bert if encoder else model).save_pretrained(folder)
    return folder


def write(data, task, text, split="dev"):
    path = TASKS[task].path(data, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return data


def sentences(count=12, words=4):
    """Labelled lines of SST-2, of equal length."""
    lines = [" ".join(WORDS[(3 * i + k) % len(WORDS)] for k in range(words)) for i in range(count)]
    return "sentence\tlabel\n" + "".join(f"{line}\t{i % 2}\n" for i, line in enumerate(lines))
