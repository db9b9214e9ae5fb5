"""Whole int8 models of every family: close to the oracle, whatever the layout and the width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.linear.api import products
from ssd_jax.models import weight_forms
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from tests.models.golden import Runner, parameters, runner
from tests.models.golden_logits import GOLDENS, NAMES, golden
from tests.selection import cases

INT8 = Execution.for_platform("cpu", "int8")
ERROR = 0.05
"""Most mean error of a logit, in standard deviations of the logits; 0.024 to 0.035 was seen."""


def error(got, expected):
    return np.abs(got - expected).mean() / expected.std()


def int8_model(name, **options):
    checkpoint = open_checkpoint(str(GOLDENS / name))
    return checkpoint, FunctionalModel(checkpoint.config, INT8, **options)


def names_of(model):
    """Parameter names of an unrolled model, in the order of its parameters."""
    return list(model._flat)


@pytest.mark.parametrize("name", cases(NAMES, "llama3-scaled", "qwen3"))
def test_logits_are_close_to_the_float32_oracle(name):
    tokens, expected = golden(name)
    got = runner(GOLDENS / name, slots=tokens.shape[0], execution=INT8)(tokens)
    assert 1e-4 < error(got, expected) < ERROR


@pytest.mark.parametrize(
    ("linear", "scan_layers"),
    cases([("xla", False), ("xla", True), ("cpu", False)], ("cpu", False)),
)
def test_one_digit_an_activation_is_coarser_than_two(linear, scan_layers):
    if linear == "cpu" and why_missing() is not None:
        pytest.skip("no C++ compiler")
    tokens, expected = golden("qwen2")
    executions = INT8, Execution.for_platform("cpu", "w8a8", linear=linear)
    runners = (
        runner(GOLDENS / "qwen2", slots=2, execution=execution, scan_layers=scan_layers)
        for execution in executions
    )
    two, one = (error(run(tokens), expected) for run in runners)
    assert 1.02 * two < one < 2 * ERROR


@pytest.mark.parametrize("projection", ["q_proj", "o_proj", "down_proj"])
def test_a_wrong_scale_leaves_the_bound(projection):
    tokens, expected = golden("qwen2")
    checkpoint, model = int8_model("qwen2")
    wrong = [
        array * 1.25 if name.endswith(f"{projection}.weight_scale") else array
        for name, array in zip(names_of(model), parameters(checkpoint, model), strict=True)
    ]
    assert error(Runner(model, wrong, slots=2)(tokens), expected) > ERROR


@pytest.mark.parametrize("name", cases(NAMES, "qwen3"))
def test_scanned_layers_give_the_same_logits(name):
    tokens, _ = golden(name)
    unrolled, scanned = (
        runner(GOLDENS / name, slots=tokens.shape[0], execution=INT8, scan_layers=scan)(tokens)
        for scan in (False, True)
    )
    np.testing.assert_allclose(scanned, unrolled, atol=0.02 * unrolled.std())


@pytest.mark.parametrize("name", cases(["llama-plain", "qwen3"], "qwen3"))
def test_tokens_one_by_one_are_the_same_bits_as_eight_at_once(name):
    tokens, _ = golden(name)
    row = tokens[:1, :8]
    one_by_one, at_once = (runner(GOLDENS / name, slots=1, execution=INT8) for _ in range(2))
    steps = [one_by_one(row[:, i : i + 1], start=i) for i in range(8)]
    np.testing.assert_array_equal(np.concatenate(steps, axis=1), at_once(row))


def test_a_row_alone_is_the_same_bits_as_among_others():
    tokens, _ = golden("llama3-scaled")
    both = runner(GOLDENS / "llama3-scaled", slots=2, execution=INT8)(tokens)
    alone = runner(GOLDENS / "llama3-scaled", slots=1, execution=INT8)(tokens[1:])
    np.testing.assert_array_equal(alone[0], both[1])


@pytest.mark.more
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", ["llama3-scaled", "qwen2"])
def test_a_sharded_model_gives_the_same_logits(name, scan_layers):
    tokens, _ = golden(name)
    expected = runner(GOLDENS / name, slots=2, execution=INT8, scan_layers=scan_layers)(tokens)
    mesh = mesh_of(jax.devices()[:2])
    checkpoint = open_checkpoint(str(GOLDENS / name))
    execution = Execution(
        compute=INT8.compute, pages=INT8.pages, min_rows=INT8.min_rows, scan_layers=scan_layers
    )
    model = FunctionalModel(checkpoint.config, execution, mesh=mesh)
    spread = parameters(checkpoint, model)
    for array, struct in zip(spread, model.parameter_structs(), strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
        if not scan_layers:  # stacking leaves the placement to the compiler
            assert array.sharding.is_equivalent_to(struct.sharding, array.ndim)
    got = Runner(model, spread, slots=2)(tokens)
    np.testing.assert_allclose(got, expected, atol=0.02 * expected.std())


def test_scales_are_cut_like_the_outputs_of_their_weights():
    _, model = int8_model("qwen2", mesh=mesh_of(jax.devices()[:2]))
    structs = dict(zip(names_of(model), model.parameter_structs(), strict=True))
    up = structs["model.layers.0.mlp.up_proj.weight_scale"]
    down = structs["model.layers.0.mlp.down_proj.weight_scale"]
    assert up.sharding.shard_shape(up.shape) == (up.shape[0] // 2,)
    assert down.sharding.shard_shape(down.shape) == down.shape


def test_what_is_wanted_of_the_checkpoint_is_what_bfloat16_wants():
    checkpoint, model = int8_model("qwen2")
    plain = FunctionalModel(checkpoint.config, Execution.for_platform("cpu", "bfloat16"))
    assert model.checkpoint_structs() == plain.checkpoint_structs()


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_is_int8_only_where_it_is_the_head(tied):
    name = next(
        name for name in NAMES if open_checkpoint(str(GOLDENS / name)).config.tie_embeddings is tied
    )
    checkpoint, model = int8_model(name)
    dtypes = {
        name: array.dtype
        for name, array in zip(names_of(model), parameters(checkpoint, model), strict=True)
    }
    assert dtypes["model.embed_tokens.weight"] == (jnp.int8 if tied else jnp.bfloat16)
    projections = {dtypes[name] for name in dtypes if name.endswith("_proj.weight")}
    assert projections == {jnp.dtype(jnp.int8)}
    assert tied or dtypes["lm_head.weight"] == jnp.int8


def test_keys_and_values_stay_bfloat16():
    assert INT8.pages == Execution.for_platform("cpu", "bfloat16").pages
    assert Execution.for_platform("tpu", "int8").pages == jnp.bfloat16


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
@pytest.mark.parametrize(("room", "stays"), [(2**25, "true"), (64, "false")])
def test_weights_are_to_stay_in_a_cache_where_all_of_a_model_fit(monkeypatch, room, stays):
    monkeypatch.setattr(weight_forms, "_CACHE_BYTES", room)
    execution = Execution.for_platform("cpu", "int8", linear="cpu")
    checkpoint = open_checkpoint(str(GOLDENS / NAMES[0]))
    model = FunctionalModel(checkpoint.config, execution)

    def up(parameters, x):
        return products(x, [model.module(parameters).model.layers[0].mlp.up_proj.operand])[0]

    x = jax.ShapeDtypeStruct((1, checkpoint.config.hidden_size), jnp.float32)
    lowered = jax.jit(up).lower(model.parameter_structs(), x)
    assert f"cache_resident = {stays}" in lowered.as_text()
