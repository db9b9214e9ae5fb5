"""Which devices target and draft's process have JAX start with; a scripted node stands for GPUs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

from ssd_jax.config.config import Config
from ssd_jax.errors import InputError
from ssd_jax.placement import placement, visible
from ssd_jax.placement.visible import PROCESSOR, Devices

SSD = {"mode": "ssd", "draft": "a path", "slots": 2}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU as far as a placement looks at it."""

    id: int
    platform: str = "gpu"


@pytest.fixture
def node(monkeypatch):
    """Pretends that there are so many GPUs, and that JAX has started with them, or has not yet."""

    def pretend(count, *, started=False):
        def devices():
            setting = jax.config.read("jax_cuda_visible_devices")
            return [Chip(n) for n in range(count if setting == "all" else len(setting.split(",")))]

        monkeypatch.setattr(placement, "count_gpus", lambda: count)
        monkeypatch.setattr(visible, "jax_has_started", lambda: started)
        monkeypatch.setattr(jax, "devices", devices)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    yield pretend
    jax.config.update("jax_cuda_visible_devices", "all")


def placed(**settings):
    """The placement, and what JAX was told to see."""
    found = Config(**SSD | settings).place_draft()
    return found, jax.config.read("jax_cuda_visible_devices")


@pytest.mark.parametrize(
    ("count", "settings", "target", "draft"),
    [
        (2, {}, (0,), (1,)),
        (2, {"draft_placement": "process"}, (0,), (1,)),
        (8, {}, (0, 1, 2, 3), (4, 5, 6, 7)),
        (4, {"draft_devices": "1"}, (0, 2, 3), (1,)),
        (4, {"draft_devices": "gpu:0,1"}, (2, 3), (0, 1)),
        (4, {"target_devices": "1", "draft_devices": "3"}, (1,), (3,)),
        (8, {"mesh": "data=2", "draft_devices": "0"}, (1, 2), (0,)),
    ],
)
def test_with_several_gpus_the_draft_has_some_in_a_process_and_the_target_sees_the_others(
    node, count, settings, target, draft
):
    node(count)
    found, setting = placed(**settings)
    assert setting == ",".join(map(str, target))
    assert (found.kind, found.workers) == ("process", (Devices("gpu", draft),))
    assert found.devices == {
        "target": tuple(f"gpu:{n}" for n in target),
        "draft": tuple(f"gpu:{n}" for n in draft),
    }
    assert (found.target is None) == (len(target) == 1 and "mesh" not in settings)
    if found.target is not None:
        assert found.target.devices.size == len(target)


def test_draft_workers_have_as_many_gpus_each(node):
    node(6)
    found, _ = placed(draft_workers=2, draft_devices="2-5", slots=2)
    assert found.workers == (Devices("gpu", (2, 3)), Devices("gpu", (4, 5)))
    assert found.devices["draft"] == ("gpu:2", "gpu:3", "gpu:4", "gpu:5")
    assert str(found).endswith(", 2 workers that share slots")
    node(6, started=True)
    with pytest.raises(InputError, match=r"draft_workers = 3 cannot share .* 4 .*\(2,3,4,5\)"):
        placed(draft_workers=3, draft_devices="2-5")


def test_auto_says_in_one_line_why_and_which(node):
    node(2)
    assert str(placed()[0]) == (
        "draft_placement = process (auto: there are 2 GPUs, and no one has measured that submesh "
        "overlaps there): target on gpu:0, draft on gpu:1"
    )


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (1, {}),
        (1, {"draft_placement": "process"}),
        (2, {"draft_devices": "cpu"}),
        (2, {"draft_placement": "process", "draft_devices": "cpu"}),
        (2, {"draft_placement": "process", "mesh": "tensor=2"}),
    ],
)
def test_a_draft_on_the_processor_leaves_the_target_all_gpus(node, count, settings):
    node(count)
    found, setting = placed(**settings)
    assert (found.kind, found.workers, setting) == ("process", (PROCESSOR,), "all")


def test_a_second_model_finds_the_devices_of_the_first(node):
    node(2)
    first, _ = placed()
    node(2, started=True)
    assert placed() == (first, "0")
    assert placed(draft_placement="process", draft_devices="1") == (
        dataclasses.replace(first, why=None),
        "0",
    )


@pytest.mark.parametrize("setting", ["all", "1"])
def test_a_jax_that_has_started_with_other_devices_is_refused_with_what_to_do(node, setting):
    node(2, started=True)
    jax.config.update("jax_cuda_visible_devices", setting)
    with pytest.raises(InputError, match=r"other devices than gpu:0, .*'jax_cuda_v.*', '0'"):
        placed(draft_placement="process", draft_devices="1")


def test_auto_takes_a_submesh_where_jax_has_all_gpus_and_says_so(node):
    node(2, started=True)
    found, setting = placed()
    assert (found.kind, setting) == ("submesh", "all")
    assert found.why == "auto: there are 2 devices, and JAX has started with all of them"


def test_devices_that_the_user_has_chosen_for_jax_are_not_overruled(node):
    node(4)
    jax.config.update("jax_cuda_visible_devices", "2,3")
    with pytest.raises(InputError, match="other devices than gpu:0,2,3"):
        placed(draft_placement="process", draft_devices="1")
    assert jax.config.read("jax_cuda_visible_devices") == "2,3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "draft_devices = 'gpu' is not understood; give device numbers and ranges"),
        ("cpu:", "draft_devices = 'cpu:' is not understood"),
        ("cpu:256", "draft_devices = 'cpu:256': a processor is divided into 256 devices at most"),
        ("tpu:1", "draft_devices = 'tpu:1' is not understood"),
    ],
)
def test_malformed_names_of_devices_are_refused_at_once(text, message):
    with pytest.raises(InputError, match=message):
        Config(**SSD, draft_devices=text)


def test_missing_devices_are_refused(node, monkeypatch):
    with pytest.raises(InputError, match="draft_devices = gpu:1: JAX has no NVIDIA GPU here"):
        placed(draft_placement="process", draft_devices="gpu:1")
    with pytest.raises(InputError, match=r"of the platform cpu, .*; give numbers alone, or use"):
        placed(draft_placement="submesh", draft_devices="cpu")
    node(2)
    with pytest.raises(InputError, match="draft_devices = 7: there is no device 7"):
        placed(draft_placement="process", draft_devices="7")
    node(1)
    with pytest.raises(InputError, match=r"and there is 1; use .* draft_devices = 'cpu'"):
        placed(draft_placement="process", draft_devices="0")
    monkeypatch.setattr(placement, "count_gpus", lambda: 0)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(InputError, match="devices here are tpu; use draft_placement = 'submesh'"):
        placed(draft_placement="process", draft_devices="1")


def test_a_processor_has_no_gpus_whatever_the_driver_says():
    assert jax.default_backend() == "cpu"
    assert visible.count_gpus() == 0


START = """
import jax
from ssd_jax.errors import InputError
from ssd_jax.placement.visible import Devices, device_names
devices = Devices(*{devices})
devices.claim()
try:
    print(len(devices.start()), ",".join(device_names()), sep=";")
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("devices", "printed"),
    [
        (("cpu", (0,)), "1;cpu:0"),
        (("cpu", (0, 2)), "2;cpu:0,cpu:1,cpu:2"),
        (("gpu", (1,)), "JAX has cpu:0 in place of gpu:1; does its plugin work there?"),
    ],
)
def test_jax_starts_with_what_was_claimed_or_is_refused(devices, printed):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", START.format(devices=devices)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert shown.stdout.strip() == printed, shown.stderr
