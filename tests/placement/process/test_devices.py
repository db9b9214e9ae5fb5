"""A worker has the devices that it was given and no others, and the text stays what it is."""

from __future__ import annotations

import jax
import msgspec
import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.placement.process.supervisor import COMMAND, Supervisor, WorkerResources
from ssd_jax.placement.visible import Devices
from tests.checkpoints import tiny_pair
from tests.llm.runs import outputs, requests
from tests.placement.process.script import SETTINGS

pytestmark = pytest.mark.usefixtures("steady_streams")
PATIENCE = 120.0  # no answer is late here, however busy the machine is


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Two checkpoints that often agree, the draft on two devices of its own."""
    target, draft = tiny_pair.write(tmp_path_factory.mktemp("devices"), "qwen3")
    with LLM(
        target,
        mode="ssd",
        draft=draft,
        draft_placement="process",
        draft_devices="cpu:0,1",
        verify="coupled",
        compile_cache=jax.config.jax_compilation_cache_dir,
        context=320,
        dtype="float32",
        k=3,
        budget="8",
        slots=4,
    ) as llm:
        llm.loaded.worker.patience = PATIENCE
        yield llm


@pytest.mark.more
def test_a_worker_with_devices_of_its_own_says_what_autoregressive_decoding_says(llm):
    """Greedy requests and coupled ones; this process has eight devices."""
    assert llm.loaded.worker.supervisor.devices == ("cpu:0", "cpu:1")
    asked = requests(llm, "coupled")
    found, alone = (outputs(llm, asked, mode) for mode in ("ssd", "ar"))
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    rates = [one.metrics["hit_rate"] for one in found]
    assert np.mean([rate for rate in rates if rate is not None]) > 0.1


UNCLAIMED = """
from ssd_jax.placement.visible import Devices
Devices.claim = lambda self: None
from ssd_jax.placement.process.main import main
main()
"""


@pytest.mark.parametrize(
    ("devices", "command", "words"),
    [
        (Devices("cpu", (0, 1)), COMMAND, "no model"),
        (Devices("cpu", (0, 1)), [*COMMAND[:2], "-c", UNCLAIMED], "JAX has cpu:0 in place of cpu"),
        (Devices("gpu", (1,)), COMMAND, "JAX has cpu:0 in place of gpu:1"),
    ],
    ids=["claimed", "planted fault", "not there"],
)
def test_a_worker_without_its_devices_says_so_before_it_looks_for_a_model(
    monkeypatch, devices, command, words
):
    monkeypatch.setenv("XLA_FLAGS", "")
    resources = WorkerResources(source="no model", devices=devices)
    settings = msgspec.structs.replace(SETTINGS, resources=resources)
    supervisor = Supervisor(settings, command)
    supervisor.start()
    try:
        with pytest.raises(InputError, match=f"cannot start: .*{words}"):
            supervisor.wait_ready()
    finally:
        supervisor.close()
