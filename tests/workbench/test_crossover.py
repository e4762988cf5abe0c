"""Races at growing lengths, batches, and where heads look."""

import base64

import pytest
import torch

from sparing.contract import Projection
from sparing.transformers.watch import record_calls
from sparing.workbench.calls import middle_calls
from sparing.workbench.comparison.compare import compare
from sparing.workbench.comparison.judgement import SLOWER
from sparing.workbench.comparison.maps import maps
from sparing.workbench.comparison.races import race_at
from sparing.workbench.comparison.seconds import seconds
from sparing.workbench.comparison.summary import rounded, summary
from sparing.workbench.comparison.sweep import fragile
from sparing.workbench.comparison.verdict import Row
from sparing.workbench.crossover import crossover
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import MARGIN, Interval
from tests.support.small_models import TEXTS, subject


def calls_of(one, ids, spec):
    return record_calls(one.model, spec, lambda: one.run(ids))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([(256, 0.5), (512, 0.8)], None),
        ([(256, 2.0), (512, 4.0)], 256),
        ([(256, 2.0), (512, 0.9)], None),  # not for good
        ([(256, 0.5), (512, 1.02)], None),  # within the noise
        ([(256, 0.515), (1024, 2.06)], 512),
        ([(256, 2.0), (512, 0.9), (1024, 1.5)], 615),
        ([], None),
    ],
)
def test_the_length_from_which_a_method_is_faster(given, wanted):
    assert crossover(given, margin=MARGIN).tokens == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], "not measured"),
        ([(512, 0.9)], "none up to 512"),
        ([(512, 1.0)], "below 512"),
        ([(512, 2.0), (1024, 4.0)], "below 512"),
        ([(1024, 2.0), (512, 0.5)], "724"),
        ([(512, 0.1), (1024, 0.25), (4096, 4.0), (8192, 8.0)], "2048"),
        ([(512, 2.0), (1024, 0.5), (2048, 2.0)], "1448"),
        ([(512, 2.0), (1024, 0.5)], "none up to 1024"),
    ],
)
def test_a_crossover_in_words(given, wanted):
    assert str(crossover(given)) == wanted


def test_the_sentence_names_the_length():
    change = Estimate(0.002, 0.0, 0.004, 4)
    rows = [Row(f"window(size={n})", SLOWER, change=change, crossover=n) for n in (4000, 2874, 50)]
    text = summary(rows, 4, 99, 0.01, "m")
    assert text.endswith(
        "Longer documents may pay: the attention of window(size=2874) is faster from about 2,900 tokens on, and what "
        "it changes there was not measured (--length)."
    )
    assert "0.20%" not in text, "the change of short documents says nothing about long ones"
    assert "may pay" not in summary(rows[2:], 4, 99, 0.01, "m"), "a call that is faster already says nothing new"
    assert (rounded(7), rounded(99), rounded(12345)) == ("7", "99", "12,000")


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_race_at_a_length_that_no_document_has(name):
    one = subject(name)
    rows, _ = one.encode(TEXTS, 60)
    spec = "monte_carlo(alpha=0.4)" if name == "bert" else "top_keys(keys=1)"
    seen = middle_calls(one, rows, ["nystrom(landmarks=4)", spec])
    assert len(seen) == 5
    assert isinstance(seen[0].value, Projection) == (name == "bert")
    specs = ["window(size=8)", "nystrom(landmarks=4)", *([spec] if name == "bert" else [])]
    ratios, taken, _ = race_at(seen, specs, 333)
    assert taken > 0
    assert list(ratios) == specs
    assert (ratios["nystrom(landmarks=4)"] is None) == (name == "llama"), "what cannot be causal takes no part"
    assert all(ratio is None or 0 < ratio.low <= ratio.high for ratio in ratios.values())


def test_a_comparison_holds_the_races(monkeypatch):
    from sparing.workbench.comparison import sweep

    asked = []

    def fake(seen, specs, length):
        asked.append((list(specs), length))
        ratio = length / 1000
        return dict.fromkeys(specs, Interval(ratio, ratio, ratio)), 0.1 if length < 2048 else 2.0, ""

    monkeypatch.setattr(sweep, "race_at", fake)
    methods = ["window(size=4)", "top_keys(keys=4)", "exact"]
    found = compare(subject(), TEXTS, methods=methods, length=60, rounds=1, jobs=1, batch_size=2)
    racers = ["window(size=4)", "exact"]
    assert asked == [(racers, length) for length in (256, 512, 1024, 2048)], "until a round takes too long"
    window, oracle, exact = found.rows
    assert [point.length for point in window.points] == [256, 512, 1024, 2048]
    assert window.crossover == pytest.approx(1030, rel=0.01)
    assert exact.points == window.points
    assert oracle.points == ()
    assert (found.batch, found.padding) == (2, 0.0)
    assert window.time.batched.median > 0
    again = type(found).from_json(found.to_json())
    assert again == found
    assert found.records()[0]["crossover"] == window.crossover


def test_a_batch_is_what_its_documents_are():
    one = subject()
    rows, _ = one.encode([TEXTS[0][:20], TEXTS[1]], 60)
    with torch.no_grad():
        both = one.run_batch(rows).last_hidden_state
        alone = [one.run(ids).last_hidden_state[0] for ids in rows]
    for number, wanted in enumerate(alone):
        torch.testing.assert_close(both[number, : len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    found = seconds(one, rows[0], "window(size=4)", rounds=1, batch=rows)
    assert found.batched.median > 0
    assert seconds(one, rows[0], "window(size=4)", rounds=1).batched is None


def test_maps_show_where_heads_look():
    one = subject("llama")
    rows, _ = one.encode(TEXTS[:1], 60)
    seen = calls_of(one, rows[0], "top_keys(keys=1)")
    heads = [(seen[0].layer, 0, 0), (seen[1].layer, 1, 2)]
    exact = maps(one, rows[0], "exact", heads)
    assert [(each.number, each.head, each.method) for each in exact] == [(0, 0, "exact"), (1, 2, "exact")]
    for each in exact:
        call = seen[each.number]
        size = call.query.shape[1] // call.key.shape[1]
        scores = call.query[0, each.head] @ call.key[0, each.head // size].mT * (call.call["scale"] or 1)
        weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
        side = each.side
        block = torch.nn.functional.one_hot(torch.arange(60) * side // 60, side).float()
        wanted = (block / block.sum(0)).mT @ weights @ block
        drawn = torch.tensor(list(base64.b64decode(each.pixels))).view(side, side)
        torch.testing.assert_close((drawn / 255).square(), wanted, rtol=0.02, atol=0.005)
    near = maps(one, rows[0], "window(size=2)", heads[:1])[0]
    picture = torch.tensor(list(base64.b64decode(near.pixels))).view(near.side, near.side)
    assert picture.tril(-4).max() == 0, "a window sees nothing far away"
    assert torch.tensor(list(base64.b64decode(exact[0].pixels))).view(near.side, near.side).tril(-4).max() > 0


def test_maps_keep_the_choices_of_a_method_that_looks_at_values():
    """Marks beside the values are small enough that key_clusters expands the clusters that it would."""
    import sparing

    one = subject()
    rows, _ = one.encode(TEXTS[:1], 60)
    spec = "key_clusters(clusters=6, keys=6, window=2)"
    (seen, *_) = calls_of(one, rows[0], spec)
    found = maps(one, rows[0], spec, [(seen.layer, 0, 1)])[0]
    weights = torch.eye(60).expand(1, seen.key.shape[1], -1, -1)
    values = torch.cat([seen.projected, weights * 1e-6], -1)
    out = sparing.attention(seen.query, seen.key, values, **seen.call)[0, 1, :, -60:] / 1e-6
    block = torch.nn.functional.one_hot(torch.arange(60) * found.side // 60, found.side).float()
    wanted = (block / block.sum(0)).mT @ out @ block
    drawn = torch.tensor(list(base64.b64decode(found.pixels))).view(found.side, found.side)
    torch.testing.assert_close((drawn / 255).square(), wanted, rtol=0.02, atol=0.006)


def test_the_most_fragile_heads():
    layer = lambda name, *heads: {"layer": name, "heads": heads}  # noqa: E731
    found = {
        "window(size=8)": [{"layers": [layer("a", 0.1, 0.5), layer("b", 0.9, 0.2)]}],
        "nystrom(landmarks=8)": [{"layers": [layer("a", 0.1, 0.5), layer("b", 0.1, 99.0)]}],
        "top_keys(keys=8)": [{"layers": [layer("a", 5.0, 0.0), layer("b", 0.0, 0.0)]}],
        "lsh": [{"refused": "why not"}],
    }
    assert fragile(found) == [("a", 0, 1), ("b", 1, 1)], "one that blew up counts once; oracles do not"


def test_a_head_that_the_user_names_is_drawn_too():
    options = {"methods": ["window(size=4)"], "length": 60, "rounds": 1, "jobs": 1, "lengths": False, "batch_size": 1}
    found = compare(subject(), TEXTS, head=(1, 3), **options)
    heads = [(each.number, each.head) for each in found.maps if each.method == "exact"]
    assert (1, 3) in heads
    plain = compare(subject(), TEXTS, **options)
    assert (1, 3) not in [(each.number, each.head) for each in plain.maps], "control: only because it was named"
    assert {each.method for each in found.maps} == {"exact", "window(size=4)"}
    for head in ((9, 0), (0, 4)):
        with pytest.raises(ValueError, match=r"head=\d\.\d: the model has layers 0 to 1 and heads 0 to 3"):
            compare(subject(), TEXTS, head=head, **options)
