"""Tables 1 and 2 of the Monte-Carlo paper, and the tuned weights that its supplement names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """Of one task: for alpha 0.2, 0.4, 0.6 and 1."""

    results: Mapping[str, tuple[float, ...]]  #: scores x 100 by name, that of the exact model first
    flops: tuple[float, ...]  #: times that are saved


PAPER_TABLES: dict[str, dict[str, Line]] = {
    "BERT": {
        "CoLA": Line({"matthews": (53.74, 53.74, 53.90, 53.78, 50.95)}, (11.44, 12.62, 14.28, 18.38)),
        "SST-2": Line({"accuracy": (92.43, 92.26, 92.04, 91.22, 80.66)}, (5.58, 6.71, 8.13, 12.34)),
        "MRPC": Line(
            {"accuracy": (84.55, 84.36, 83.77, 82.28, 65.95), "f1": (89.41, 88.96, 88.86, 87.69, 73.50)},
            (3.04, 3.80, 4.62, 7.14),
        ),
        "STS-B": Line(
            {"pearson": (88.04, 87.84, 82.69, 67.90, 33.55), "spearman": (87.63, 87.21, 81.04, 67.54, 28.53)},
            (4.80, 5.95, 7.35, 12.40),
        ),
        "QQP": Line(
            {"accuracy": (90.90, 90.89, 90.74, 89.98, 78.20), "f1": (87.81, 87.79, 87.63, 86.55, 73.61)},
            (4.76, 5.73, 6.89, 10.30),
        ),
        "MNLI": Line({"accuracy": (83.60, 83.50, 82.60, 78.62, 71.43)}, (3.75, 4.76, 5.88, 9.61)),
        "MNLI-mm": Line({"accuracy": (84.79, 84.72, 83.83, 79.50, 72.05)}, (3.75, 4.76, 5.88, 9.61)),
        "QNLI": Line({"accuracy": (91.54, 91.47, 90.24, 84.33, 56.43)}, (3.03, 3.83, 4.94, 10.64)),
        "RTE": Line({"accuracy": (72.56, 71.68, 70.39, 64.72, 52.65)}, (2.50, 3.24, 4.55, 10.06)),
        "WNLI": Line({"accuracy": (56.33, 56.33, 56.32, 54.96, 52.69)}, (4.08, 5.15, 6.49, 11.09)),
    },
    "DistilBERT": {
        "CoLA": Line({"matthews": (56.85, 56.49, 55.69, 54.29, 50.08)}, (11.36, 12.33, 13.75, 17.30)),
        "SST-2": Line({"accuracy": (91.51, 91.50, 91.41, 90.92, 88.20)}, (5.60, 6.64, 7.84, 10.58)),
        "MRPC": Line(
            {"accuracy": (85.78, 85.26, 83.83, 78.59, 64.76), "f1": (90.26, 89.91, 88.99, 85.66, 76.04)},
            (2.98, 3.73, 4.54, 7.35),
        ),
        "STS-B": Line(
            {"pearson": (88.39, 88.29, 79.73, 63.11, 30.12), "spearman": (87.56, 86.94, 78.24, 62.40, 29.02)},
            (4.65, 5.91, 7.21, 12.33),
        ),
        "QQP": Line(
            {"accuracy": (88.24, 88.11, 87.79, 86.77, 72.24), "f1": (85.48, 84.99, 83.26, 82.95, 70.02)},
            (4.75, 5.85, 7.14, 10.41),
        ),
        "MNLI": Line({"accuracy": (82.50, 82.37, 81.09, 77.70, 68.11)}, (3.62, 4.31, 5.09, 7.40)),
        "MNLI-mm": Line({"accuracy": (83.83, 83.66, 82.41, 79.26, 71.25)}, (3.62, 4.31, 5.09, 7.40)),
        "QNLI": Line({"accuracy": (88.48, 88.31, 87.06, 83.19, 62.89)}, (2.86, 3.51, 4.28, 7.43)),
        "RTE": Line({"accuracy": (65.70, 65.22, 64.43, 60.35, 52.79)}, (2.33, 2.91, 3.64, 6.47)),
        "WNLI": Line({"accuracy": (56.33, 54.40, 52.55, 52.77, 52.24)}, (3.97, 5.10, 6.56, 10.55)),
    },
}

_TASKS = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI")
#: On the hub, by task: tables 1 and 2 of the supplement.
WEIGHTS: dict[str, dict[str, str]] = {
    "BERT": {
        **{task: f"textattack/bert-base-uncased-{task}" for task in _TASKS},
        "MNLI": "ishan/bert-base-uncased-mnli",
        "MRPC": "bert-base-cased-finetuned-mrpc",
    },
    "DistilBERT": {
        **{task: f"textattack/distilbert-base-uncased-{task}" for task in _TASKS},
        "SST-2": "avneet/distilbert-base-uncased-finetuned-sst2",
    },
}
