"""Read the data of the Long Range Arena's tasks from files or the hub: texts with classes, pictures, pairs of texts."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from sparing.documents import decoded
from sparing.models import first_line
from sparing_lab.tasks import articles
from sparing_lab.tasks.hub import Hub

Texts = list[tuple[str | bytes, int]]


def reviews(data: Path | Hub, part: str) -> Texts:
    """Return texts with their classes; part: "train" or "test"."""
    if isinstance(data, Hub):
        rows = data.rows(("train",) if part == "train" else ("test", "validation"), (("text", "sentence"), ("label",)))
        return [(text, int(label)) for text, label in rows]
    for folder in (data, data / "imdb", data / "aclImdb"):
        if (folder / part / "pos").is_dir():
            return _folders(folder / part)
    return lines(_first(data, "imdb", f"{part}*.jsonl*", "an object with 'text' and 'label' (0 or 1) on each line"))


def lines(path: Path) -> Texts:
    """Return the texts of a .jsonl file with their classes."""
    found = articles.json_lines(path)
    assert found.labels is not None
    return [(text, int(label)) for text, label in zip(found.texts, found.labels, strict=True)]


def _folders(folder: Path) -> Texts:
    found: Texts = []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise ValueError(f"data: there is no .txt file in {folder / name}")
        found += [(path.read_bytes(), label) for path in paths if path.stat().st_size]
    return found


def arrays(data: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of an .npz file, and its pictures and labels: x_train, y_train, x_test, y_test."""
    import numpy

    path = _first(data, "cifar10", "*.npz", "pictures: x_train, y_train, x_test, y_test")
    try:
        with zipfile.ZipFile(path), numpy.load(path) as archive:
            held = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"data: {path} cannot be read as .npz: {first_line(error)}") from None
    for name in ("x_train", "y_train", "x_test", "y_test"):
        if name not in held:
            raise ValueError(f"data: {path} has no {name!r}; it has {', '.join(held)}")
    for name in ("x_train", "x_test"):
        if held[name].ndim != 3 or held[name].dtype != numpy.uint8:
            raise ValueError(f"data: {path}: {name} must be grey pictures, uint8 [N, h, w]; it is {held[name].shape}")
    for part in ("train", "test"):
        pictures, labels = held[f"x_{part}"], held[f"y_{part}"]
        if not len(pictures) or labels.shape != (len(pictures),):
            raise ValueError(f"data: {path}: x_{part} has {len(pictures)} pictures, y_{part} has shape {labels.shape}")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > held["y_train"].max():
            raise ValueError(f"data: {path}: y_{part} must be integers from 0 to the largest of y_train")
    return path.name, held


def pictures(data: Hub) -> dict[str, Any]:
    """Return the pictures of a dataset of the hub in grey, with their labels."""
    import numpy

    found = {}
    for part, splits in (("train", ("train",)), ("test", ("test", "validation"))):
        rows = data.rows(splits, (("image", "img"), ("label",)))
        found[f"x_{part}"] = numpy.stack([numpy.asarray(picture.convert("L")) for picture, _ in rows])
        found[f"y_{part}"] = numpy.asarray([label for _, label in rows])
    return found


def pairs(data: Path | Hub) -> tuple[Any, ...]:
    """Return the name of the data, then training rows and held-out rows, or all rows if they are not split."""
    if isinstance(data, Hub):
        return data.name, data.rows(("train",), (("label",), ("text1", "sentence1"), ("text2", "sentence2")))
    path = _first(data, "aan", "*.tsv*", "pairs: a label (0 or 1), a text and a text in each row")
    if data.is_file():
        return path.name, _pairs(path)
    files = sorted(path.parent.glob("*.tsv*"))
    train = [file for file in files if "train" in file.name]
    held = [file for word in ("eval", "valid", "dev", "test") for file in files if word in file.name]
    if train and held:
        return path.parent.name, _pairs(train[0]), _pairs(held[0])
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"data: {path.parent} has {names}; pass one, or have 'train' and 'eval' in the names of two")
    return path.name, _pairs(path)


def _pairs(path: Path) -> list[tuple[Any, ...]]:
    found = []
    for number, line in enumerate(decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) < 3 or cells[0].strip() not in ("0", "1", "0.0", "1.0") or not all(map(str.strip, cells[-2:])):
            raise ValueError(f"data: {path}, line {number} is not a label (0 or 1), a tab, a text, a tab and a text")
        found.append((int(float(cells[0])), cells[-2], cells[-1]))
    return list(dict.fromkeys(found))  # a row that occurs twice could be in both splits


def _first(data: Path, folder: str, pattern: str, form: str) -> Path:
    """Return `data` if it is a file, else the first file that matches in its sub-folder."""
    if data.is_file():
        return data
    found = sorted((data / folder).glob(pattern))
    if not found:
        raise ValueError(f"data: there is no {data / folder / pattern}, which should hold {form}")
    return found[0]
