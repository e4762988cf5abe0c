"""`sparing bench --padded`: batches of mixed length, padded and without padding, in both orders."""

import json
from dataclasses import replace

import pytest
import torch

import sparing
from sparing.cli.main import main
from sparing.report.padded import show
from sparing.report.terminal import Terminal
from sparing.transformers import packing
from sparing.workbench.benchmark import padded
from sparing.workbench.benchmark.padded import PACKED, PADDED, PaddedBench, drawn_rows, padded_bench
from sparing.workbench.comparison.seconds import PaddingSeconds
from sparing.workbench.comparison.summary import padding_sentence
from sparing.workbench.comparison.verdict import Comparison
from sparing.workbench.timing import Interval
from tests.support.small_models import saved, subject

ROWS = [torch.arange(3, 3 + n) % 90 + 3 for n in (40, 3, 12, 25, 7, 30)]


def printed(found):
    console = Terminal(width=120)
    with console.capture() as said:
        show(found, console=console)
    return said.get()


def test_every_side_runs_in_both_orders():
    found = padded_bench(subject(), ROWS, "rows", methods=["window(size=4)"], batch_size=3, rounds=2)
    assert [(row.order, row.side) for row in found.batches] == [
        (order, side) for order in ("as given", "by length") for side in (PADDED, PACKED, "window(size=4)")
    ]
    assert found.padding == {"as given": 1 - 117 / (3 * 40 + 3 * 30), "by length": 1 - 117 / (3 * 40 + 3 * 12)}
    assert found.difference < 1e-6
    changes = {row.side: row.change for row in found.batches}
    assert abs(changes[PACKED]) < 1e-9 < changes["window(size=4)"]
    assert PaddedBench.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert "window(size=4)" in printed(found)


def test_no_speed_is_given_for_wrong_embeddings(monkeypatch):
    """A gate that cannot be red would be none."""
    whole = packing.PackedBatch.unpack
    monkeypatch.setattr(packing.PackedBatch, "unpack", lambda self, x: whole(self, x.roll(1, 1)))
    found = padded_bench(subject(), ROWS, "rows", batch_size=3, rounds=1)
    assert found.difference > 1e-2
    said = printed(found)
    assert "which is not rounding: no speed is given" in said
    assert "1.00x" not in said


def test_a_busy_machine_is_said(monkeypatch):
    monkeypatch.setattr(padded, "undisturbed", lambda measure, exact: (measure(), "other programs take 90%"))
    found = padded_bench(subject(), ROWS, "rows", batch_size=3, rounds=1)
    assert "This machine was busy: other programs take 90%. Trust no time below" in printed(found)


def test_drawn_lengths_are_those_of_reviews():
    lengths = sorted(map(len, drawn_rows(subject(), 2000, 512)))
    assert 210 < lengths[1000] < 250
    assert lengths[0] >= 8
    assert lengths[-1] == 512


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(saved(tmp_path / "model"))
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": "words " * n}) + "\n" for n in (1, 9, 4, 7)))
    given = [
        "bench",
        "--padded",
        folder,
        "--data",
        "mine.jsonl",
        "--batch-size",
        "2",
        "--rounds",
        "1",
        "--length",
        "40",
    ]
    assert main(given) == 0
    assert "exact, without padding" in capsys.readouterr().out
    assert main(["show", "out/padded.json"]) == 0
    assert "4 texts of" in capsys.readouterr().out
    for wrong, said in (
        ([*given, "--length", "9999"], "--length=9999 must be from 2 to 512, the positions of the model"),
        ([*given, "--batch-size", "5"], "batch_size=5 must be from 2 to 4, the number of texts"),
        ([*given, "--lengths", "512"], "--lengths is for attention calls"),
        (["bench", "--documents", "3"], "--documents is for texts in batches: name a model with --padded"),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="is a language model; encoders embed batches of texts"):
        padded_bench(subject("llama"), ROWS, "rows", batch_size=2)


def test_a_comparison_says_what_padding_costs(tmp_path):
    texts = ["many words " * 20, "few", "some words " * 3]
    options = {"methods": ["window(size=4)"], "length": 200, "rounds": 2, "jobs": 1, "lengths": False}
    found = sparing.compare(subject(), texts, **options, cache=tmp_path, progress=False)
    assert found.unpadded is not None
    assert found.unpadded.speed.median > 0
    assert Comparison.from_json(found.to_json()) == found
    again = sparing.compare(subject(), texts, **options, cache=tmp_path, progress=False)
    assert again.unpadded == found.unpadded, "kept"
    alone = sparing.compare(subject(), texts, **options, batch_size=1, progress=False)
    assert alone.unpadded is None, "no batch, no padding"
    assert (
        sparing.compare(subject("nystromformer"), texts, **{**options, "length": 100}, progress=False).unpadded is None
    )


def test_what_padding_costs_is_said_where_it_is_sure():
    sure = PaddingSeconds(Interval(1.5, 1.4, 1.6))
    assert padding_sentence(sure, 4, 0.38) == (
        "A batch of 4 (38% padding) is 1.50x as fast without its padding, with the same outputs: "
        'sparing.approximate(model, "exact", padding="remove").'
    )
    assert padding_sentence(replace(sure, disturbed="others"), 4, 0.38) == ""
    assert padding_sentence(PaddingSeconds(Interval(1.1, 0.9, 1.2)), 4, 0.38) == ""
    assert padding_sentence(None, 4, 0.0) == ""
