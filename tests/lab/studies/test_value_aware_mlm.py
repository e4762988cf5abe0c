import math
from random import Random

import pytest
import torch

from sparing_lab.studies import value_aware_mlm as mlm
from sparing_lab.studies._trained import tried
from sparing_lab.studies._value_aware import buckets, budget, family
from sparing_lab.studies.study import Settings
from sparing_lab.studies.value_aware_mlm import STUDY
from sparing_lab.tasks.language import masked_task
from tests.support.verdicts import changed, others, shown, verdict

NAME = "value-aware-mlm"


def wrong(spec, length):
    """Roughly the paper's figures, on our ladders of keys."""
    few, many = buckets(length)
    named = {"exact": 24.2 - length / 32, few: 90.39, many: 26.11}
    if spec in named:
        return named[spec]
    r, full, longer = budget(spec), 9, 4 * math.log2(length / 32)
    level = {
        "top_keys": lambda: 96.6 + (40 + longer - 96.6) * min(1, math.log(r) / math.log(full)) if r <= full else 30.0,
        "value_aware": lambda: named["exact"] if r >= full else 88.6 - 20 * math.log2(r),
        "window": lambda: 99.0 - r / 8,
        "random_features": lambda: 89.79,
    }
    return level[family(spec)]()


def swaps(cell):
    exact = wrong("exact", cell["length"])
    for spec in ("exact", *cell["specs"]):
        value = wrong(spec, cell["length"])
        yield {
            **cell, "what": "swap", "model": "byte model", "kind": "masked", "spec": spec, "value": value, "read": None,
            "gap": value - exact, "error": 0.3, "loss": 1.0, "asked": 50_000,
        }  # fmt: skip


def rows_of_the_paper():
    rows = []
    for cell in STUDY.cells(Settings()):
        last = {"perplexity": 4.0}
        rows.append({**cell, "what": "trained", "guess": 97.0, "chance": 258.0, "last": last})
        rows.append({**cell, "what": "search", "keys": 9, "off": 1e-8})
        rows += swaps(cell)
    return rows


ROWS = rows_of_the_paper()


def of(spec, length=None):
    return lambda row: row["what"] == "swap" and row["spec"] == spec and length in (None, row["length"])


def name_of(spec):
    return lambda row: row["what"] == "swap" and family(row["spec"]) == spec


def test_what_the_paper_says_is_what_it_says():
    assert others(NAME, ROWS) == {}


@pytest.mark.parametrize(
    ("key", "where", "value", "expected"),
    [
        ("aware", of("value_aware(keys=1)", 64), 97.0, "same shape"),
        ("aware", of("value_aware(keys=4)", 64), 97.0, "does not"),
        ("exact", of("value_aware(keys=9)", 128), 24.0, "same shape"),
        ("oblivious", of("top_keys(keys=9)", 128), 22.0, "same shape"),
        ("oblivious", of("top_keys(keys=9)", 128), 20.2, "does not"),
        ("single", of("value_aware(keys=1)", 32), 60.0, "same shape"),
        ("single", of("value_aware(keys=1)", 32), 96.5, "does not"),
        ("features", of("random_features(features=32)", 32), 30.0, "same shape"),
        ("features", of("random_features(features=32)"), 30.0, "does not"),
        ("lsh", of(buckets(128)[1]), 40.0, "same shape"),
        ("lsh", of(buckets(128)[0]), 40.0, "same shape"),
        ("lsh", of(buckets(128)[0]), 24.0, "does not"),
        ("window", of("window(size=2)"), 50.0, "same shape"),
        ("window", name_of("window"), 20.0, "does not"),
        ("longer", of("exact", 128), 23.1, "same shape"),
        ("longer", of("exact", 128), 24.0, "does not"),
        ("grows", of("top_keys(keys=9)", 64), 60.0, "same shape"),
        ("grows", of("top_keys(keys=9)", 128), 36.0, "does not"),
    ],
)
def test_other_results_are_another_verdict(key, where, value, expected):
    assert verdict(NAME, key, changed(ROWS, where, value=value)) == expected


@pytest.mark.parametrize(("off", "expected"), [(1e-4, "same shape"), (1e-2, "does not")])
def test_values_that_were_looked_for_and_do_not_make_the_output(off, expected):
    rows = changed(ROWS, lambda row: row["what"] == "search" and row["length"] == 64, off=off)
    assert verdict(NAME, "exact", rows) == expected


@pytest.mark.parametrize("key", ["aware", "single", "oblivious", "grows"])
def test_differences_within_the_noise_do_not_count(key):
    rows = changed(ROWS, lambda row: row["what"] == "swap", error=60.0)
    assert verdict(NAME, key, rows) == "does not"


def test_few_hidden_bytes_do_not_tell_two_models_apart():
    rows = changed(ROWS, lambda row: row["what"] == "swap", asked=300)
    assert verdict(NAME, "longer", rows) == "same shape"


@pytest.fixture
def folder(tmp_path):
    """A book of few words, in which a hidden byte follows from its neighbours."""
    random = Random(0)
    (tmp_path / "books").mkdir()
    words = ["alpha", "beta", "gamma", "delta"]
    (tmp_path / "books" / "one.txt").write_text(" ".join(random.choice(words) for _ in range(8000)))
    return tmp_path


def test_guessing_is_always_the_most_frequent_byte(folder):
    task = masked_task(32, 0, [folder / "books" / "one.txt"])
    found = tried(mlm._guess(task), task, range(60))
    texts = torch.stack([task.valid[number].tokens for number in range(60)])
    other = float((texts != ord("a") + 4).float().mean())
    assert found.error == pytest.approx(other, abs=0.1)
    assert 0.5 < found.error < 0.85
    assert float(found.asked.sum()) == pytest.approx(0.15 * 60 * 32, rel=0.2)


def test_a_small_model_is_trained_and_tried(folder):
    settings = Settings(data=folder)
    specs = ["top_keys(keys=1)", "top_keys(keys=32)", "value_aware(keys=9)", "random_features(features=32)"]
    cell = {
        **STUDY.cells(settings)[0], "length": 32, "hidden_size": 16, "num_heads": 2, "head": 8, "num_layers": 1, "intermediate_size": 32,
        "batch_size": 16, "max_steps": 60, "learning_rate": 0.01, "examples": 24, "searched": 1, "specs": specs,
    }  # fmt: skip
    first, search, exact, one, all_, aware, *drawn = STUDY.measure(settings, cell)
    assert first["metric"] < 0.2 * 256  # that of a guess
    assert 50 < first["guess"] < 90
    assert search["keys"] == 9
    assert search["off"] < 1e-5
    assert exact["gap"] == 0.0
    assert one["loss"] != exact["loss"]
    assert one["gap"] == pytest.approx(one["value"] - exact["value"], abs=1e-9)
    assert all_["loss"] == pytest.approx(exact["loss"], abs=1e-5)
    assert aware["value"] == pytest.approx(exact["value"], abs=0.5)
    assert [row["draw"] for row in drawn] == [0, 1]
    assert drawn[0]["loss"] != drawn[1]["loss"]


def test_cells_hold_what_their_results_depend_on(folder):
    cells = STUDY.cells(Settings(seeds=2))
    assert [(cell["length"], cell["seed"]) for cell in cells] == [(n, s) for s in (0, 1) for n in (32, 64, 128)]
    assert {cell["length"] * cell["batch_size"] for cell in cells} == {2048}  # as many bytes of a step
    assert [cell["examples"] for cell in cells[:3]] == [256, 128, 64]
    assert {*buckets(128)} < {*cells[2]["specs"]}
    assert not any(spec.startswith("lsh") for spec in cells[1]["specs"])  # a chunk would be half a key
    config = mlm._config(cells[0], None)
    assert (config.task, config.method, config.max_length, config.seed) == ("masked", "exact", 32, 0)
    assert STUDY.cells(Settings(data=folder))[0]["text"] != cells[0]["text"]


def test_the_papers_scale_is_its_length_and_wants_long_texts(folder, tmp_path):
    with pytest.raises(ValueError, match=r"value-aware-mlm wants .*books/\*\.txt.*PG19"):
        STUDY.cells(Settings("paper"))
    cell = STUDY.cells(Settings("paper", data=folder))[-1]
    assert (cell["length"], cell["num_layers"], cell["hidden_size"], cell["num_heads"]) == (4096, 12, 768, 12)
    wanted = {"top_keys(keys=65)", "value_aware(keys=65)", "random_features(features=256)", *buckets(4096)}
    assert wanted < set(cell["specs"])
    assert [budget(spec) for spec in buckets(4096)] == [64, 512]


def test_tables_and_figure_hold_all_lengths():
    tables, figure = shown(NAME, ROWS)
    assert tables[0].columns == ["method", "paper", "32 bytes", "64 bytes", "128 bytes"]
    assert tables[0].rows[0] == ["exact", "24.2", "23.2, 2.72", "22.2, 2.72", "20.2, 2.72"]
    assert [axes.get_title() for axes in figure.axes][:3] == [f"Ours, {n} bytes" for n in (32, 64, 128)]
