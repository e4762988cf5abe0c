"""The five tasks of the Long Range Arena (Tay et al. 2021).

Examples come from files if the user gives some. Otherwise they are generated, or come with Python and scikit-learn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from sparing.sample_text import distinct_topics, python_modules, python_sources
from sparing_lab.tasks import arena_files, listops, pathfinder
from sparing_lab.tasks.hub import Hub
from sparing_lab.tasks.trainable import Example, Split, Task

BYTES = 257  #: vocabulary of texts: padding, then each byte
TRAIN, VALID = 32_000, 400  #: number of examples in the splits of generated tasks
_GREYS = torch.tensor([1, 100, 255], dtype=torch.uint8)  # from these values on: the edge of a path, a path, a mark


def text_bytes(text: str | bytes, length: int) -> Tensor:
    """Return the first `length` bytes as tokens from 1 on; 0 is padding."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor(list(raw[:length])) + 1


def listops_task(length: int, seed: int, train: int = TRAIN, valid: int = VALID) -> Task:
    """Return the task of computing nested lists, each at least a quarter of `length` long."""
    if length < 32:  # there are so few shorter lists that training and held-out lists would coincide
        raise ValueError(f"max_length={length} is too short for lists; take 32 or more")

    def split(name: str, count: int) -> Split:
        @functools.lru_cache(maxsize=count)
        def example(number: int) -> Example:
            words = next(listops.examples(f"{seed} {name} {number}", least=length // 4, most=length))
            return Example(torch.tensor(listops.numbers(words)), listops.value(words))

        return Split(count, example)

    splits = split("train", train), split("valid", valid)
    return Task("listops", "generated lists", "class", len(listops.WORDS), length, *splits, classes=10)


def pathfinder_task(length: int, seed: int, train: int = TRAIN, valid: int = VALID) -> Task:
    """Return the task of deciding whether a path joins two marks in a picture, read pixel by pixel.

    length: number of pixels, a square number. Pictures of fewer than 32 x 32 pixels are easier: they have no
    distractors and four grey levels.
    """
    size = _side(length, least=16)
    small = size < 32

    def split(name: str, count: int) -> Split:
        @functools.lru_cache(maxsize=count)
        def example(number: int) -> Example:
            paths = {"size": size, "length": size * 5 // 8, "distractors": 0 if small else size // 8}
            found = next(pathfinder.pictures(f"{seed} {name} {number}", **paths))
            pixels = torch.bucketize(found.pixels, _GREYS, right=True) if small else found.pixels.long()
            return Example(pixels.flatten(), int(found.joined))

        return Split(count, example, [length] * count)

    greys = len(_GREYS) + 1 if small else 256
    splits = split("train", train), split("valid", valid)
    return Task("pathfinder", "generated pictures", "class", greys, length, *splits)


def bytes_task(length: int, seed: int, data: Path | Hub | None = None) -> Task:
    """Return the task of classifying texts byte by byte: by default Python's help topics against its source code.

    data: a .jsonl file, of which a tenth is held out; or a folder with imdb/train*.jsonl and test*.jsonl, or with
    train/pos/*.txt, train/neg, test/pos and test/neg, as IMDb is distributed.
    """
    _need(length)
    if isinstance(data, Path) and data.is_file():
        return Task("bytes", data.name, "class", BYTES, length, *_split(_texts(arena_files.lines(data), length), seed))
    if data is not None:
        train, valid = (_listed(_texts(arena_files.reviews(data, part), length)) for part in ("train", "test"))
        classes = 2 if isinstance(data, Path) else int(max(train[number].label for number in range(len(train)))) + 1
        return Task("bytes", data.name, "class", BYTES, length, train, valid, classes)
    prose, code = (_pieces(texts, length) for texts in (distinct_topics(), python_sources()))
    each = min(len(prose), len(code))
    if each < 20:
        raise ValueError(f"max_length={length}: the installed texts have {each} such pieces; at least 20 are needed")
    made = [
        Example(text_bytes(text, length), label) for label, texts in enumerate((prose, code)) for text in texts[:each]
    ]
    return Task("bytes", "Python help against source code", "class", BYTES, length, *_split(made, seed))


def pixels_task(length: int, seed: int, data: Path | Hub | None = None) -> Task:
    """Return the task of classifying small pictures pixel by pixel.

    data: an .npz file with x_train, y_train, x_test and y_test; by default scikit-learn's scanned digits.
    """
    if isinstance(data, Hub):
        name, arrays = data.name, arena_files.pictures(data)
    elif data is not None:
        name, arrays = arena_files.arrays(data)
    else:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "the default pictures come with scikit-learn; run: pip install 'sparing[train]', or pass an .npz file"
            ) from None
        name, digits = "scanned digits", load_digits()
        images = torch.tensor(digits.images * 15).long()  # levels 0 to 16 become 0 to 240
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        images, answers = images[order], torch.tensor(digits.target)[order]
        cut = len(images) * 5 // 6
        arrays = {"x_train": images[:cut], "y_train": answers[:cut], "x_test": images[cut:], "y_test": answers[cut:]}
    side = _side(length)

    def split(part: str) -> Split:
        pictures, labels = (torch.as_tensor(arrays[f"{name}_{part}"]) for name in ("x", "y"))
        return _listed([Example(x, int(y)) for x, y in zip(_resized(pictures, side), labels, strict=True)])

    classes = int(max(arrays["y_train"])) + 1
    return Task("pixels", name, "class", 256, length, split("train"), split("test"), classes)


def retrieval_task(
    length: int, seed: int, data: Path | Hub | None = None, train: int = TRAIN, valid: int = VALID
) -> Task:
    """Return the task of deciding whether two texts belong together.

    data: a .tsv file with label, text and text in each row. By default, texts belong together if they are pieces of
    the same help topic or module of Python. Half of the pairs that do not belong together are prose and code, so
    telling prose from code is enough for an accuracy of 75 %.
    """
    _need(length)
    if data is not None:
        name, *parts = arena_files.pairs(data)
        made = [
            [Example(text_bytes(one, length), int(label), text_bytes(two, length)) for label, one, two in rows]
            for rows in parts
        ]
        given = _split(made[0], seed) if len(made) == 1 else [_listed(each) for each in made]
        return Task("retrieval", name, "pair", BYTES, length, *given)
    prose, code = (
        [pieces for text in texts if len(pieces := _pieces([text], length)) >= 4]
        for texts in (distinct_topics(), python_modules())
    )
    if min(len(prose), len(code)) < 6:
        raise ValueError(f"max_length={length}: the help topics are too short for pieces of that length")

    def split(name: str, count: int, *kinds: list[list[str]]) -> Split:
        def example(number: int) -> Example:
            random = Random(f"retrieval {seed} {name} {number}")
            first = random.choice(random.choice(kinds))
            if random.random() < 0.5:
                one, two = random.sample(first, 2)
                return Example(text_bytes(one, length), 1, text_bytes(two, length))
            second = random.choice([text for text in random.choice(kinds) if text is not first])
            one, two = random.choice(first), random.choice(second)
            return Example(text_bytes(one, length), 0, text_bytes(two, length))

        return Split(count, example)

    # Texts are split, not pairs: no piece of a held-out text is seen in training.
    held = [kind[::5] for kind in (prose, code)]
    seen = [[text for number, text in enumerate(kind) if number % 5] for kind in (prose, code)]
    return Task(
        "retrieval", "pieces of Python help and source code", "pair", BYTES, length, split("train", train, *seen),
        split("valid", valid, *held),
    )  # fmt: skip


def _need(length: int) -> None:
    if length < 16:
        raise ValueError(f"max_length={length} is too short for text; take 16 or more")


def _texts(rows: arena_files.Texts, length: int) -> list[Example]:
    return [Example(text_bytes(text, length), label) for text, label in rows]


def _pieces(texts: Sequence[str], length: int) -> list[str]:
    """Return the distinct pieces of the texts: texts share paragraphs."""
    found = (text[at : at + length] for text in texts for at in range(0, len(text) - length + 1, length))
    return list(dict.fromkeys(found))


def _listed(made: list[Example]) -> Split:
    return Split(len(made), made.__getitem__, [len(example.tokens) for example in made])


def _split(made: list[Example], seed: int) -> tuple[Split, Split]:
    """Return a training split and a held-out split of a tenth of the examples, at most 2,000."""
    if len(made) < 20:
        raise ValueError(f"data: {len(made)} examples are too few to train on; at least 20 are needed")
    order = list(made)
    Random(f"split {seed}").shuffle(order)
    cut = len(order) - min(len(order) // 10, 2000)
    return _listed(order[:cut]), _listed(order[cut:])


def _side(length: int, *, least: int = 8) -> int:
    side = round(length**0.5)
    if side * side != length or side < least:
        raise ValueError(
            f"max_length={length} is not the size of a square picture of at least {least} x {least} pixels; take "
            f"{least**2}, 1024 or another square number"
        )
    return side


def _resized(pictures: Tensor, side: int) -> Tensor:
    """Resize [N, h, w] of 0 to 255 to [N, side * side], by the mean over the area of each pixel."""
    resize: Callable[..., Tensor] = torch.nn.functional.interpolate
    found = resize(pictures[:, None].float(), size=(side, side), mode="area")
    return found.round().long().flatten(1)
