"""A feed-forward of experts: what it computes, and what a row's result does not depend on."""

import copy
import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.load import check_size
from ssd_jax.devices.opening.sizes import bytes_per_device, bytes_read
from ssd_jax.errors import InputError
from ssd_jax.kernels.experts import pallas_tpu
from ssd_jax.kernels.experts.api import ExpertBackend, expert_products
from ssd_jax.kernels.experts.shards import ExpertShards
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.linear.api import products
from ssd_jax.models import experts as module
from ssd_jax.models.config import KEY, ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.feed_forward import ExpertMLP
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.mechanisms import Experts
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.models.every_mechanism import EXPERTS
from tests.models.golden import FLOAT32, ON_GPUS, ON_TPUS, Runner, our_logits, parameters, runner
from tests.sampling.edits import Edit, edited

IN_KERNELS = ON_TPUS | {"experts": ExpertBackend("pallas_tpu", interpret=True)}
PLAIN = Experts(count=6, chosen=2, intermediate=24)
OTHERS = {
    "plain": PLAIN,
    "not normalised": dataclasses.replace(PLAIN, normalized=False),
    "biases": dataclasses.replace(PLAIN, router_bias=True, biases=True),
    "softmax with correction": dataclasses.replace(PLAIN, correction=True),
    "shared": dataclasses.replace(PLAIN, shared=16),
    "shared with a gate": dataclasses.replace(PLAIN, shared=16, shared_gate=True),
    "sigmoid": dataclasses.replace(
        PLAIN, scoring="sigmoid", correction=True, scale=2.5, chosen=3, shared=8
    ),
    "sigmoid, not normalised": dataclasses.replace(PLAIN, scoring="sigmoid", normalized=False),
    "all": dataclasses.replace(PLAIN, chosen=6),
}


def mlp(experts, seed=0, execution=FLOAT32):
    """A feed-forward with random weights, and these by name."""
    config = ModelConfig.from_hf(tiny.config("qwen3"))
    made = ExpertMLP(config, execution, experts)
    rng = np.random.default_rng(seed)
    arrays = {}
    for path, variable in nnx.to_flat_state(nnx.state(made)):
        struct = variable.get_value()
        arrays[".".join(map(str, path))] = rng.normal(0, 0.5, struct.shape).astype(struct.dtype)
        variable.set_value(jnp.asarray(arrays[".".join(map(str, path))]))
    return made, arrays


def states(rows, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, 32)).astype(np.float32)


def run(made, x, present=None):
    present = None if present is None else jnp.asarray(present)
    graph, state = nnx.split(made)

    def call(state, x):
        return nnx.merge(graph, state)(x, None, products, present)

    return np.asarray(jax.jit(call)(state, x))


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_rows(experts, arrays, x):
    """The same in NumPy, one row and one expert after the other."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}

    def matrix(name, expert):
        bias = arrays.get(f"experts.{name}.bias", np.zeros((experts.count, 1)))
        return lambda x: arrays[f"experts.{name}.weight"][expert] @ x + bias[expert]

    def shared(name):
        return lambda x: arrays[f"shared_expert.{name}.weight"] @ x

    def feed(of, x):
        return of("down_proj")(silu(of("gate_proj")(x)) * of("up_proj")(x))

    results = []
    for row in x.astype(np.float64):
        logits = arrays["router.weight"] @ row + arrays.get("router.bias", 0)
        scores = sigmoid(logits)
        if experts.scoring == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        preference = scores + arrays.get("router.e_score_correction_bias", 0)
        chosen = np.argsort(-preference, kind="stable")[: experts.chosen]
        weights = scores[chosen] / (scores[chosen].sum() if experts.normalized else 1)
        total = sum(
            weight * experts.scale * feed(lambda name, e=e: matrix(name, e), row)
            for e, weight in zip(chosen, weights, strict=True)
        )
        if experts.shared:
            gate = sigmoid(arrays["shared_expert_gate.weight"] @ row) if experts.shared_gate else 1
            total = total + gate * feed(shared, row)
        results.append(total)
    return np.stack(results)


def agrees(experts):
    made, arrays = mlp(experts)
    x = states(13)
    want = by_rows(experts, arrays, x)
    return np.allclose(run(made, x), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("experts", OTHERS.values(), ids=OTHERS)
def test_a_row_gets_the_weighted_sum_of_its_experts(experts):
    assert agrees(experts)


def test_of_equal_experts_the_first_are_chosen():
    made, _ = mlp(PLAIN)
    weight = np.array(made.router.weight[...])
    weight[1:] = weight[1]
    made.router.weight.set_value(jnp.asarray(weight))
    x = states(9)
    chosen = np.asarray(made.router(jnp.asarray(x)).experts)
    first = (x @ weight[0] > x @ weight[1])[:, None]
    assert first.any()
    assert not first.all()
    np.testing.assert_array_equal(chosen, np.where(first, [0, 1], [1, 2]))


def test_rows_that_are_not_present_give_zeros_and_wake_no_expert():
    made, _ = mlp(PLAIN)
    x, present = states(8), np.arange(8) < 3
    chosen = np.asarray(made.router(jnp.asarray(x)).experts)
    idle = sorted({*range(PLAIN.count)} - {*chosen[:3].flatten()})
    assert {*chosen[3:].flatten()} & {*idle}
    want = run(made, x)[:3]
    for matrix in (made.experts.gate_proj, made.experts.down_proj):
        values = np.array(matrix.weight[...])
        values[idle] = np.nan
        matrix.weight.set_value(jnp.asarray(values))
    got = run(made, x, present)
    np.testing.assert_array_equal(got[:3], want)
    assert not got[3:].any()


def test_rows_behind_all_tokens_are_not_multiplied(monkeypatch):
    """They have no experts, but a GPU's loop would take a turn for each that they may have."""
    multiplied = []

    def multiply(x, *arguments, **options):
        multiplied.append(len(x))
        return expert_products(x, *arguments, **options)

    made, _ = mlp(PLAIN)
    x = states(8)
    want = run(made, x)
    monkeypatch.setattr(module, "expert_products", multiply)
    got = run(made, x, np.ones(3, bool))
    assert multiplied == [3 * PLAIN.chosen] * 2
    np.testing.assert_allclose(got[:3], want[:3], rtol=1e-5, atol=1e-5)
    assert not got[3:].any()


@pytest.mark.shipped
@pytest.mark.parametrize("name", ["plain", "sigmoid", "biases"])
def test_a_row_has_the_same_bits_beside_any_rows(name):
    made, _ = mlp(dataclasses.replace(OTHERS[name], shared=0))
    x = states(40)
    all_rows = run(made, x)
    for begin, end in itertools.pairwise((0, 1, 3, 6, 14, 40)):
        np.testing.assert_array_equal(run(made, x[begin:end]), all_rows[begin:end])


@pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "w8a8"])
def test_packed_experts_give_what_others_give(tmp_path, dtype):
    path = write(tmp_path, moe_intermediate_size=40)  # panels of which one is not full
    tokens = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 12)).astype(np.int32)
    packed, unpacked = (
        runner(path, slots=2, execution=Execution.for_platform("cpu", dtype, linear=linear))
        for linear in ("cpu", "xla")
    )
    matrices = [name for name in packed.model._packed if ".experts." in name]
    assert len(matrices) == 6
    got, want = packed(tokens), unpacked(tokens)
    assert np.abs(got - want).mean() < 0.01 * want.std()


MUTANTS = {
    "weights not normalised": ("if self.experts.normalized:", "if False:", "plain"),
    "weights normalised that are not": (
        "if self.experts.normalized:", "if True:", "not normalised",
    ),
    "a scale left out": ("weights * self.experts.scale", "weights", "sigmoid"),
    "a correction left out": (
        "preference = scores + self.e_score_correction_bias[...]", "preference = scores", "sigmoid",
    ),
    "a correction of logits": (
        "_softmax(logits) if softmax else scores", "scores", "softmax with correction",
    ),
    "a correction in the weights": (
        "take_along_axis(scores, chosen", "take_along_axis(preference, chosen", "sigmoid",
    ),
    "a bias of the router left out": ("logits + self.bias[...]", "logits", "biases"),
    "biases of another expert": ("self._bias(matrix)[expert]", "self._bias(matrix)[0]", "biases"),
    "rows in another order than their experts": ("x[rows]", "x[jnp.sort(rows)]", "plain"),
    "rows not returned to their place": (
        "down[place]", "down[order.reshape(place.shape)]", "plain",
    ),
    "gate and up exchanged": (
        "[self.gate_proj, self.up_proj]", "[self.up_proj, self.gate_proj]", "plain",
    ),
    "choices without their weights": ("parts * weights[:, :, None]", "parts", "plain"),
    "a choice left out": ("range(1, parts.shape[1])", "range(2, parts.shape[1])", "plain"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "of"), MUTANTS.values(), ids=MUTANTS)
def test_a_fault_is_seen(monkeypatch, old, new, of):
    source = inspect.getsource(module)
    assert source.count(old) == 1, "an edit must fit the source exactly once"
    names = dict(vars(module))
    exec(compile(source.replace(old, new), module.__file__, "exec"), names)
    for name in ("Router", "ExpertMatrices"):
        monkeypatch.setattr(f"ssd_jax.models.feed_forward.{name}", names[name])
    assert not agrees(OTHERS[of])


def write(path, family="qwen3_moe", **changes):
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return tiny.write_checkpoint(path, family, **sizes | {"norm_topk_prob": True} | changes)


@pytest.mark.parametrize("dense", [[0], [1], [0, 2]], ids=["first", "one", "first and third"])
def test_layers_without_experts_may_be_anywhere(tmp_path, dense):
    """Scanned layers are of one shape: others before them are not scanned, or none is."""
    path = write(tmp_path, mlp_only_layers=dense, num_hidden_layers=4)
    tokens = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 12)).astype(np.int32)
    model = FunctionalModel(
        open_checkpoint(str(path)).config, dataclasses.replace(FLOAT32, **ON_TPUS)
    )
    assert model.execution.scan_layers is (dense == [0])
    np.testing.assert_allclose(
        runner(path, slots=2, **ON_TPUS)(tokens), our_logits(path, tokens), atol=1e-4
    )


def sharded(tmp_path, *, devices, expert_parallel, changes, channels=24):
    """Logits on several devices, and on one; programs are kept by their shapes."""
    described = copy.deepcopy(EXPERTS)
    described[KEY]["experts"]["intermediate"] = channels
    path = tiny.write_checkpoint(tmp_path, "granite", **described)
    tokens = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 12)).astype(np.int32)
    checkpoint = open_checkpoint(str(path))
    model = FunctionalModel(
        checkpoint.config,
        dataclasses.replace(FLOAT32, **changes),
        mesh=mesh_of(jax.devices()[:devices]),
        expert_parallel=expert_parallel,
    )
    structs = {
        name: struct
        for name, struct in model.checkpoint_structs().items()
        if name.endswith("experts.up_proj.weight")
    }
    cut = {s.sharding.shard_shape(s.shape) for s in structs.values()}
    part = (6 // devices, channels, 32) if expert_parallel else (6, channels // devices, 32)
    assert cut == {part}
    run = Runner(model, parameters(checkpoint, model), slots=2)
    return run(tokens), our_logits(path, tokens)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("devices", "changes"), [(2, {}), (2, ON_TPUS), (2, ON_GPUS), (3, {})])
def test_devices_share_channels_or_experts(tmp_path, devices, changes, expert_parallel):
    got, want = sharded(tmp_path, devices=devices, expert_parallel=expert_parallel, changes=changes)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_devices_share_them_in_kernels(tmp_path, expert_parallel):
    shared = {"devices": 2, "expert_parallel": expert_parallel, "channels": 32}
    got, want = sharded(tmp_path, changes=IN_KERNELS, **shared)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_device_with_whole_experts_expects_a_part_of_the_rows(
    tmp_path, expert_parallel, monkeypatch
):
    expected = set()

    def multiply(*arguments, used, share, **options):
        expected.add((used, share))
        return expert_products(*arguments, used=used, share=share, **options)

    monkeypatch.setattr(module, "expert_products", multiply)
    sharded(tmp_path, devices=2, expert_parallel=expert_parallel, changes={}, channels=36)
    assert expected
    for used, share in expected:
        assert 0.5 <= share < 1 if expert_parallel else share == 1
        assert used <= (3 if expert_parallel else 6)


FAULTS = {
    "sums of a device alone": (
        ExpertShards, "add", "jax.lax.psum(function(weights, *arrays), self.axis)",
        "function(weights, *arrays)", False,
    ),
    "a kernel that counts the experts of all devices in a layer": (
        pallas_tpu, "expert_products_pallas_tpu", "layer * experts", "layer * 2 * experts", True,
    ),
    "a kernel for the layers of one": (
        pallas_tpu, "expert_products_pallas_tpu", "+ layer * experts", "", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_kernels_on_devices_that_share_experts_are_seen(tmp_path, fault):
    where, function, old, new, expert_parallel = FAULTS[fault]
    jax.clear_caches()
    with edited([Edit(where, function, old, new)]):
        shared = {"devices": 2, "expert_parallel": expert_parallel, "channels": 32}
        got, want = sharded(tmp_path, changes=IN_KERNELS, **shared)
    jax.clear_caches()
    assert not np.allclose(got, want, rtol=0, atol=0.01)


def test_biases_that_every_device_adds_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(module.ExpertMatrices, "_bias", lambda self, matrix: matrix.bias[...])
    got, want = sharded(tmp_path, devices=2, expert_parallel=False, changes={}, channels=20)
    assert np.abs(got - want).max() > 0.01


def test_devices_with_the_experts_of_the_first_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(ExpertShards, "device", property(lambda self: 0))
    got, want = sharded(tmp_path, devices=2, expert_parallel=True, changes={}, channels=28)
    assert np.abs(got - want).max() > 0.01


def test_experts_of_a_converted_configuration_are_read_as_they_were_written():
    config = ModelConfig.from_hf(tiny.config("qwen3", **{KEY: {
        "qkv_bias": False, "qk_norm": True, "experts": dataclasses.asdict(OTHERS["sigmoid"]),
    }}))  # fmt: skip
    assert config.mechanisms.experts == OTHERS["sigmoid"]
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 7}, "a token has 7 of 6 experts"),
        ({"experts": 6}, "unexpected keyword argument 'experts'"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, message):
    values = dataclasses.asdict(PLAIN) | changes
    stored = {"qkv_bias": False, "qk_norm": True, "experts": values}
    with pytest.raises(InputError, match=message):
        ModelConfig.from_hf(tiny.config("qwen3", **{KEY: stored}))


def test_another_number_of_experts_than_the_file_has_is_refused(tmp_path):
    checkpoint = open_checkpoint(str(write(tmp_path)))
    m = checkpoint.config.mechanisms
    more = dataclasses.replace(m, experts=dataclasses.replace(m.experts, count=10**9))
    config = dataclasses.replace(checkpoint.config, mechanisms=more)
    with pytest.raises(InputError, match=r"experts.up_proj.weight' has shape \(6, 24, 32\)"):
        check_size(checkpoint.tensors, config, "here")


@pytest.mark.parametrize(
    "changes", [{}, ON_TPUS | {"whole_tiles": False}, ON_GPUS, {"compute": jnp.dtype("int8")}]
)
@pytest.mark.parametrize(
    ("devices", "expert_parallel", "used"),
    [(1, False, (2, 10 / 3)), (2, False, (2, 10 / 3)), (2, True, (2 * 1.4, 2 * 2.2))],
)
def test_few_tokens_read_few_experts(tmp_path, changes, devices, expert_parallel, used):
    """Of 6 experts that devices share out, one has 1.4 of 2 on average, and 2.1 of 3, 2.4 of 4."""
    config = open_checkpoint(str(write(tmp_path))).config
    model = FunctionalModel(
        config,
        dataclasses.replace(FLOAT32, **changes),
        mesh=mesh_of(jax.devices()[:devices]) if devices > 1 else None,
        expert_parallel=expert_parallel,
    )
    quantised = model.execution.compute == jnp.int8
    outputs = (24, 24, 32)
    one = sum(o * (56 - o) * (1 if quantised else 4) + 4 * o * quantised for o in outputs)
    if quantised and devices == 2 and not expert_parallel:
        one += 4 * 32  # every device has the scales of all outputs
    read_bytes = bytes_per_device(model.read_structs())
    for rows, count in enumerate(used, start=1):
        want = read_bytes - config.num_layers * (6 - count) * one / devices
        assert bytes_read(model, rows) == pytest.approx(want, abs=1)
    assert bytes_read(model, 1000) == read_bytes


def test_few_tokens_read_few_packed_experts(tmp_path):
    """Their panels lie between those of other weights."""
    config = open_checkpoint(str(write(tmp_path, moe_intermediate_size=32))).config
    model = FunctionalModel(config, Execution.for_platform("cpu", "bfloat16", linear="cpu"))
    read_bytes = bytes_per_device(model.read_structs())
    of_experts = config.num_layers * 3 * 6 * 32 * 32 * 2
    assert bytes_read(model, 1) == read_bytes - of_experts * 4 // 6
    assert bytes_read(model, 1000) == read_bytes


def test_weights_of_experts_are_quantised_row_by_row(tmp_path):
    checkpoint = open_checkpoint(str(write(tmp_path)))
    model = FunctionalModel(
        checkpoint.config, dataclasses.replace(FLOAT32, compute=jnp.dtype("int8"))
    )
    arrays = dict(zip(model._flat, parameters(checkpoint, model), strict=True))
    name = "model.layers.0.mlp.experts.down_proj.weight"
    stored = checkpoint.tensors.read(name).astype(np.float32)
    scales = np.asarray(arrays[f"{name}_scale"])
    assert scales.shape == stored.shape[:2]
    restored = np.asarray(arrays[name], np.float32) * scales[:, :, None]
    assert (np.abs(restored - stored) <= scales[:, :, None] * 0.51).all()
    assert arrays["model.layers.0.mlp.router.weight"].dtype == jnp.float32
