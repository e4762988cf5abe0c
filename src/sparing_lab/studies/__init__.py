"""The papers' tables and figures, a file each: `sparing study --list`."""

from __future__ import annotations

from importlib import import_module

from sparing_lab.studies.study import Study

#: All studies, in the order of their papers.
NAMES = (
    "mca-bounds",
    "mca-glue",
    "mca-longformer",
    "mca-tradeoff",
    "yoso-collision",
    "yoso-attention",
    "yoso-error",
    "yoso-sampling",
    "yoso-efficiency",
    "value-aware-oracles",
    "value-aware-example",
    "skyformer-spectral",
    "skyformer-theory",
    "skyformer-spectrum",
    "yoso-pretraining",
    "yoso-glue",
    "value-aware-kernels",
    "value-aware-mlm",
    "skyformer-lra",
    "skyformer-convergence",
    "skyformer-instability",
)


def study(name: str) -> Study:
    """Return the study of that name."""
    if name not in NAMES:
        raise ValueError(f"study: there is none named {name!r}; there are {', '.join(NAMES)}")
    found: Study = import_module(f"sparing_lab.studies.{name.replace('-', '_')}").STUDY
    return found


__all__ = ["NAMES", "Study", "study"]
