"""Load datasets of the Hugging Face hub, or of a local folder, with the `datasets` library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparing.models import first_line

PREFIX = "hub:"


@dataclass(frozen=True)
class Hub:
    """A dataset on the hub: its name, and the configuration if it has several."""

    name: str
    part: str | None = None

    def rows(self, splits: Sequence[str], columns: Sequence[Sequence[str]]) -> list[tuple[Any, ...]]:
        """Return the rows of the first of `splits` that exists.

        columns: for each value of a row, the names that its column may have; the first that exists is read.
        """
        held = self._load()
        split = next((name for name in splits if name in held), None)
        if split is None:
            raise ValueError(f"data: {self} has no split {' or '.join(map(repr, splits))}; it has {', '.join(held)}")
        table = held[split]
        chosen = [self._column(table.column_names, names) for names in columns]
        return list(zip(*(table[name] for name in chosen), strict=True))

    def _column(self, have: Sequence[str], names: Sequence[str]) -> str:
        found = next((name for name in names if name in have), None)
        if found is None:
            raise ValueError(
                f"data: {self} has no column {' or '.join(map(repr, names))}; it has {', '.join(map(repr, have))}"
            )
        return found

    def _load(self) -> Any:
        try:
            from datasets import load_dataset
        except ModuleNotFoundError:
            raise ModuleNotFoundError("datasets is missing; run: pip install 'sparing[hub]'") from None
        try:
            return load_dataset(self.name, self.part)
        except Exception as error:  # no network, no such name, files in another format
            raise ValueError(f"data: {self} cannot be loaded: {first_line(error)}") from None

    def __str__(self) -> str:
        return PREFIX + self.name + (f" ({self.part})" if self.part else "")
