"""The five tasks of the Long Range Arena, from files where there are some, else from what is always there."""

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

BYTES = 257  #: tokens of texts: padding, then each byte
TRAIN, VALID = 32_000, 400  #: examples where there is no end of them
_GREYS = torch.tensor([1, 100, 255], dtype=torch.uint8)  # from there on: the edge of a path, a path, a mark


def text_bytes(text: str | bytes, length: int) -> Tensor:
    """Numbers from 1 on, at most so many."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor(list(raw[:length])) + 1


def listops_task(length: int, seed: int, train: int = TRAIN, valid: int = VALID) -> Task:
    """Nested lists of a quarter of the length and more, and what they come to."""
    if length < 32:  # of shorter ones there are so few that held-out lists are among those that are learned from
        raise ValueError(f"max_length={length} is too short for lists; take 32 or more")

    def split(name: str, count: int) -> Split:
        @functools.lru_cache(maxsize=count)
        def example(number: int) -> Example:
            words = next(listops.examples(f"{seed} {name} {number}", least=length // 4, most=length))
            return Example(torch.tensor(listops.numbers(words)), listops.value(words))

        return Split(count, example)

    return Task(
        "listops", "own lists", "class", len(listops.WORDS), length, split("train", train), split("valid", valid), 10
    )


def pathfinder_task(length: int, seed: int, train: int = TRAIN, valid: int = VALID) -> Task:
    """Pictures as rows of pixels, one after the other; length: of all of them, a square.

    Those with fewer than 32 pixels to a side are easier: the two long paths stand alone, in four greys.
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
    return Task("pathfinder", "own pictures", "class", greys, length, split("train", train), split("valid", valid))


def bytes_task(length: int, seed: int, data: Path | Hub | None = None) -> Task:
    """The class of a text, byte by byte: help topics against source, or texts of files.

    data: a .jsonl, of which a tenth is held out; or a folder with imdb/train*.jsonl and test*.jsonl, or with
    train/pos/*.txt, train/neg, test/pos and test/neg, as IMDb comes.
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
        raise ValueError(f"max_length={length}: {each} pieces of the installed texts are that long; 20 are the least")
    made = [
        Example(text_bytes(text, length), label) for label, texts in enumerate((prose, code)) for text in texts[:each]
    ]
    return Task("bytes", "Python help against source code", "class", BYTES, length, *_split(made, seed))


def pixels_task(length: int, seed: int, data: Path | Hub | None = None) -> Task:
    """What a small picture shows, pixel by pixel: an .npz with x_train, y_train, x_test, y_test, or scanned digits."""
    if isinstance(data, Hub):
        name, arrays = data.name, arena_files.pictures(data)
    elif data is not None:
        name, arrays = arena_files.arrays(data)
    else:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "the usual pictures come with scikit-learn; run: pip install 'sparing[train]', or name an .npz file"
            ) from None
        name, digits = "scanned digits", load_digits()
        images = torch.tensor(digits.images * 15).long()  # 16 levels and none to 240
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
    """Whether two texts belong together: rows of a .tsv with label, text and text, or pieces of the same text.

    Without rows, texts are Python's help topics and the modules of its library. Half of the pairs that do not belong
    together are prose beside code: telling these apart answers three of four.
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

    # Texts are split, not pairs: nothing of a text that is asked about was seen before.
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
    """Each once: texts share paragraphs."""
    found = (text[at : at + length] for text in texts for at in range(0, len(text) - length + 1, length))
    return list(dict.fromkeys(found))


def _listed(made: list[Example]) -> Split:
    return Split(len(made), made.__getitem__, [len(example.tokens) for example in made])


def _split(made: list[Example], seed: int) -> tuple[Split, Split]:
    """Nine of ten to learn from, at most 2,000 to try."""
    if len(made) < 20:
        raise ValueError(f"data: {len(made)} examples are too few to learn from; 20 are the least")
    order = list(made)
    Random(f"split {seed}").shuffle(order)
    cut = len(order) - min(len(order) // 10, 2000)
    return _listed(order[:cut]), _listed(order[cut:])


def _side(length: int, *, least: int = 8) -> int:
    side = round(length**0.5)
    if side * side != length or side < least:
        raise ValueError(
            f"max_length={length} is not that of a square picture with {least} pixels to a side or more; take "
            f"{least**2}, 1024 or another square"
        )
    return side


def _resized(pictures: Tensor, side: int) -> Tensor:
    """[N, h, w] of 0 to 255 -> [N, side * side], by the mean of what falls into a pixel, or by repetition."""
    resize: Callable[..., Tensor] = torch.nn.functional.interpolate
    found = resize(pictures[:, None].float(), size=(side, side), mode="area")
    return found.round().long().flatten(1)
