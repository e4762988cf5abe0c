"""`torch.compile(model, fullgraph=True)` of an approximated model: one graph, the same bits."""

import pytest
import torch

import sparing
from tests.support.model_zoo import build, inputs, run

CASES = [
    ("bert", "nystrom(landmarks=4)"),
    ("bert", "monte_carlo(alpha=1.0)"),
    ("bert", {0: "random_features(features=8)"}),
    ("llama", {0: "window(size=4, sinks=1)"}),
    ("vit", "nystrom(landmarks=4)"),
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_compiled_model_is_one_graph_with_the_same_bits(name, what):
    torch.compiler.reset()
    model, given = build(name), inputs(name)
    exact = run(model, given)
    with sparing.approximate(model, what) as handle:
        out = run(model, given)
        assert not handle.statistics(reset=True).compiled
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(run(compiled, given), out)
        found = handle.statistics()
        assert (found.compiled, found.total.calls) == (True, 0)
        assert "\ncalls of compiled graphs are not counted; run the model without" in str(found)
    assert not torch.equal(out, exact)
    assert torch.equal(run(compiled, given), exact), "a compiled model follows restore()"


def test_a_compiled_model_trains_with_the_same_gradients():
    torch.compiler.reset()
    model, given = build("bert", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0), inputs("bert")
    grads = []
    with sparing.approximate(model, "nystrom(landmarks=4)"):
        for runs in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            runs(**given)[0].square().sum().backward()
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert sum(bool(g.any()) for g in grads[0]) > 20
    for plain, compiled in zip(*grads):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
