"""Every family against logits that `transformers` computed (tests/oracle/make_logits.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.models.execution import Execution
from ssd_jax.models.families.registry import FAMILIES
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from tests.models.golden import FLOAT32, ON_GPUS, ON_TPUS, Runner, our_logits, runner
from tests.models.golden_logits import GOLDENS, NAMES, golden
from tests.selection import cases


def test_the_goldens_cover_every_family_and_scaling():
    covered = {open_checkpoint(str(GOLDENS / name)).config.family for name in NAMES}
    assert covered == {*FAMILIES}
    assert {"llama-plain", "llama-linear", "llama3-scaled"} < {*NAMES}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.shipped) if n == "qwen3" else n for n in NAMES]
)
def test_logits_equal_the_oracle(name):
    tokens, expected = golden(name)
    np.testing.assert_allclose(our_logits(GOLDENS / name, tokens), expected, atol=1e-4)


@pytest.mark.parametrize("name", cases(NAMES, "llama3-scaled", "qwen3", "qwen3-moe"))
@pytest.mark.parametrize("changes", [ON_TPUS, ON_GPUS, {"attention": "reference"}])
def test_as_on_accelerators_and_with_reference_attention_logits_are_the_same(name, changes):
    tokens, expected = golden(name)
    got = runner(GOLDENS / name, slots=tokens.shape[0], **changes)(tokens)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("name", cases(NAMES, "llama3-scaled", "qwen3"))
def test_decoding_with_the_cache_equals_the_full_forward(name):
    tokens, expected = golden(name)
    run = runner(GOLDENS / name, slots=tokens.shape[0])
    prompt = run(tokens[:, :5])
    steps = [run(tokens[:, i : i + 1], start=i) for i in range(5, tokens.shape[1])]
    np.testing.assert_allclose(np.concatenate([prompt, *steps], axis=1), expected, atol=1e-4)


@pytest.mark.more
def test_chunked_prefill_equals_whole_prefill():
    tokens, _ = golden("qwen3")
    expected = runner(GOLDENS / "qwen3", slots=2)(tokens)
    run = runner(GOLDENS / "qwen3", slots=2)
    chunks = [run(tokens[:, a:b], start=a) for a, b in [(0, 7), (7, 20), (20, 40)]]
    np.testing.assert_allclose(np.concatenate(chunks, axis=1), expected, atol=1e-5)


def test_a_slot_does_not_depend_on_its_neighbour():
    tokens, _ = golden("llama3-scaled")
    alone = runner(GOLDENS / "llama3-scaled", slots=2)(tokens)
    other = np.stack([tokens[0], (tokens[1] + 1) % 100])
    shifted = runner(GOLDENS / "llama3-scaled", slots=2)(other)
    np.testing.assert_array_equal(alone[0], shifted[0])
    assert not np.array_equal(alone[1], shifted[1])


def test_rejected_tokens_leave_no_trace():
    """The length is the truth: what a discarded forward wrote beyond it is never seen."""
    tokens, expected = golden("qwen2")
    run = runner(GOLDENS / "qwen2", slots=2)
    run(tokens[:, :10])
    run((tokens[:, 10:16] + 7) % 100, start=10)  # speculated, then rejected
    got = np.concatenate([run(tokens[:, i : i + 1], start=i) for i in range(10, 16)], axis=1)
    np.testing.assert_allclose(got, expected[:, 10:16], atol=1e-4)


def test_bfloat16_on_cpu_is_close_and_pads_rows_without_effect():
    tokens, expected = golden("llama-plain")
    execution = Execution.for_platform("cpu", "bfloat16")
    assert (execution.min_rows, execution.pages) == (3, jnp.uint16)
    run = runner(GOLDENS / "llama-plain", slots=2, execution=execution)
    steps = [run(tokens[:, i : i + 1], start=i) for i in range(12)]
    got = np.concatenate(steps, axis=1)
    spread = expected[:, :12].std()
    assert np.abs(got - expected[:, :12]).mean() < 0.03 * spread


@pytest.mark.parametrize("changes", [{}, ON_TPUS, ON_GPUS])
@pytest.mark.parametrize("name", ["llama3-scaled", "mixtral"])
def test_a_sharded_model_gives_the_same_logits(name, changes):
    tokens, expected = golden(name)
    checkpoint = open_checkpoint(str(GOLDENS / name))
    mesh = mesh_of(jax.devices()[:2])
    execution = dataclasses.replace(FLOAT32, **changes)
    model = FunctionalModel(checkpoint.config, execution, mesh=mesh)
    parameters = load_parameters(checkpoint.tensors, model, where="golden")
    spread = [p for p in parameters if len(p.sharding.device_set) == 2]
    assert len(spread) == len(parameters)
    run = Runner(model, parameters, slots=2)
    pages = jax.tree.leaves(run.pages)
    assert all(not page.sharding.is_fully_replicated for page in pages)
    np.testing.assert_allclose(run(tokens), expected, atol=1e-4)
