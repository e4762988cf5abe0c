"""Tasks to train on: what their examples hold, that splits are apart, and that files are read or refused."""

import json

import numpy
import pytest
import torch

from sparing_lab.tasks import listops
from sparing_lab.tasks.arena import bytes_task, listops_task, pathfinder_task, pixels_task, retrieval_task
from sparing_lab.tasks.language import HIDDEN, MASK, causal_task, hide, masked_task, order_task
from sparing_lab.tasks.trainable import Example, Split, Task

TASKS = [
    lambda: listops_task(64, 0, 40, 30),
    lambda: pathfinder_task(256, 0, 6, 12),
    lambda: bytes_task(256, 0),
    lambda: pixels_task(64, 0),
    lambda: retrieval_task(128, 0, None, 40, 30),
    lambda: causal_task(128, 0),
    lambda: masked_task(128, 0),
    lambda: order_task(128, 0),
]


@pytest.mark.parametrize("make", TASKS)
def test_examples_are_what_the_task_says_and_the_same_again(make):
    task, again = make(), make()
    for split in ("train", "valid"):
        found, same = getattr(task, split), getattr(again, split)
        assert len(found) == len(same) > 0
        for number in (0, len(found) // 2, len(found) - 1):
            example = found[number]
            assert torch.equal(example.tokens, same[number].tokens)
            assert example.label == same[number].label
            assert 0 <= example.label < task.classes
            assert 0 < len(example.tokens) <= task.length
            assert int(example.tokens.min()) >= 0
            assert int(example.tokens.max()) < task.vocabulary
            assert found.lengths is None or found.lengths[number] == len(example.tokens)
        with pytest.raises(IndexError):
            found[len(found)]


@pytest.mark.parametrize("make", TASKS[:5])
def test_what_is_tried_was_not_learned(make):
    task = make()
    seen = {tuple(task.train[number].tokens.tolist()) for number in range(len(task.train))}
    held = [tuple(task.valid[number].tokens.tolist()) for number in range(len(task.valid))]
    assert not seen & set(held)


def test_chance_is_the_share_of_the_commonest_answer():
    task = listops_task(64, 0, 1, 200)
    labels = [task.valid[number].label for number in range(200)]
    assert task.chance() == max(map(labels.count, range(10))) / 200
    assert 0.1 <= task.chance() < 0.5
    assert pixels_task(64, 0).chance() < 0.2


def test_chance_of_text_is_what_the_bytes_frequencies_give():
    assert 15 < causal_task(128, 0).chance() < 30
    split = Split(3, lambda number: Example(torch.tensor([0, 4, 4, 5, 5, 0])))  # nobody asks for padding
    assert Task("x", "x", "masked", 9, 6, split, split, mask=1).chance() == pytest.approx(2)


def test_lists_have_their_value():
    task = listops_task(64, 0, 20, 1)
    for number in range(20):
        example = task.train[number]
        words = [listops.WORDS[token] for token in example.tokens]
        assert 16 <= len(words) <= 64
        assert listops.value(words) == example.label


def test_pairs_belong_together_or_do_not():
    task = retrieval_task(128, 0, None, 60, 30)
    labels = [task.train[number].label for number in range(60)]
    assert 15 < sum(labels) < 45  # missed by a fair coin with a probability of 1e-4; the seed is fixed
    assert all(len(task.train[number].other) == 128 for number in range(5))


@pytest.mark.parametrize(("length", "greys"), [(256, 4), (1024, 256)])
def test_small_pictures_have_few_greys(length, greys):
    task = pathfinder_task(length, 0, 4, 2)
    assert task.vocabulary == greys
    for number in range(4):
        tokens = task.train[number].tokens
        marks = int((tokens == greys - 1).sum())
        assert 4 <= marks <= 24  # two round ones
        assert len(tokens.unique()) <= greys
        assert int((tokens == 0).sum()) > length // 4


def test_another_second_text_is_another_task(tmp_path):
    def found(word):
        (tmp_path / "pairs.tsv").write_text("".join(f"{n % 2}\tone {n}\t{word} {n}\n" for n in range(30)))
        return retrieval_task(64, 0, tmp_path / "pairs.tsv").fingerprint()

    assert found("two") == found("two") != found("six")


def test_text_is_its_bytes():
    task = causal_task(64, 0)
    text = bytes((task.valid[0].tokens - 4).tolist()).decode(errors="replace")
    assert sum(letter.isalpha() or letter.isspace() for letter in text) > 40


def test_parts_are_turned_round_as_the_label_says():
    task = order_task(128, 0)
    for number in range(12):
        example = task.train[number]
        tokens = example.tokens.tolist()
        assert tokens[0] == 2
        assert tokens[-1] == 3
        assert tokens.count(3) == 2
        middle = tokens.index(3)
        assert example.segments.tolist() == [0] * (middle + 1) + [1] * (len(tokens) - middle - 1)
        parts = [bytes(t - 4 for t in part) for part in (tokens[1:middle], tokens[middle + 1 : -1])]
        whole = b"".join(reversed(parts) if example.label else parts)
        assert whole in _source()


def _source():
    from sparing.sample_text import distinct_topics

    return "\n\n".join(distinct_topics()).encode()


def test_hidden_tokens_are_masked_changed_or_left():
    task = order_task(128, 0)
    tokens = torch.stack([task.train[number].tokens for number in range(200)])
    given, asked = hide(tokens, task, torch.Generator().manual_seed(0))
    special = (tokens == 2) | (tokens == 3)
    assert not (asked & special).any()
    # 24,000 draws: 6 standard deviations of the share are 0.014, of the shares among these 0.04 and 0.03.
    share = asked.sum() / (~special).sum()
    assert abs(share - HIDDEN) < 0.014
    assert abs((given[asked] == MASK).float().mean() - 0.8) < 0.04
    assert abs((given[asked] == tokens[asked]).float().mean() - 0.1) < 0.03
    assert torch.equal(given[~asked], tokens[~asked])
    assert int(given.min()) >= MASK


def test_reviews_and_pictures_and_pairs_come_from_files(tmp_path):
    (tmp_path / "imdb").mkdir()
    for part in ("train", "test"):
        rows = [{"text": f"{part} film {number}", "label": number % 2} for number in range(6)]
        (tmp_path / "imdb" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = bytes_task(16, 0, tmp_path)
    assert bytes((task.train[3].tokens - 1).tolist()) == b"train film 3"
    assert (len(task.train), len(task.valid), task.valid[1].label) == (6, 6, 1)
    pictures = numpy.arange(3 * 16 * 16, dtype=numpy.uint8).reshape(3, 16, 16)
    numpy.savez(tmp_path / "small.npz", x_train=pictures, y_train=[0, 1, 2], x_test=pictures, y_test=[2, 1, 0])
    task = pixels_task(256, 0, tmp_path / "small.npz")
    assert task.classes == 3
    assert task.train[1].tokens.tolist() == pictures[1].flatten().tolist()
    halved = pixels_task(64, 0, tmp_path / "small.npz").train[0].tokens
    assert halved[0] == pictures[0, :2, :2].mean().round()
    (tmp_path / "aan.tsv").write_text("".join(f"{n % 2}\tone {n}\ttwo {n}\n" for n in range(30)))
    task = retrieval_task(64, 0, tmp_path / "aan.tsv")
    assert len(task.train) + len(task.valid) == 30
    assert bytes((task.valid[0].other - 1).tolist()).startswith(b"two")
    (tmp_path / "text.txt").write_text("some words, and more of them. " * 2000)
    assert causal_task(64, 0, [tmp_path / "text.txt"]).data == "text.txt"


def npz(folder, **changed):
    """A file of two pictures each, but for what is changed."""
    pictures = numpy.zeros((2, 8, 8), dtype=numpy.uint8)
    held = {"x_train": pictures, "y_train": [0, 1], "x_test": pictures, "y_test": [1, 0], **changed}
    numpy.savez(folder / "changed.npz", **held)
    return folder / "changed.npz"


def texts(split):
    return {bytes(split[number].tokens.tolist()) for number in range(len(split))}


def test_one_file_of_texts_is_split(tmp_path):
    rows = [{"text": f"a film, number {number}", "label": number % 2} for number in range(40)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = bytes_task(32, 0, tmp_path / "reviews.jsonl")
    assert (len(task.train), len(task.valid)) == (36, 4)
    assert not texts(task.train) & texts(task.valid)


@pytest.mark.parametrize("where", [".", "imdb", "aclImdb"])
def test_reviews_come_as_imdb_has_them(where, tmp_path):
    for part in ("train", "test"):
        for kind in ("pos", "neg"):
            (tmp_path / where / part / kind).mkdir(parents=True)
            for number in range(3):
                (tmp_path / where / part / kind / f"{number}.txt").write_text(f"{part} {kind} {number}")
    task = bytes_task(16, 0, tmp_path)
    assert (len(task.train), len(task.valid)) == (6, 6)
    found = {bytes((task.valid[n].tokens - 1).tolist()).split()[1]: task.valid[n].label for n in range(6)}
    assert found == {b"pos": 1, b"neg": 0}


def test_pairs_to_try_come_from_a_file_of_their_own(tmp_path):
    (tmp_path / "aan").mkdir()
    for part, count in (("train", 24), ("eval", 5), ("test", 3)):
        rows = "".join(f"{n % 2}\t{part} one {n}\t{part} two {n}\n" for n in range(count))
        (tmp_path / "aan" / f"new_aan_pairs.{part}.tsv").write_text(2 * rows)  # each of them twice
    task = retrieval_task(64, 0, tmp_path)
    assert (len(task.train), len(task.valid)) == (24, 5)
    assert bytes((task.valid[0].tokens - 1).tolist()).startswith(b"eval")


def test_something_is_hidden_in_the_shortest_text():
    task = masked_task(16, 0)
    tokens = torch.stack([task.train[0].tokens] * 300)  # of which 0.85^16 = 7 % would have nothing hidden
    _, asked = hide(tokens, task, torch.Generator().manual_seed(0))
    assert asked.any(-1).all()
    assert asked.sum(-1).eq(1).any()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: listops_task(8, 0), "max_length=8 is too short for lists"),
        (lambda path: pathfinder_task(1000, 0), "max_length=1000 is not the size of a square"),
        (lambda path: pathfinder_task(64, 0), "max_length=64 is not .* at least 16 x 16 pixels; take 256"),
        (lambda path: bytes_task(10**6, 0), "max_length=1000000: the installed texts have 0"),
        (lambda path: bytes_task(2, 0), "max_length=2 is too short"),
        (lambda path: retrieval_task(64, 0, path / "several"), "has one.tsv, two.tsv; pass one"),
        (lambda path: retrieval_task(64, 0, path / "blank.tsv"), "blank.tsv, line 1 is not a label"),
        (lambda path: pixels_task(64, 0, npz(path, y_test=[0])), "x_test has 2 pictures, y_test has shape"),
        (lambda path: pixels_task(64, 0, npz(path, y_test=[0, 5])), "y_test must be integers"),
        (lambda path: pixels_task(64, 0, npz(path, y_train=[-1, 0])), "y_train must be integers"),
        (lambda path: pixels_task(64, 0, npz(path, y_train=[0.5, 1])), "y_train must be integers"),
        (lambda path: pixels_task(64, 0, npz(path, y_train=["cat", "dog"])), "y_train must be integers"),
        (lambda path: pixels_task(64, 0, npz(path, x_test=numpy.zeros((0, 8, 8), "u1"), y_test=[])), "0 pictures"),
        (lambda path: pixels_task(63, 0), "max_length=63 is not the size of a square"),
        (lambda path: causal_task(4, 0), "max_length=4 is too short"),
        (lambda path: bytes_task(64, 0, path), "there is no .*imdb.train"),
        (lambda path: pixels_task(64, 0, path), "there is no .*cifar10"),
        (lambda path: retrieval_task(64, 0, path), "there is no .*aan"),
        (lambda path: retrieval_task(64, 0, path / "bad.tsv"), "bad.tsv, line 1 is not a label"),
        (lambda path: pixels_task(64, 0, path / "bad.npz"), "cannot be read as .npz"),
        (lambda path: pixels_task(64, 0, path / "part.npz"), "has no 'y_train'"),
        (lambda path: causal_task(4096, 0, [path / "bad.tsv"]), "is a table"),
        (lambda path: causal_task(64, 0, [path / "short.txt"]), "bytes are too few"),
        (lambda path: retrieval_task(60000, 0), "too short for pieces"),
    ],
)
def test_bad_input_is_refused(make, said, tmp_path):
    (tmp_path / "several" / "aan").mkdir(parents=True)
    for name in ("one", "two"):
        (tmp_path / "several" / "aan" / f"{name}.tsv").write_text("1\ta\tb\n")
    (tmp_path / "blank.tsv").write_text("1\t \tb\n")
    (tmp_path / "bad.tsv").write_text("text\tof\tsorts\n")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.npz").write_text("no archive")
    numpy.savez(tmp_path / "part.npz", x_train=numpy.zeros((1, 8, 8), dtype=numpy.uint8))
    with pytest.raises(ValueError, match=said):
        make(tmp_path)
