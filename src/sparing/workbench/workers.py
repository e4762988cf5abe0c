"""Connect joblib to workers: processes of this machine, or a Dask or Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cluster(backend: str, address: str | None = None, jobs: int | None = None) -> Iterator[str | None]:
    """Connect to a cluster and yield the name of joblib's backend, or None for plain processes.

    backend: "loky" (processes), "dask" or "ray". address: that of a running scheduler; None starts `jobs` workers here.
    """
    if backend == "loky":
        if address is not None:
            raise ValueError(f"cluster={address!r} is for backend='dask' or 'ray'; leave it out for processes")
        yield None
    elif backend == "dask":
        try:
            from dask.distributed import Client
        except ModuleNotFoundError:
            raise ModuleNotFoundError("backend='dask' needs Dask; run: pip install 'dask[distributed]'") from None
        here = {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": None}
        try:
            client = Client(address, timeout="5s") if address else Client(**here)
        except (OSError, ValueError) as error:
            raise ValueError(f"cluster={address!r} cannot be reached: {error}") from None
        with client:
            yield "dask"
    elif backend == "ray":
        try:
            import ray
            from ray.util.joblib import register_ray
        except ModuleNotFoundError:
            raise ModuleNotFoundError("backend='ray' needs Ray; run: pip install ray") from None
        ray.init(address=address, ignore_reinit_error=True, **({} if address else {"num_cpus": jobs}))
        register_ray()
        try:
            yield "ray"
        finally:
            ray.shutdown()
    else:
        raise ValueError(f"backend={backend!r} is not one of 'loky', 'dask', 'ray'")
