"""The same sweep on a cluster of workers."""

import pytest

from sparing.store import Store
from sparing.workbench.cells import measured
from sparing.workbench.comparison.compare import compare
from sparing.workbench.workers import cluster
from tests.support.small_models import TEXTS, subject

METHODS = ["window(size=4)", "yoso(hashes=4)"]
OPTIONS = {"methods": METHODS, "length": 60, "rounds": 1, "lengths": False, "batch_size": 1}


def numbers(found):
    return [(row.change, row.error, row.layers, row.end, row.keys_read, row.flops_reduction) for row in found.rows]


@pytest.mark.filterwarnings("ignore")  # of Dask's own: ports in use, event loops
def test_two_workers_of_dask_find_what_one_process_finds():
    one = subject()
    alone = compare(one, TEXTS, jobs=1, **OPTIONS)
    with cluster("dask", jobs=2) as backend:
        from dask.distributed import default_client

        assert len(default_client().scheduler_info()["workers"]) == 2
        assert numbers(compare(one, TEXTS, jobs=2, backend=backend, **OPTIONS)) == numbers(alone)
        found = measured([{"number": i} for i in range(4)], double, Store(None), jobs=2, backend=backend)
    assert found == [0, 2, 4, 6]
    assert numbers(compare(one, TEXTS, jobs=2, **OPTIONS)) == numbers(alone), "two processes, too"


def double(cell):
    return 2 * cell["number"]


def test_clusters_that_are_not_there():
    with (
        pytest.raises(ValueError, match=r"cluster='tcp://127.0.0.1:1' cannot be reached"),
        cluster("dask", "tcp://127.0.0.1:1"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="is for backend='dask' or 'ray'; leave it out for processes"),
        cluster("loky", "somewhere"),
    ):
        pass
    with pytest.raises(ValueError, match="backend='slurm' is not one of"), cluster("slurm"):
        pass
