"""What every test has: times that nothing disturbs, and real q, k, v, the layers of MiniLM on a help topic."""

import math

import pytest


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """Tests run side by side: take times as they come. A test of what disturbs them sets the limits again."""
    monkeypatch.setattr("sparing.workbench.timing.OTHER_WORK", math.inf)
    monkeypatch.setattr("sparing.workbench.timing.SPREAD", math.inf)
    monkeypatch.setattr("sparing.workbench.timing._LEAST", 0.0)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    """Worker processes of pytest have a width, as if there were a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def minilm_layers():
    """Six layers, one text of 128 tokens: `query`, `key` [1, 12, 128, 32] and `value`, a Projection."""
    from sparing.models import minilm
    from sparing.transformers.watch import record_calls

    encoder = minilm.load()
    ids = minilm.token_ids(encoder, length=128, documents=1)
    return record_calls(encoder.model, "monte_carlo", lambda: encoder.model(input_ids=ids))
