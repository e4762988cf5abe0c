"""Plans of generation: the fastest method whose promise held-out passages or facts confirm."""

import pytest

import sparing
from sparing.cli.main import main
from sparing.cli.options import console_of
from sparing.report.plan import show
from sparing.store import Store
from sparing.transformers.recipe import Recipe
from sparing.workbench.comparison.facts import FactRuns
from sparing.workbench.comparison.tokens import TokenSpeed
from sparing.workbench.planning import generating
from sparing.workbench.planning.plan import plan
from sparing.workbench.timing import Interval
from tests.support.generations import facts_of
from tests.support.small_models import saved, subject

SPEEDS = {"window(size=2)": 2.0, "window(size=30)": 1.5, "window(size=1000)": 1.2, "multipole(tolerance=0.01)": 0.9}
TEXTS = [f"{number} {'some words and more of them ' * 2}{number**3}" for number in range(40)]


@pytest.fixture
def speeds(monkeypatch):
    """The clock, in the test's hands."""
    told = dict(SPEEDS)

    def token_speed(model, prompt, spec, length):
        return TokenSpeed(Interval(*[told[spec]] * 3), "")

    monkeypatch.setattr(generating, "token_speed", token_speed)
    return told


def run(**options):
    given = {"methods": list(SPEEDS), "coverage": 0.8, "context": 60}
    if options.get("metric") != "needle":
        given |= {"tolerance": 0.1, "confidence": 0.8}
    return plan(subject("llama"), TEXTS, **{**given, "when": "decode", "documents": 14, **options})


def test_the_fastest_that_holds_is_planned_for_every_layer(speeds, tmp_path):
    found = run(tolerance=1e-4, cache=tmp_path / "kept")
    assert set(found.recipe.layers.values()) == {"window(size=1000)"}, "what changes nothing, though others are faster"
    assert found.recipe.when == "decode"
    assert [one.used for one in found.candidates] == [True, True, True, False]
    assert (found.step, found.steps, found.gain.median, found.ceiling.median) == (1, 3, 1.2, 2.0)
    assert (found.held_out.documents, found.held_out.violations) == (9, 0)
    assert found.held_out.worst < 1e-4
    assert "with when='decode': 9 of 9 held-out passages stay within 0.01%" in found.reason
    assert "a token after 60 others is 1.20x as fast" in found.reason
    found.recipe.save(tmp_path / "recipe.json")
    one = subject("llama")
    with sparing.approximate(one.model, tmp_path / "recipe.json") as handle:
        assert set(handle.layers.values()) == {"window(size=1000)"}
    assert "when" in Recipe.load(tmp_path / "recipe.json").to_dict()
    assert run(tolerance=1e-4, cache=Store(tmp_path / "kept")).held_out == found.held_out
    assert run(tolerance=0.9, when="always").recipe.when == "always"


def test_held_out_passages_have_the_last_word(speeds, monkeypatch):
    change = generating.PassageCases._change
    monkeypatch.setattr(
        generating.PassageCases,
        "_change",
        lambda self, ids, spec: 0.9 if any(ids is each for each in self.held_out) else change(self, ids, spec),
    )
    found = run()
    assert not found.holds
    assert "held-out documents do not show the promise: 9 of 9 are beyond" in found.reason


def test_nothing_that_is_faster_is_mild_enough(speeds):
    del speeds["window(size=1000)"]
    found = run(tolerance=1e-6, methods=["window(size=2)", "window(size=30)"])
    assert found.reason.startswith("Keep exact attention: no candidate leaves enough room")
    assert found.recipe.layers == {}
    slow = run(methods=["multipole(tolerance=0.01)"])
    assert slow.reason.startswith("Keep exact attention: no candidate's tokens are sure to be faster after 60 others")
    kept = run(methods=["multipole(tolerance=0.01)"], keep=True)
    assert kept.holds
    assert "That is no gain for sure" in kept.reason


@pytest.mark.parametrize(
    ("kept", "holds"), [((40, 40, 80, 80), True), ((40, 30, 80, 80), False), ((40, 40, 80, 60), False)]
)
def test_facts_of_other_contexts_confirm_the_promise(speeds, monkeypatch, kept, holds):
    """Calibration and held-out contexts come from different seeds; both must keep facts."""
    seeds = []

    def contexts_of(subject, length, count, *, first=0):
        seeds.append({first + number for number in range(count)})
        return [first] * count

    def count(self, contexts, runs):
        (run,) = runs
        return {run: facts_of(*(kept[2:] if contexts[0] else kept[:2]))}

    monkeypatch.setattr(generating, "contexts_of", contexts_of)
    monkeypatch.setattr(FactRuns, "count", count)
    found = run(metric="needle", when=None, coverage=0.9, methods=["window(size=2)"])
    assert not seeds[0] & seeds[1]
    assert found.holds == holds
    assert found.recipe.when == "decode"
    assert found.promise.confidence == 0.975, "of the lower end of an interval of 95 %"
    if holds:
        assert "80 of 80 facts in held-out contexts are kept (at least 94%)" in found.reason
        assert (found.held_out.documents, found.held_out.violations) == (80, 0)


def test_the_command_writes_a_recipe_for_generation(speeds, tmp_path, capsys):
    folder, data = saved(tmp_path / "small", "llama"), tmp_path / "lines.txt"
    data.write_text("\n".join(TEXTS))
    given = ["plan", str(folder), "--data", str(data), "--when", "decode", "--context", "60", "--documents", "14"]
    given += ["--coverage", "0.8", "--confidence", "0.8", "--tolerance", "0.5", "--methods", "window(size=1000)"]
    assert main([*given, "--no-cache", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "continuations like these change by 50% at most" in out
    assert "Token: speed of a generated token against exact attention" in " ".join(out.split())
    assert "small (language model, float32) on lines.txt: 14 passages of 60 tokens; " in " ".join(out.split())
    assert "layers method token damage" in " ".join(out.split())
    assert Recipe.load(tmp_path / "out" / "recipe.json").when == "decode"
    assert main(["show", str(tmp_path / "out" / "plan.json")]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"when": "never"}, "when='never' is not one of always, prefill, decode"),
        ({"metric": "cosine"}, "metric='cosine' is not one of perplexity, agreement, needle, which generation has"),
        ({"objective": "memory"}, "with when='decode' a plan saves time"),
        ({"context": 4}, "^context=4 must be at least 8 tokens"),
        ({"when": "prefill"}, "context=60 is for generation: pass when='decode' or 'always'"),
        ({"documents": 3}, "documents: 3 are too few for coverage=0.8"),
        ({"metric": "needle"}, "no task fits into context=60 tokens; use a longer context"),
        ({"metric": "needle", "confidence": 0.9}, "confidence=0.9 is not used with metric='needle'; leave it out"),
        ({"metric": "needle", "tolerance": 0.01}, "tolerance=0.01 is not used with metric='needle'; leave it out"),
        ({"metric": "needle", "when": "prefill", "context": None}, "is for generation: pass when='decode'"),
        ({"length": 64}, "length=64 is for plans of prompts; leave it out with when='decode'"),
        ({"rounds": 7}, "rounds=7 is for plans of prompts"),
        ({"jobs": 1, "when": "always"}, "jobs=1 is for plans of prompts; leave it out with when='always'"),
        ({"extend_positions": True}, "extend_positions=True is for plans of prompts"),
        ({"context": 10**6}, "^context=1000000 is more than the"),
    ],
)
def test_what_cannot_be_planned_is_refused(speeds, options, said):
    with pytest.raises(ValueError, match=said):
        run(**options)


def test_an_encoder_does_not_generate(capsys):
    assert main(["plan", "minilm", "--metric", "needle"]) == 2
    assert "when='decode': only language models generate, and minilm is not one" in capsys.readouterr().err


def test_documents_that_fill_no_context_are_named_by_the_option(speeds):
    with pytest.raises(ValueError, match=r"^context=60: the documents have 2 tokens in all"):
        plan(subject("llama"), ["ab"], when="decode", context=60)


def test_candidates_that_are_slower_are_shown_by_the_speed_of_a_token(speeds, capsys):
    show(run(methods=["multipole(tolerance=0.01)"]), console=console_of())
    out = " ".join(capsys.readouterr().out.split())
    assert "best candidates token" in out
    assert "multipole(tolerance=0.01) 0.90x" in out
