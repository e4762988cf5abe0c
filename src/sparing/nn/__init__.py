"""Modules for training: attention with any method, stacks of it, and models on top."""

from sparing.nn.attention import MultiheadAttention
from sparing.nn.blocks import Block, Decoder, Encoder
from sparing.nn.models import CausalLM, Classifier, DualTower, MaskedLM, Pretrained, Pretraining

__all__ = [
    "Block",
    "CausalLM",
    "Classifier",
    "Decoder",
    "DualTower",
    "Encoder",
    "MaskedLM",
    "MultiheadAttention",
    "Pretrained",
    "Pretraining",
]
