"""Every mode on a grid of devices says what it says on one; virtual CPU devices stand for
accelerators."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from ssd_jax.devices.opening import models as opened_models
from ssd_jax.devices.programs.paged import PagedPrograms
from ssd_jax.errors import InputError
from ssd_jax.kernels.experts.api import ExpertBackend
from ssd_jax.models.tensor_loading import TensorLoading
from tests.checkpoints import tiny_pair
from tests.llm.paged import ALONE
from tests.llm.runs import ids, outputs, requests
from tests.models.every_mechanism import EXPERTS
from tests.models.golden import ON_GPUS, ON_TPUS
from tests.placement.meshes import SHAPE, opened


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Target and draft of a family with so many key/value heads."""
    root = tmp_path_factory.mktemp("mesh")

    @functools.cache
    def pair(family, heads):
        queries = 8 if 8 % heads == 0 else 3 * heads
        shape = SHAPE | {"num_attention_heads": queries, "num_key_value_heads": heads}
        return tiny_pair.write(root / f"{family}-{heads}", family, **shape)

    return pair


def likeliest(entries):
    return [[token for token, _ in entry.top] for entry in entries]


def generated(llm, mode, verify="coupled"):
    """Tokens, and the likeliest ones beside each, in prompts too."""
    found = outputs(llm, requests(llm, verify, logprobs=2, prompt_logprobs=2), mode)
    return [
        (output.token_ids, likeliest(output.logprobs), likeliest(output.prompt_logprobs[1:]))
        for output in found
    ]


EVEN = [("llama", 2, "tensor=2"), ("qwen3", 4, "tensor=4"), ("qwen2", 2, "data=2")]
SHARED = [("qwen2", 2, "data=2,tensor=4"), ("qwen3", 1, "tensor=8"), ("llama", 2, "tensor=8")]
ODD = [("llama", 3, "data=4,tensor=2")]  # attention is whole on every device
CASES = [
    (*case, there, verify)
    for case in (*EVEN, *SHARED, *ODD)
    for there in ({}, ON_TPUS)
    for verify in ("ratio", "coupled")
]
CASES += [(*case, ON_GPUS, "coupled") for case in (*EVEN, *ODD)]
USUAL = (*SHARED[0], {}, "ratio")
"""Virtual devices waited for each other in it when its programs had more columns of ones."""


@pytest.mark.parametrize(
    ("family", "heads", "mesh", "there", "verify"),
    [case if case == USUAL else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_every_mode_on_a_mesh_says_what_one_device_says(pairs, family, heads, mesh, there, verify):
    pair = pairs(family, heads)
    expected = generated(opened(pair, None, there=there, **ALONE), "ar", verify)
    spread = opened(pair, mesh, there=there, verify=verify)
    for mode in spread.modes:
        assert generated(spread, mode, verify) == expected, mode


@pytest.mark.slow  # `test_submesh.py` has groups of both roles
def test_a_target_in_groups_takes_proposals_of_a_draft_elsewhere(pairs):
    pair = pairs("qwen3", 1)
    spread = opened(pair, "data=2,tensor=2", there=ON_TPUS, draft_placement="submesh")
    assert generated(spread, "ssd") == generated(spread, "ar")


SD = {"mode": "sd", "draft_placement": None, "budget": None}


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory):
    """Target and draft with experts, behind a layer without; by how many layers there are."""
    root = tmp_path_factory.mktemp("experts")

    @functools.cache
    def pair(layers):
        shape = EXPERTS | SHAPE | {"num_hidden_layers": layers}
        return tiny_pair.write(root / str(layers), "granite", **shape)

    return pair


@pytest.mark.parametrize(
    ("mesh", "there", "parallel", "most"),
    [
        ("tensor=2", {}, True, SD),
        pytest.param("tensor=2", {}, True, {}, marks=pytest.mark.more),
        *(
            pytest.param(mesh, there, parallel, {}, marks=pytest.mark.slow)
            for mesh in ("tensor=2", "data=2,tensor=2")
            for there in (ON_TPUS, ON_GPUS)
            for parallel in (False, True)
        ),
    ],
)
def test_devices_that_share_experts_say_what_one_says(of_experts, mesh, there, parallel, most):
    pair = of_experts(3 if there else 2)
    expected = generated(opened(pair, None, there=there, **ALONE), "ar", "ratio")
    spread = opened(pair, mesh, there=there, verify="ratio", expert_parallel=parallel, **most)
    for mode in spread.modes:
        assert generated(spread, mode, "ratio") == expected, mode


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_kernels_of_devices_that_share_experts_say_what_one_says(of_experts, parallel, monkeypatch):
    pair = of_experts(3)
    expected = generated(opened(pair, None, there=ON_TPUS, **ALONE), "ar", "ratio")
    kernel = ExpertBackend("pallas_tpu", interpret=True)
    monkeypatch.setattr(opened_models, "experts_backend_for", lambda *_: kernel)
    mesh = "data=2,tensor=2"
    spread = opened(pair, mesh, there=ON_TPUS, verify="ratio", expert_parallel=parallel)
    assert spread.target.model.execution.experts == kernel
    for mode in spread.modes:
        assert generated(spread, mode, "ratio") == expected, mode


def test_experts_that_devices_cannot_share_are_refused(of_experts, pairs):
    with pytest.raises(InputError, match=r"expert_parallel = true is for .* 0 experts and 2"):
        opened(pairs("llama", 2), "tensor=2", there={}, expert_parallel=True)
    with pytest.raises(InputError, match="6 experts and 4 devices: leave it out"):
        opened(of_experts(2), "tensor=4", there={}, expert_parallel=True)
    with pytest.raises(InputError, match="and this is on one; give mesh"):
        opened(of_experts(2), None, there={}, expert_parallel=True)


def written_by_all(_self, slot):
    return slot, jnp.array(True)


def counted_by_all(self, tree, _owner):
    return jax.tree.map(lambda x: jax.lax.psum(x, "data"), tree)


def heads_in_turns(self, name, array):
    variable = self.variables[name]
    copies = self._copies(variable)
    sharding = self.layout.sharding(variable.axes) if copies > 1 else array.sharding
    return {name: jax.device_put(jnp.tile(array, (copies, *(1,) * (array.ndim - 1))), sharding)}


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (PagedPrograms, "local_slot", written_by_all),
        pytest.param(PagedPrograms, "from_owner", counted_by_all, marks=pytest.mark.slow),
        pytest.param(TensorLoading, "prepare", heads_in_turns, marks=pytest.mark.slow),
    ],
)
def test_planted_faults_of_meshes_are_caught(pairs, where, name, fault, monkeypatch):
    def text(mesh):
        llm = opened(pairs("qwen2", 2), mesh, there=ON_TPUS, **ALONE)
        return ids(outputs(llm, requests(llm, "ratio"), "ar"))

    expected = text(None)
    assert text("data=2,tensor=4") == expected
    monkeypatch.setattr(where, name, fault)
    assert text("data=2,tensor=4") != expected
