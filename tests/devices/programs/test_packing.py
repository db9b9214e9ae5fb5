"""What the host tells a program: taken apart as it was put together, and one array a dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.programs.packing import Packing
from ssd_jax.devices.target.programs import Programs
from ssd_jax.sampling.params import SamplingParams
from tests.checkpoints import tiny_pair
from tests.llm.runs import outputs, requests
from tests.models.golden import ON_GPUS, ON_TPUS, execution_as
from tests.placement.meshes import SHAPE, opened


class Pair(NamedTuple):
    """Two of the arrays of an argument."""

    ids: Any
    q: Any


ROWS = 3


def drawn(rng):
    """Arguments of every kind: on the device, and on the host in every type and shape."""
    return (
        jnp.asarray(rng.normal(size=(2, 2)), jnp.float32),
        Pair(rng.integers(-9, 9, (ROWS, 2), np.int32), rng.normal(size=(ROWS, 2, 4)).astype("f4")),
        rng.integers(0, 2, ROWS).astype(bool),
        np.int32(rng.integers(-9, 9)),
        rng.integers(-9, 9, (ROWS, 5), np.int32),
    )


def structs(arguments):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), arguments)


@pytest.mark.parametrize("on_device", [False, True])
def test_arguments_come_out_as_they_went_in(on_device):
    """Also numbers that are none, bit by bit."""
    arguments = drawn(np.random.default_rng(0))
    arguments[1].q[0, 0, :2] = np.nan, -0.0
    packing = Packing(structs(arguments), host_args=(1, 2, 3), host_or_device_args=(4,))
    *rest, last = arguments
    others, array = packing.pack([*rest, jnp.asarray(last) if on_device else last])
    assert (array.dtype, array.shape) == (np.int32, packing.struct.shape)
    found = jax.jit(packing.unpack_for(lambda *every: every))(*others, array)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(arguments), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, np.shape(other))
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_arguments_of_one_row_may_have_any_shape():
    arguments = np.arange(8, dtype=np.int32)[None], np.array([3, 5, 7], np.int32)
    packing = Packing(structs(arguments), host_args=(0, 1))
    others, array = packing.pack(arguments)
    assert (others, array.shape) == ([], (1, 11))
    found = packing.unpack_for(lambda *every: every)(jnp.asarray(array))
    assert all(map(np.array_equal, found, arguments))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x[:, :4],
        lambda x: x[:1],
        lambda x: x.astype(np.int64),
        lambda x: x.view(np.float32),
    ],
)
def test_an_array_of_another_size_or_type_is_refused(wrong):
    arguments = drawn(np.random.default_rng(0))
    packing = Packing(structs(arguments), host_args=(1, 2, 3, 4))
    packing.pack(arguments)
    with pytest.raises(ValueError, match=r"in place of int32\[3, 5\]"):
        packing.pack([*arguments[:4], wrong(arguments[4])])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("packing")
    return tiny_pair.write(root, "qwen2", **SHAPE, num_attention_heads=4)


def handed_over(monkeypatch):
    """The number of host arrays of every call of a compiled program, as they are dispatched."""
    found = []
    call = jax.stages.Compiled.__call__

    def counted(self, *arguments):
        found.append(
            sum(not isinstance(argument, jax.Array) for argument in jax.tree.leaves(arguments))
        )
        return call(self, *arguments)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    return found


def counts_of(llm, mode, monkeypatch):
    """Of the rounds behind the prompts."""
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    asked = [llm.request("to be or not to be", params, index) for index in range(4)]
    engine = llm.engine_of(mode)
    k = 0 if mode == "ar" else None
    begun, left = set(), {engine.add(dataclasses.replace(request, k=k)) for request in asked}
    while begun != left:
        begun |= {event.request_id for event in engine.step() if event.token_ids}
    with monkeypatch.context() as patch:
        counts = handed_over(patch)
        while engine.has_work:
            engine.step()
    assert len(counts) > 20, mode
    return counts


APART = {"draft_placement": "submesh", "target_devices": "1"}


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "there", "settings"),
    [
        (None, ON_GPUS, {"kv_memory": "64MiB"}),
        pytest.param("data=2,tensor=2", {}, {"kv_memory": "64MiB"}, marks=pytest.mark.slow),
        pytest.param("data=2,tensor=2", ON_TPUS, {"kv_memory": "64MiB"}, marks=pytest.mark.slow),
        pytest.param(None, ON_TPUS, {}, marks=pytest.mark.slow),
        pytest.param(None, ON_TPUS, APART, marks=pytest.mark.slow),
    ],
)
def test_a_dispatch_hands_over_one_array_at_most(pair, monkeypatch, mesh, there, settings):
    with execution_as(one_array=True):
        llm = opened(pair, mesh, there=there, backup="draft", **settings)
    for mode in llm.modes:
        assert max(counts_of(llm, mode, monkeypatch)) == 1, mode
    expected, *others = (
        [one.token_ids for one in outputs(llm, requests(llm, "coupled"), mode)]
        for mode in llm.modes
    )
    assert others == [expected] * 2
    if "kv_memory" in settings:  # the planted fault: tables that stay on the host
        llm._engines.clear()
        monkeypatch.setattr(PagedRole, "_table", property(lambda self: self._host_table))
        assert max(counts_of(llm, "ar", monkeypatch)) == 2


@pytest.mark.more
def test_a_proposal_of_the_host_is_one_array_and_the_same(pair, monkeypatch):
    alone = {"draft_placement": None, "budget": None}
    with execution_as(one_array=True):
        llm = opened(pair, None, there={}, mode="sd", draft="ngram", **alone)
    found, expected = (
        [one.token_ids for one in outputs(llm, requests(llm, "coupled"), mode)]
        for mode in ("sd", "ar")
    )
    assert found == expected
    assert max(counts_of(llm, "sd", monkeypatch)) == 1
    monkeypatch.setattr(Programs, "to_device", lambda self, drafted: drafted)  # the planted fault
    assert max(counts_of(llm, "sd", monkeypatch)) > 1


def test_a_layout_that_is_off_by_a_column_is_seen(monkeypatch):
    """The planted fault: what is taken apart begins a column late."""
    arguments = drawn(np.random.default_rng(0))
    packing = Packing(structs(arguments), host_args=(1, 2, 3), host_or_device_args=(4,))
    others, array = packing.pack(arguments)
    right = packing._unpack
    monkeypatch.setattr(packing, "_unpack", lambda a, c: right(jnp.roll(a, -1, axis=1), c))
    found = packing.unpack_for(lambda *every: every)(*others, jnp.asarray(array))
    same = map(np.array_equal, jax.tree.leaves(found)[1:], jax.tree.leaves(arguments)[1:])
    assert not any(same)
