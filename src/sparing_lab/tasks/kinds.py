"""The tasks of `sparing train`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparing_lab.tasks import arena, language, tuning
from sparing_lab.tasks.hub import PREFIX, Hub
from sparing_lab.tasks.trainable import Task

Source = Path | Hub | None


@dataclass(frozen=True)
class Kind:
    """A task that `sparing train` knows by name, before its examples are loaded."""

    length: int  #: default length of examples
    about: str  #: what is predicted
    data: str  #: what --data may be
    make: Callable[..., Task]  #: called with length, seed, source, part and pretrained
    tuned: bool = False  #: whether it fine-tunes a pretrained model

    def load(self, *, length: int, seed: int, data: str | None, part: str | None, pretrained: str | None) -> Task:
        """Load the examples of the task."""
        source = _source(data, part)
        return self.make(length=length, seed=seed, source=source, part=part, pretrained=pretrained)


def _source(data: str | None, part: str | None) -> Source:
    if data is None:
        return None
    if data.startswith(PREFIX):
        return Hub(data.removeprefix(PREFIX), part)
    if not data or not Path(data).exists():
        raise ValueError(f"data={data!r}: there is no such file or folder")
    return Path(data)


def _from_files(make: Callable[..., Task]) -> Callable[..., Task]:
    def load(*, length: int, seed: int, source: Source, part: str | None, pretrained: str | None) -> Task:
        if part is not None and not isinstance(source, Hub):
            raise ValueError(f"part={part!r} is only for glue, or for a dataset of the hub")
        return make(length, seed, source)

    return load


def _generated(make: Callable[..., Task]) -> Callable[..., Task]:
    def load(length: int, seed: int, source: Source) -> Task:
        if source is not None:
            raise ValueError(f"data: {make.__name__.removesuffix('_task')} generates its examples; leave data out")
        return make(length, seed)

    return _from_files(load)


def _language(make: Callable[..., Task]) -> Callable[..., Task]:
    def load(length: int, seed: int, source: Source) -> Task:
        return make(length, seed, _texts(source) if isinstance(source, Path) else source)

    return _from_files(load)


def _texts(data: Path) -> list[Path]:
    if not data.is_dir():
        return [data]
    found = sorted(path for path in data.iterdir() if path.name.split(".", 1)[-1] in ("txt", "txt.xz", "txt.gz"))
    if not found:
        raise ValueError(f"data: there is no .txt file in {data}")
    return found


_OWN, _TEXT = "none: generated", "text files, or a folder of them"
KINDS = {
    "listops": Kind(256, "the value of nested lists of digits", _OWN, _generated(arena.listops_task)),
    "pathfinder": Kind(1024, "whether a path joins two marks", _OWN, _generated(arena.pathfinder_task)),
    "bytes": Kind(512, "the class of a text, byte by byte", "a .jsonl, or imdb/", _from_files(arena.bytes_task)),
    "pixels": Kind(64, "what a picture shows, pixel by pixel", "an .npz", _from_files(arena.pixels_task)),
    "retrieval": Kind(256, "whether two texts belong together", "a .tsv", _from_files(arena.retrieval_task)),
    "causal": Kind(256, "the next byte of a text", _TEXT, _language(language.causal_task)),
    "masked": Kind(256, "hidden bytes of a text", _TEXT, _language(language.masked_task)),
    "order": Kind(256, "hidden bytes, and the order of two parts", _TEXT, _language(language.order_task)),
    "glue": Kind(
        128, "a task of GLUE, with a pretrained model", "glue/TASK/*.tsv; --part TASK", tuning.glue_task, tuned=True
    ),
}
