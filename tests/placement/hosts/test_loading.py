"""Each process reads the parts of the weights that its devices hold, and holds little more."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ssd_jax.checkpoints.weights.load import load_parameters
from tests.models.random_weights import made
from tests.placement.hosts.loading import Recording
from tests.placement.hosts.processes import Processes


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_host_reads_and_holds_its_part(dtype):
    script = "tests.placement.hosts.loading", dtype
    with Processes(*script, follower=script) as processes:
        model = made(dtype, 4)
        alone = load_parameters(Recording(model), model, where="here")
        ends = processes.ended()
    assert [status for status, *_ in ends] == [0, 0], "\n".join(words for *_, words in ends)
    for _, output, _ in ends:
        report = json.loads(output.splitlines()[-1])
        sizes = report["sizes"]
        assert sum(sizes[name] for name in report["cut"]) > 0.8 * sum(sizes.values())
        for name, size in sizes.items():
            assert report["read"][name] == (size // 2 if name in report["cut"] else size), name
        largest = max(sizes.values()) * 4  # of two devices, in the widest dtype, copied
        assert report["held"] <= report["weights"] + 2 * largest
        expected = [float(np.asarray(array, np.float32).sum()) for array in alone]
        np.testing.assert_allclose(report["sums"], expected, rtol=1e-4, atol=1e-2)
