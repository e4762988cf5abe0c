"""Read long documents with classes from files in FOLDER/imdb, FOLDER/hyperpartisan and FOLDER/aapd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparing.documents import Documents, decoded, read


@dataclass(frozen=True)
class Collection:
    """A collection of documents: the names and the format of its file, and where to get it."""

    name: str  #: of its folder
    title: str  #: in the paper's table
    names: tuple[str, ...]  #: patterns of file names, in order of preference
    form: str  #: the format of the file, in words
    source: str  #: where the paper got it from
    load: Callable[[Path], Documents]
    multiple: bool = False  #: whether a document has several classes

    def path(self, data: Path) -> Path | None:
        """Return its file in a folder of datasets, or None; the first by name if several match."""
        found = (sorted((data / self.name).glob(pattern)) for pattern in self.names)
        return next((paths[0] for paths in found if paths), None)


def json_lines(path: Path) -> Documents:
    """Return the documents of a .jsonl file whose labels are 0 or 1."""
    found = read([path], label="label", allowed=("0", "1"))
    assert found.labels is not None
    return Documents(found.name, found.texts, tuple(map(int, found.labels)), found.empty)


def _bits(path: Path) -> Documents:
    """Return the documents of a file with a 0 or 1 for each class, a tab and a text on each line; labels are tuples."""
    texts: list[str] = []
    labels: list[tuple[int, ...]] = []
    for number, line in enumerate(decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        marks, tab, text = line.partition("\t")
        if not tab or not text.strip() or not marks or set(marks) - set("01"):
            raise ValueError(f"data: {path}, line {number} is not a row of 0 and 1, a tab and a text")
        if labels and len(marks) != len(labels[0]):
            raise ValueError(f"data: {path}, line {number} has {len(marks)} classes, but line 1 has {len(labels[0])}")
        texts.append(text.strip())
        labels.append(tuple(map(int, marks)))
    if not texts:
        raise ValueError(f"data: {path.name} holds no text")
    return Documents(path.name, tuple(texts), tuple(labels))


_LINES = "one JSON object on each line with 'text' and 'label', 0 or 1; may be .xz or .gz"

#: In the order of the paper's table.
COLLECTIONS = {
    each.name: each
    for each in (
        Collection(
            "aapd", "AAPD", ("test.tsv*", "*test*.tsv*", "*.tsv*"),
            "tab-separated, no header: a 0 or 1 for each class, then the text; may be .xz or .gz",
            "the arXiv Academic Paper dataset (Yang et al. 2018; the paper cites Yang et al. 2016)", _bits, True,
        ),
        Collection(
            "hyperpartisan", "HND", ("test*.jsonl*", "*.jsonl*"), _LINES,
            "SemEval-2019 task 4, articles by article (Kiesel et al. 2019), https://zenodo.org/record/1489920",
            json_lines,
        ),
        Collection(
            "imdb", "IMDB", ("test*.jsonl*", "*.jsonl*"), _LINES,
            "the Large Movie Review Dataset (Maas et al. 2011), https://ai.stanford.edu/~amaas/data/sentiment",
            json_lines,
        ),
    )
}  # fmt: skip


def given(data: Path) -> list[Collection]:
    """Return the collections whose files are in the folder."""
    return [each for each in COLLECTIONS.values() if each.path(data) is not None]


def load(collection: Collection, data: Path | None) -> Documents:
    """Return the documents of a collection, with their labels."""
    path = None if data is None else collection.path(data)
    if path is None:
        wanted = Path("DATA" if data is None else data) / collection.name / collection.names[0].replace("*", "")
        raise ValueError(
            f"data: {collection.title} needs {wanted} ({collection.form}); --data names the folder that holds "
            f"{collection.name}/. The paper had it from {collection.source}"
        )
    return collection.load(path)
