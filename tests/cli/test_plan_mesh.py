"""`ssd-jax plan-mesh`: what each device would hold."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import pytest

from ssd_jax.cli import plan_mesh
from ssd_jax.cli.main import main
from ssd_jax.config.config import Config
from ssd_jax.devices.paged_programs import Paging
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.placement.visible import Devices
from ssd_jax.testing import tiny
from tests.models.golden import FLOAT32

OTHERS = "cpu:4,5,6,7"


def test_shares_are_those_of_the_arrays():
    config = ModelConfig.from_hf(tiny.config("llama", num_attention_heads=8, num_key_value_heads=2))
    model = FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[:8], 2))
    share = plan_mesh.share_of("target", model, 4, Paging(384, 4))
    assert (share.devices, share.slots) == (8, (2, 4))
    assert (share.heads, share.kv_heads) == ((2, 8), (1, 2))
    held = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(model.new_pages(4, 384))
    )
    assert share.kv == held
    alone = plan_mesh.share_of("target", FunctionalModel(config, FLOAT32), 4, Paging(384, 4))
    assert alone.weights == sum(s.size * 4 for s in alone_structs(config))
    assert (alone.slots, alone.heads, alone.kv_heads) == ((4, 4), (8, 8), (2, 2))


def alone_structs(config):
    return FunctionalModel(config, FLOAT32).parameter_structs()


@pytest.mark.more
def test_devices_that_are_not_here_are_drawn(tiny_checkpoint):
    command = [sys.executable, "-m", "ssd_jax", "plan-mesh", f"--target={tiny_checkpoint}"]
    flags = ["--devices=6", "--mesh=data=3,tensor=2", "--slots=6"]
    shown = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    kind, first, *lines = shown.stdout.splitlines()
    assert kind == "planned for 6 devices of the platform tpu, which are drawn as cpu:0 to cpu:5"
    assert first == (
        "draft_placement = inline: target on " + ", ".join(f"cpu:{index}" for index in range(6))
    )
    rows = [line.split() for line in lines]
    assert ["data", "2", "cpu:4", "cpu:5"] in rows
    assert any(row[:5] == ["target", "6", "2", "of", "6"] for row in rows)


def test_many_devices_are_whole_at_80_columns(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan-mesh", f"--target={tiny_checkpoint}", "--mesh=tensor=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    rows = [word for line in lines if line.startswith("data 0 ") for word in line.split()[2:]]
    assert rows == [f"cpu:{index}" for index in range(8)]


@pytest.mark.parametrize(
    ("platform", "more", "line", "placed"),
    [
        (
            *("tpu", {}, "; auto: there are 8 devices"),
            {"draft_placement": "submesh", "draft_dtype": "bfloat16"},
        ),
        (
            *("tpu", {"mesh": "tensor=8"}),
            "; auto: the target has all 8 devices, so the draft gets the processor",
            {"draft_placement": "process"},
        ),
        (
            *(
                "gpu",
                {},
                "; auto: there are 8 GPUs, and no one has measured that submesh overlaps ",
            ),
            {"draft_placement": "process", "target_devices": "0,1,2,3", "draft_devices": OTHERS}
            | {"draft_dtype": "bfloat16"},
        ),
        (
            *("gpu", {"mesh": "tensor=8"}),
            "; auto: the target has all 8 devices, so the draft gets the processor",
            {"draft_placement": "process"},
        ),
        (
            *("gpu", {"draft_placement": "process", "draft_devices": "6-7"}, "cpu:0 to cpu:7\n"),
            {"target_devices": "0,1,2,3", "draft_devices": "cpu:6,7", "draft_dtype": "bfloat16"},
        ),
        (
            *("gpu", {"draft_devices": "cpu"}, "; auto: the draft gets the processor"),
            {"draft_placement": "process"},
        ),
        ("cpu", {}, "; auto: a process for each role", {"draft_placement": "process"}),
        (
            *("tpu", {"mode": "sd", "budget": None, "dtype": "float32"}, "cpu:0 to cpu:7\n"),
            {"draft_dtype": "float32"},
        ),
        ("tpu", {"mode": "sd", "budget": None, "draft_dtype": "int8"}, "cpu:0 to cpu:7\n", {}),
    ],
)
def test_the_draft_is_placed_as_on_the_platform(platform, more, line, placed, capsys):
    settings = {"mode": "ssd", "draft": "d", "mesh": "tensor=4", "budget": "4"} | more
    config = Config(target="t", **settings)
    found = plan_mesh._placed(config, platform, 8)
    assert line in " ".join(capsys.readouterr().out.split()) + "\n"
    assert found == dataclasses.replace(config, **placed)


def test_the_devices_of_a_drafts_process_are_drawn(tiny_checkpoint, capsys):
    flags = ["--mode=ssd", f"--draft={tiny_checkpoint}", "--draft_placement=process"]
    flags += ["--draft_devices=cpu:0,1", "--mesh=tensor=2", "--budget=4"]
    assert main(["plan-mesh", f"--target={tiny_checkpoint}", *flags]) == 0
    shown = capsys.readouterr().out
    assert "draft: a process of its own on cpu:0, cpu:1\n" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[1:] for row in rows if row[:2] == ["data", "0"]] == [["0", "cpu:0", "cpu:1"]] * 2
    shares = {row[0]: row[1:] for row in rows if row[1:2] == ["2"]}
    assert shares["draft"] == shares["target"]


def test_weights_of_a_drafts_process_are_cut_between_its_devices():
    config = ModelConfig.from_hf(tiny.config("llama", num_attention_heads=8, num_key_value_heads=2))
    packed, plain = (
        Execution.for_platform("cpu", "bfloat16", linear=linear) for linear in ("cpu", "xla")
    )
    there = plan_mesh._of_worker(FunctionalModel(config, packed), Devices("gpu", (0, 1)))
    here = FunctionalModel(config, plain, mesh=mesh_of(jax.devices()[:2]))
    shares = [plan_mesh.share_of("draft", each, 1, Paging(128, 1)) for each in (there, here)]
    assert shares[0] == shares[1]


@pytest.mark.parametrize("shared", [False, True])
def test_draft_workers_that_share_slots_hold_their_own(shared, tiny_checkpoint, capsys):
    flags = ["--mode=ssd", f"--draft={tiny_checkpoint}", "--draft_placement=process", "--budget=4"]
    flags += ["--draft_workers=2", "--draft_split=slots", "--slots=7"]
    flags += ["--page_size=128"] * shared
    assert main(["plan-mesh", f"--target={tiny_checkpoint}", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    held = [[row[1:] for row in rows if row[:1] == [role]] for role in ("target", "draft")]
    shown = [(slots[1:4], memory[-1]) for slots, memory in held]
    # Pages that slots share may be of any of them, so that each worker has all.
    assert shown == [(["7", "of", "7"], "0.4"), (["4", "of", "7"], "0.4" if shared else "0.2")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices=8", "--platform=npu"], "platform = 'npu' is unknown; give tpu, gpu or cpu"),
        (["--platform=gpu"], "platform = 'gpu' is of devices that are not here; give --devices"),
        (["--devices=0"], "devices = 0 is out of range; give 1 or more"),
        (
            ["--devices=8", "--hosts=127.0.0.1:1,count=2"],
            "hosts = '127.0.0.1:1,count=2' are waited for, and devices = 8 are not here; leave out",
        ),
        (["--mesh=tensor=7"], "7 devices divide nothing of a model with 2 key/value heads"),
        (["--mesh=tensor=99"], "has 99 devices, and the target can have"),
    ],
)
def test_what_cannot_be_planned_is_refused(tiny_checkpoint, capsys, flags, message):
    assert main(["plan-mesh", f"--target={tiny_checkpoint}", *flags]) == 2
    assert message in capsys.readouterr().err


def test_more_devices_than_can_be_drawn_are_refused(tiny_checkpoint, capsys):
    assert main(["plan-mesh", f"--target={tiny_checkpoint}", "--devices=5000"]) == 2
    assert "devices = 5000 is out of range; give 1 to 4096" in capsys.readouterr().err
