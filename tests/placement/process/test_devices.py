"""A worker has the devices that it was given and no others, and the text stays what it is."""

from __future__ import annotations

import jax
import msgspec
import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.llm import LLM
from ssd_jax.placement.process import placement
from ssd_jax.placement.process.supervisor import COMMAND
from ssd_jax.placement.visible import Devices
from ssd_jax.testing import tiny
from tests.llm.test_speculative import outputs, requests
from tests.placement.process.script import SETTINGS

PATIENCE = 120.0  # no answer is late here, however busy the machine is


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory of two checkpoints that often agree."""
    root = tmp_path_factory.mktemp("devices")
    tiny.write_checkpoint(root / "target", "qwen3")
    tiny.write_checkpoint(root / "draft", "qwen3", noise=0.04)
    return root


def opened(made, **settings):
    defaults = {"context": 320, "dtype": "float32", "k": "3", "budget": "8", "slots": 4}
    return LLM(
        str(made / "target"),
        mode="ssd",
        draft=str(made / "draft"),
        draft_placement="process",
        verify="coupled",
        compile_cache=jax.config.jax_compilation_cache_dir,
        **defaults | settings,
    )


@pytest.mark.parametrize("devices", ["cpu:0,1", "cpu:1"])
def test_a_worker_with_devices_of_its_own_says_what_autoregressive_decoding_says(made, devices):
    """Greedy requests and coupled ones; this process has eight devices."""
    with opened(made, draft_devices=devices) as llm:
        worker = llm.loaded.worker
        worker.patience = PATIENCE
        assert worker.supervisor.devices == ("cpu:0", "cpu:1")
        asked = requests(llm, "coupled")
        found = outputs(llm, asked, "ssd")
        alone = outputs(llm, asked, "ar")
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        rates = [one.metrics["hit_rate"] for one in found]
        assert np.mean([rate for rate in rates if rate is not None]) > 0.1


UNCLAIMED = """
from ssd_jax.placement.visible import Devices
Devices.claim = lambda self: None
from ssd_jax.placement.process.main import main
main()
"""


def test_a_worker_that_claims_no_devices_is_seen(made, monkeypatch):
    """The planted fault: it then has those of whoever started it."""
    command = [*COMMAND[:2], "-c", UNCLAIMED]
    usual = placement.DraftWorker

    def faulty(settings):
        return usual(settings, command=command)

    monkeypatch.setattr(placement, "DraftWorker", faulty)
    with opened(made, draft_devices="cpu:1") as llm:
        assert len(llm.loaded.worker.supervisor.devices) == len(jax.devices()) > 2


def test_a_worker_that_has_no_such_devices_says_so_before_it_looks_for_a_model():
    settings = msgspec.structs.replace(SETTINGS, source="no model", devices=Devices("gpu", (1,)))
    worker = placement.DraftWorker(settings, command=COMMAND)
    worker.supervisor.start()
    try:
        with pytest.raises(InputError, match=r"cannot start: JAX has cpu:0.* in place of gpu:1"):
            worker.supervisor.wait_ready()
    finally:
        worker.close()
