"""What every doctest may name, and one torch thread per test process."""

import pytest
import torch
from hypothesis import HealthCheck, settings

import sparing


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, sparing=sparing)


@pytest.fixture(autouse=True)
def _fixed_start():
    torch.manual_seed(0)


def pytest_configure(config):
    """Two workers share two cores; threads inside each would only fight. Property tests repeat the same examples."""
    torch.set_num_threads(1)
    settings.register_profile(
        "fixed",
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("fixed")
