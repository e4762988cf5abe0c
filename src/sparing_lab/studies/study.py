"""What a study is: cells to measure, and claims of a paper that are judged by the rows.

A study is a page: `cells` lists what is measured, `measure` does one cell, `claims` name the figures that they are
judged by, and `tables` and `draw` show the rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from sparing_lab.figure import Figure
from sparing_lab.studies.judges import Judge
from sparing_lab.studies.rows import Cell, Row, Rows
from sparing_lab.studies.tables import Table

SCALES = ("small", "paper")


@dataclass(frozen=True)
class Settings:
    """The options that a user passes to a study."""

    scale: str = "small"  #: "small": minutes, nothing is downloaded; "paper": its models, data and settings
    data: Path | None = None  #: folder with datasets
    seeds: int | None = None  #: None: the study's default for the scale
    model: str | None = None  #: a folder or a name on the hub, in place of the study's own
    together: bool = False  #: several studies run: data that one of them does not use are no error

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r} is not one of {', '.join(SCALES)}")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} must be at least 1")
        if self.data is not None and not self.data.is_dir():
            raise ValueError(f"data: there is no folder {self.data}")

    @property
    def small(self) -> bool:
        return self.scale == "small"

    @property
    def usual(self) -> bool:
        """Return whether the findings were written about results with these settings."""
        return self.small and self.model is None

    def files(self, *patterns: str, wanted: str, paper: str) -> list[Path]:
        """Return the files of the data folder that match; none: the study takes texts that every Python has.

        wanted: files and their format, for the error about a folder without any. paper: the error at the paper's scale.
        """
        found = [] if self.data is None else sorted(path for pattern in patterns for path in self.data.glob(pattern))
        if not found and not self.small:
            raise ValueError(f"data: {paper}")
        if not found:
            self.refuse_unused(wanted)
        return found

    def refuse_unused(self, wanted: str) -> None:
        """Raise if data were given and hold nothing for a study, unless several run; wanted: files and their format."""
        if self.data is not None and not self.together:
            raise ValueError(f"data: {self.data} holds nothing for this study, which looks for {wanted}")


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and when we say that it holds."""

    key: str  #: a short name, unique in its study
    where: str  #: in the paper
    states: str
    paper: str  #: the paper's figures, in few words
    judge: Judge
    ours: bool = False  #: a question of ours, which the paper does not ask

    @property
    def criterion(self) -> str:
        """Return the criteria of "reproduces" and, if it is a possible verdict, of "same shape", in words."""
        return self.judge.criterion


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper."""

    name: str
    title: str
    paper: str  #: a key of `PAPERS`
    where: str  #: in the paper
    cells: Callable[[Settings], Sequence[Cell]]
    measure: Callable[[Settings, Cell], Row | list[Row]]  #: measures a cell; returns what is added to it
    tables: Callable[[Rows], Sequence[Table]]
    draw: Callable[[Rows, Figure], None]
    claims: Sequence[Claim] = ()
    timed: bool = False  #: results depend on the machine
    version: int = 1  #: of what is measured; raise it to discard kept results
    options: Sequence[str] = field(default=())  #: fields of `Settings` with an effect: "data", "seeds", "model"
    findings: Mapping[str, str] | None = None  #: by the claims' keys; None: those of the paper's file

    def finding(self, key: str) -> str:
        """Return why a claim does not hold at small scale, as far as we know; empty where nothing is known."""
        found = findings(self.paper).get(self.name, {}) if self.findings is None else self.findings
        return found.get(key, "")


@functools.cache
def findings(paper: str) -> dict[str, dict[str, str]]:
    """Return a paper's findings, by study and claim: written from results, apart from the claims and their criteria."""
    parts = re.split(
        r"^(#+) (.*)$", resources.files(__package__).joinpath(f"findings/{paper}.md").read_text("utf-8"), flags=re.M
    )
    found: dict[str, dict[str, str]] = {}
    study = ""
    for marks, head, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        study = head if marks == "#" else study
        keys = [] if marks == "#" else head.split(", ")
        found.setdefault(study, {}).update(dict.fromkeys(keys, " ".join(text.split())))
    return found


#: The papers by their short names.
PAPERS = {
    "mca": "Kim and Ko, Fast Monte-Carlo Approximation of the Attention Mechanism (AAAI 2022)",
    "yoso": "Zeng et al., You Only Sample (Almost) Once: Linear Cost Self-Attention via Bernoulli Sampling (ICML 2021)",
    "value-aware": "Gupta and Berant, Value-aware Approximate Attention (EMNLP 2021)",
    "skyformer": "Chen et al., Skyformer: Remodel Self-Attention with Gaussian Kernel and Nystrom Method (2021)",
}
