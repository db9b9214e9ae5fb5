"""`python -m tests.tools.distill.abandoned DIRECTORY`: two processes whose work does not end."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ssd_jax.tools.distill import side_by_side
from ssd_jax.tools.distill.completions import Report
from tests.tools.distill import fake_target


def sleep(_job: object, _shards: object) -> Iterator[Report]:
    """Says that it has begun."""
    yield Report()
    time.sleep(600)


if __name__ == "__main__":
    job = fake_target.job(Path(sys.argv[1]), processes=2)
    for report in side_by_side.run(sleep, job, {0: None, 1: None}):
        print(report, flush=True)
