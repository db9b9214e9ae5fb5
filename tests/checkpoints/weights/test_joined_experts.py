"""Arrays of all experts' matrices: which rows are whose, and that only these are read."""

import dataclasses

import numpy as np
import pytest
from typing_extensions import override

from ssd_jax.checkpoints.weights.layout import arranged
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.registry import FAMILIES
from ssd_jax.testing import tiny
from tests.checkpoints.weights.test_layout import Stored

MLP = "model.layers.1.mlp"
EXPERTS, HIDDEN, CHANNELS = 3, 4, 5
CONFIG = ModelConfig.from_hf(tiny.config("llama"))


class Watched(Stored):
    """Notes what is read."""

    def __init__(self, **shapes):
        super().__init__(**shapes)
        self.parts = []

    @override
    def read_part(self, name, part):
        self.parts.append((name, part))
        return super().read_part(name, part)

    @override
    def read_blocks(self, name):
        return self.arrays[name]


def stored(**shapes):
    return Watched(**{f"{MLP}.{name}": shape for name, shape in shapes.items()})


def read_as(family, tensors):
    config = dataclasses.replace(CONFIG, family=family)
    return arranged(tensors, config, FAMILIES[family].layout, where="here")


def check(read, name, expected):
    """Whole, and every part of it."""
    assert read.shapes[name] == read.shape(name) == expected.shape
    np.testing.assert_array_equal(read.read(name), expected)
    for part in [(slice(1, 3), slice(0, 1)), (slice(0, 2), slice(2, 4)), (slice(1, 1),)]:
        np.testing.assert_array_equal(read.read(name, part), expected[part])


def test_rows_of_gpt_oss_take_turns_and_matrices_without_a_suffix_are_turned():
    tensors = stored(
        experts__gate_up_proj=(EXPERTS, HIDDEN, 2 * CHANNELS),
        experts__gate_up_proj_bias=(EXPERTS, 2 * CHANNELS),
        experts__down_proj=(EXPERTS, CHANNELS, HIDDEN),
        experts__down_proj_bias=(EXPERTS, HIDDEN),
    )
    read, of = read_as("gpt_oss", tensors), tensors.arrays
    gate_up = of[f"{MLP}.experts.gate_up_proj"].swapaxes(1, 2)
    bias = of[f"{MLP}.experts.gate_up_proj_bias"]
    for number, part in enumerate(("gate", "up")):
        check(read, f"{MLP}.experts.{part}_proj.weight", gate_up[:, number::2])
        check(read, f"{MLP}.experts.{part}_proj.bias", bias[:, number::2])
    down = of[f"{MLP}.experts.down_proj"].swapaxes(1, 2)
    check(read, f"{MLP}.experts.down_proj.weight", down)
    check(read, f"{MLP}.experts.down_proj.bias", of[f"{MLP}.experts.down_proj_bias"])
    assert len(read.shapes) == 6


def test_quantised_rows_of_gpt_oss_take_turns_too():
    tensors = stored(experts__gate_up_proj__weight=(EXPERTS, 2 * CHANNELS, HIDDEN))
    read, (stored_rows,) = read_as("gpt_oss", tensors), tensors.arrays.values()
    for number, part in enumerate(("gate", "up")):
        name = f"{MLP}.experts.{part}_proj.weight"
        check(read, name, stored_rows[:, number::2])
        np.testing.assert_array_equal(read.read_blocks(name), stored_rows[:, number::2])
        some = read.read_expert_blocks(name, 1, slice(1, 3))
        np.testing.assert_array_equal(some, stored_rows[1, number::2][1:3])


def test_rows_of_granite_follow_each_other():
    name = "model.layers.1.block_sparse_moe.{}.weight"
    shapes = {
        name.format("input_linear"): (EXPERTS, 2 * CHANNELS, HIDDEN),
        name.format("output_linear"): (EXPERTS, HIDDEN, CHANNELS),
        name.format("router.layer"): (EXPERTS, HIDDEN),
    }
    tensors = Watched(**shapes)
    read, (gate_up, down, router) = read_as("granitemoe", tensors), tensors.arrays.values()
    check(read, f"{MLP}.experts.gate_proj.weight", gate_up[:, :CHANNELS])
    check(read, f"{MLP}.experts.up_proj.weight", gate_up[:, CHANNELS:])
    check(read, f"{MLP}.experts.down_proj.weight", down)
    np.testing.assert_array_equal(read.read(f"{MLP}.router.weight"), router)


def test_no_more_is_read_than_the_rows_and_those_between_them():
    tensors = stored(experts__gate_up_proj=(EXPERTS, HIDDEN, 2 * CHANNELS))
    read = read_as("gpt_oss", tensors)
    read.read(f"{MLP}.experts.up_proj.weight", (slice(1, 2), slice(2, 4), slice(1, 3)))
    ((_, part),) = tensors.parts
    assert part == (slice(1, 2), slice(1, 3), slice(5, 8))


def test_an_array_that_is_not_two_matrices_is_refused():
    with pytest.raises(InputError, match=r"here: tensor .* has 5 rows, which are no 2 matrices"):
        read_as("gpt_oss", stored(experts__gate_up_proj=(EXPERTS, HIDDEN, CHANNELS)))


def test_layers_that_predict_tokens_further_on_are_left_out():
    layer = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    shapes = {layer.format(i, e): (CHANNELS, HIDDEN) for i in (1, 2) for e in range(EXPERTS)}
    mark = {"model.layers.2.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    more = {"model.layers.2.enorm.weight": (HIDDEN,), "model.layers.20.enorm.weight": (HIDDEN,)}
    read = read_as("glm4_moe", Watched(**shapes | mark | more))
    assert {*read.shapes} == {f"{MLP}.experts.up_proj.weight", "model.layers.20.enorm.weight"}


def test_corrections_of_the_choice_are_the_routers():
    for family, name in [
        ("glm4_moe", "mlp.gate.e_score_correction_bias"),
        ("minimax_m2", "block_sparse_moe.e_score_correction_bias"),
    ]:
        read = read_as(family, Watched(**{f"model.layers.1.{name}": (EXPERTS,)}))
        assert {*read.shapes} == {f"{MLP}.router.e_score_correction_bias"}
