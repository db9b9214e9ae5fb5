"""What holds in place of what was asked for: a line, a metric, and a report."""

from __future__ import annotations

import dataclasses
import json
import logging

import jax
import pytest

from ssd_jax import LLM, compat
from ssd_jax.cli.main import main
from ssd_jax.devices.opening import fallbacks
from ssd_jax.devices.opening.fallbacks import find_fallbacks
from ssd_jax.devices.programs.batch_sizes import BatchSizes
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.target.base import Verification
from ssd_jax.errors import InputError
from ssd_jax.kernels.experts.api import ExpertBackend
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.tree_attention import pallas_gpu
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.mechanisms import Experts
from ssd_jax.models.sharding import mesh_of
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    """What is said does not depend on this machine's."""
    monkeypatch.setattr(fallbacks, "why_missing", lambda: None)
    monkeypatch.setattr(fallbacks, "why_not_cached", lambda: None)


class FakePrograms:
    paging = None

    def __init__(self, dtype="float32", widths=(0, 3), devices=0, nodes=0, **changes):
        execution = Execution.for_platform(
            "cpu", dtype, linear="xla" if dtype == "float32" else "cpu", attention="cpu"
        )
        mesh = mesh_of(jax.devices()[:devices]) if devices else None
        config = ModelConfig.from_hf(tiny.config("llama", **changes))
        self.model = FunctionalModel(config, execution, mesh=mesh)
        self.widths = widths
        self.verification = Verification(widths=widths, nodes=nodes)
        self.batch_sizes = BatchSizes([1])


def found(exact, programs, *, agree=True, trees_agree=True, draft=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "widths_can_agree", lambda _compute: True)
        patch.setattr(fallbacks, "widths_agree", lambda *_: agree)
        patch.setattr(fallbacks, "tree_agrees", lambda *_: trees_agree)
        return find_fallbacks(exact, programs, [], draft)


@pytest.mark.parametrize(
    ("exact", "dtype", "agree", "held", "says"),
    [
        ("bitwise", "float32", True, "bitwise", None),
        ("bitwise", "float32", False, "widest", "verifies as many as 3 proposed tokens every time"),
        ("auto", "bfloat16", True, "bitwise", None),
        ("auto", "bfloat16", False, "distribution", "is distribution: with bfloat16 a token's"),
        ("auto", "float32", True, "distribution", "is distribution: bitwise costs speed"),
        ("distribution", "float32", False, "distribution", None),
    ],
)
def test_the_report_says_which_exactness_holds(exact, dtype, agree, held, says):
    programs = FakePrograms(dtype)
    result = found(exact, programs, agree=agree)
    assert result.metrics == {"exact": held, "replicated": None}
    assert result.exact == ("distribution" if held == "distribution" else "bitwise")
    assert programs.widths == ((3,) if held == "widest" else (0, 3))
    if says is None:
        assert result.lines == ()
    else:
        (line,) = result.lines
        assert line.startswith(f"exact = '{exact}' ")
        assert says in line


def test_bitwise_trees_are_refused_where_their_rows_are_computed_in_another_way():
    programs = FakePrograms("bfloat16", widths=(0,), nodes=8)
    assert found("bitwise", programs).exact == "bitwise"
    says = "exact = 'bitwise' is not possible with tree_nodes = 8: attention = 'cpu' with bfloat16"
    with pytest.raises(InputError, match=says):
        found("bitwise", programs, trees_agree=False)
    fallback = found("auto", programs, trees_agree=False)
    assert fallback.exact == "distribution"
    assert fallback.lines[0].startswith("exact = 'auto' is distribution: with bfloat16 a token's")


def test_mode_ar_has_no_fallback_lines():
    assert found("auto", FakePrograms(widths=(0,))).lines == ()
    assert found("bitwise", FakePrograms(widths=(0,)), agree=False).metrics["exact"] == "bitwise"


def test_what_devices_do_not_divide_is_named_with_its_size():
    three, two = FakePrograms(devices=3), FakePrograms(devices=2, intermediate_size=51)
    result = found("distribution", three, draft=two.model)
    assert result.metrics["replicated"] == {
        "target": ["vocab", "outputs", "heads", "kv_heads"],
        "draft": ["ffn"],
    }
    first, second = result.lines
    assert "every device of the target has all of vocab (320)" in first
    assert "kv_heads (2), which its 3 devices do not divide; give another" in first
    assert "every device of the draft has all of ffn (51)" in second
    assert found("distribution", FakePrograms(devices=2)).lines == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_line_says_what_is_not_compiled_and_why(dtype, monkeypatch):
    assert found("distribution", FakePrograms(dtype)).lines == ()
    monkeypatch.setattr(fallbacks, "why_missing", lambda: "there is no C++ compiler")
    programs = FakePrograms(dtype)
    (line,) = found("distribution", programs, draft=programs.model).lines
    assert line.startswith("products and attention are XLA's, which is slower here: there is no")


def test_one_line_says_that_what_is_compiled_is_not_kept(monkeypatch):
    monkeypatch.setattr(fallbacks, "why_missing", lambda: None)
    monkeypatch.setattr(fallbacks, "why_not_cached", lambda: "DIRECTORY cannot be used: why")
    (line,) = found("distribution", FakePrograms("bfloat16")).lines
    assert line == "kernels are compiled anew at every start: DIRECTORY cannot be used: why"


def test_a_line_says_that_several_devices_have_nothing_compiled():
    programs, alone = FakePrograms(devices=2), FakePrograms()
    programs.model.execution = dataclasses.replace(programs.model.execution, attention="xla")
    (line,) = found("distribution", programs, draft=programs.model).lines
    assert line.endswith(", which is slower here: the compiled ones run on one device, not 2")
    assert found("distribution", programs, draft=alone.model).lines == (line,)


def test_a_line_says_why_a_gpu_has_attention_by_xla(monkeypatch):
    monkeypatch.setattr(fallbacks.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: None)
    monkeypatch.setattr(pallas_gpu, "why_not_on", lambda *_about: None)
    programs = FakePrograms("bfloat16", head_dim=64)
    programs.model.execution = Execution.for_platform("gpu", "bfloat16")
    line, verification = found("distribution", programs).lines
    assert verification.startswith("verification is xla; not pallas_gpu: ")
    asked = "another was asked for"
    assert line.endswith(f"not pallas_gpu: {asked}; not pallas_mma: {asked}")
    programs.paging = Paging(size=48, total=4)
    line, _ = found("distribution", programs, draft=programs.model).lines
    size = "page_size = 48: it needs a multiple of 64"
    assert line.endswith(f"not pallas_gpu: {size}; not pallas_mma: {size}")


def test_a_line_says_why_experts_of_a_gpu_have_no_kernel(monkeypatch):
    monkeypatch.setattr(fallbacks.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compat, "why_no_mosaic_gpu", lambda: None)
    programs = FakePrograms("bfloat16")
    experts = Experts(count=4, chosen=2, intermediate=32)
    mechanisms = dataclasses.replace(programs.model.config.mechanisms, experts=experts)
    config = dataclasses.replace(programs.model.config, mechanisms=mechanisms)
    programs.model = FunctionalModel(config, Execution.for_platform("gpu", "bfloat16"))
    looped = "experts of the target are multiplied by XLA, one after the other"
    *_, line = found("distribution", programs).lines
    assert line == f"{looped}: the kernel is for compute capability 9.0 (Hopper)"
    monkeypatch.setattr(fallbacks.jax, "default_backend", lambda: "tpu")
    *_, line = found("distribution", programs).lines
    assert line == f"{looped}: attention = 'xla' leaves out all kernels"
    kernel = dataclasses.replace(programs.model.execution, experts=ExpertBackend("pallas_tpu"))
    programs.model = FunctionalModel(config, kernel)
    assert not any("experts" in line for line in found("distribution", programs).lines)


def test_weights_in_groups_that_cost_more_than_floats_are_told():
    name = "model.layers.{}.mlp.up_proj.weight"
    forms = {name.format(layer): GroupForm("int4", 32) for layer in range(2)}
    programs = FakePrograms("bfloat16")
    config, execution = programs.model.config, programs.model.execution
    programs.model = FunctionalModel(config, execution, groups=forms)
    (line,) = found("distribution", programs).lines
    assert line.startswith("dtype = 'native' makes bfloat16 of quantised weights in every product")
    scanned = dataclasses.replace(execution, scan_layers=True)
    del forms[name.format(0)]
    programs.model = FunctionalModel(config, scanned, groups=forms)
    (line,) = found("distribution", programs).lines
    assert line.startswith("1 quantised weights are bfloat16: layers run in one loop")


@pytest.mark.more
def test_a_fallback_is_logged_once_and_is_in_every_models_metrics(tiny_checkpoint, caplog):
    small = {"dtype": "float32", "context": 64, "compile_cache": "off"}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            llm = LLM(str(tiny_checkpoint), mode="sd", draft="ngram", k="1", **small)
        outputs = [llm.generate("a", SamplingParams(max_tokens=2))[0] for _ in range(2)]
    assert [out.metrics["exact"] for out in outputs] == ["distribution", "distribution"]
    assert [out.metrics["replicated"] for out in outputs] == [None, None]
    assert sum("exact = 'auto' is distribution" in line for line in caplog.messages) == 1
    assert llm.notices == tuple(line for line in caplog.messages if line.startswith("exact"))


@pytest.mark.more
def test_bench_reports_have_the_fallback_lines(tiny_checkpoint, capsys, caplog):
    flags = [f"--target={tiny_checkpoint}", "--mode=sd", "--draft=ngram", "--k=1", "--json"]
    flags += ["--dtype=float32", "--context=300", "--max_tokens=3", "--prompts=mt_bench:1"]
    assert main(["bench", "--warmup=0", "--compile_cache=off", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    (line,) = document["notices"]
    assert line.startswith("exact = 'auto' is distribution")
    assert line in caplog.messages
    assert document["prompts"][0]["metrics"][0]["exact"] == "distribution"
