"""The end of a model with a method in every layer."""

import pytest
import torch

from sparing.workbench import swap as measured
from tests.support.model_zoo import build, tokens


def test_an_encoder_has_a_cosine_for_each_method(minilm):
    specs = ["window(size=8)", "top_keys(keys=4)", "top_keys(keys=32)", "top_keys(keys=64)"]
    rows = list(measured.swap(minilm.model, minilm.ids[:, :64], specs, decoder=False))
    assert [str(row.method) for row in rows] == ["exact", *specs]
    cosines = [row.mean for row in rows]
    assert cosines[0] == pytest.approx(1.0, abs=1e-6)
    assert cosines[4] == pytest.approx(1.0, abs=1e-5)
    assert cosines[2] < cosines[3] < 1 - 1e-4
    assert all(row.worst <= row.mean for row in rows)
    assert minilm.model.config._attn_implementation == "sdpa"


def test_perplexity_is_the_mean_over_documents():
    """By hand: the mean over documents is that of the log-likelihoods."""
    model, ids = build("llama"), tokens(30, 3)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].log_softmax(-1)
    nll = -logits.gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
    first, wide, narrow = measured.swap(model, ids, ["window(size=100)", "window(size=2)"], decoder=True)
    assert first.mean == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    assert first.worst == pytest.approx(float(nll.max().exp()), rel=1e-5)
    assert wide.mean == pytest.approx(first.mean, rel=1e-5)
    assert abs(narrow.mean / first.mean - 1) > 1e-3


def test_random_methods_run_once_per_seed():
    """Every document of every seed; one run where nothing is random."""
    model, ids = build("llama"), tokens(70, 2)
    spec = "multipole(clusters=4, keys=6, window=0, chunk=16)"
    exact, random, plain = measured.swap(model, ids, [spec, "window(size=10)"], decoder=True, seeds=3)
    assert (len(exact.each), len(random.each), len(plain.each)) == (2, 6, 2)
    assert len({round(x, 9) for x in random.each[::2]}) == 3
    assert random.worst == max(random.each)
    assert 6 < random.read < 36
    assert plain.read == pytest.approx(11)


def test_several_files_are_documents(tmp_path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.write_text(f"{path.name}\nhas two lines")
    assert measured.texts_of([str(paths[0])]) == ["a.txt", "has two lines"]
    assert measured.texts_of([str(path) for path in paths]) == ["a.txt\nhas two lines", "b.txt\nhas two lines"]


def test_the_command_prints_a_table(capsys, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("too short\n\n" + "a much longer line of text " * 20 + "\n")
    options = ["minilm", "--length", "40", "--documents", "1", "--text", str(path), "--methods", "window(size=8),exact"]
    assert measured.main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| method | keys read | cosine | worst |"
    assert lines[2] == "| `exact` | - | 1.0000 | 1.0000 |"
    assert lines[3].startswith("| `window(size=8)` | 9 | 0.")
    with pytest.raises(ValueError, match="only 1 texts have 40 tokens; ask for fewer documents than 2"):
        measured.main([*options[:3], "--documents", "2", *options[5:]])
