"""The tests of the compiled attention catch the faults that they are there for."""

import jax
import jax.numpy as jnp
import pytest

from ssd_jax.kernels import handlers
from ssd_jax.kernels.tree_attention import cpu
from tests.kernels import test_compiled_attention as tests
from tests.kernels.edited import use_edited
from tests.kernels.processor import flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(handlers.why_missing() is not None, reason="no C++ compiler"),
]

SIZES = (2, 5, 9, 3, 64)


def near_the_reference():
    tests.test_compiled_attention_is_near_the_reference(SIZES, "bfloat16 bits", branches=True)


def bits(dtype):
    tests.test_a_querys_bits_do_not_depend_on_what_runs_beside_it(dtype, "bfloat16 bits", False)


def path_bits():
    tests.test_a_token_of_a_tree_attends_bit_for_bit_as_if_its_path_were_in_the_pages(
        "float32", "bfloat16 bits", ()
    )


def windowed_path_bits():
    tests.test_a_token_of_a_tree_attends_bit_for_bit_as_if_its_path_were_in_the_pages(
        "float32", "bfloat16 bits", (2, 64, 100)
    )


def nothing_unseen():
    for dtype in (jnp.float32, jnp.bfloat16):
        tests.test_what_a_query_does_not_see_may_be_nan(dtype, None)


def nothing_before_the_window():
    for dtype in (jnp.float32, jnp.bfloat16):
        tests.test_what_a_query_does_not_see_may_be_nan(dtype, 3)


def variants():
    for dtype in ("float32", "bfloat16"):
        tests.test_windows_caps_scales_and_sinks_are_near_the_reference(dtype, 1.5)


MUTANTS = {
    "visible off by one": (
        "task.h", "Clamp(call.visible[token],", "Clamp(call.visible[token] + 1,",
        near_the_reference,
    ),
    "keys and values exchanged": (
        "task.h", "TransposeKeys(chunks_, Evenly<Number>{keys,",
        "TransposeKeys(chunks_, Evenly<Number>{values,", near_the_reference,
    ),
    "the own entry is not the last one": (
        "path.h", "count_(__builtin_popcount(path))",
        "count_(std::max(__builtin_popcount(path) - 1, 0))", near_the_reference,
    ),
    "a sibling that is seen": (
        "task.h", "return {path[0], path[1]};",
        "return {path[0], path[1] | (path[1] & path[1] - 1) / 2};", near_the_reference,
    ),
    "entries of a path in another order": (
        "path.h", "entries_[index++] =", "entries_[count_ - ++index] =", path_bits
    ),
    "a path that leaves its block early": (
        "task.h", "std::min(PathLength(i + r), kBlock - seen[r])",
        "std::min<int64_t>(PathLength(i + r), 1)", path_bits,
    ),
    "a path whose block is as long as it is": (
        "task.h", "std::min(PathLength(i + r), kBlock - seen[r])",
        "PathLength(i + r) > kBlock - seen[r] ? 0 : PathLength(i + r)", path_bits,
    ),
    "blocks in an order of their number": (
        "task.h", "AddBlock(begin, most - begin, first);",
        "{ const int64_t at = most > 256 ? (most - 1) / kBlock * kBlock - begin : begin; "
        "AddBlock(at, most - at, first); }", lambda: bits(jnp.float32),
    ),
    "a sum that keeps the scale of an earlier maximum": (
        "softmax.h", "state.total *= scale;", "", near_the_reference
    ),
    "values that others see": (
        "task.h", "end_all - begin_all, sums);", "kBlock - begin_all, sums);", nothing_unseen
    ),
    "tiles of values that others see": (
        "task.h", "Pair(part, positions, values, paired);",
        "Pair(part, {0, kPairs}, values, paired);", nothing_unseen,
    ),
    "a window off by one": (
        "task.h", "call.first == nullptr ? 0 : call.first[token];",
        "call.first == nullptr || call.first[token] == 0 ? 0 : call.first[token] - 1;", variants,
    ),
    "positions before a window": (
        "task.h", "std::fill_n(scores, std::min(unseen[r], end), -INFINITY);", "", variants
    ),
    "positions before a window, by tiles": (
        "task.h", "std::fill_n(scores, seen[r].begin, -INFINITY);", "", variants
    ),
    "entries before a window": (
        "task.h", "std::fill_n(weights, hidden, -INFINITY);", "", windowed_path_bits
    ),
    "values before a window": (
        "task.h", "begin_all = end_all = kBlock;", "begin_all = 0;", nothing_before_the_window
    ),
    "a scale left out": (
        "task.h", "call.scale > 0 ? kLog2E * call.scale :", "", variants
    ),
    "a cap left out of pages": (
        "task.h", "if (cap_ > 0) Cap(scores, most, cap_);\n      const bool",
        "const bool", variants,
    ),
    "a cap left out of paths": ("task.h", "cap_ > 0 && query < many", "false", variants),
    "sinks ignored": ("task.h", "if (call.sinks != nullptr)", "if (false)", variants),
    "a sink's weight in every lane": (
        "task.h", "state_[i].total[0] = 1;", "state_[i].total += 1.0f;", variants
    ),
}  # fmt: skip
ONLY_TILES = ("tiles of values that others see", "positions before a window, by tiles")


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Has calls take the handler of a source in which one text is another."""

    def mutate(file: str, old: str, new: str) -> None:
        calls = {(cpu, "ATTENTION"): "ssd_jax_tree_attention"}
        use_edited(monkeypatch, tmp_path, f"tree_attention/{file}", (old, new), calls)
        jax.clear_caches()

    yield mutate
    jax.clear_caches()


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, use):
    if name in ONLY_TILES and "amx_bf16" not in flags():
        pytest.skip("this processor has no tiles")
    file, old, new, experiment = MUTANTS[name]
    experiment()
    use(file, old, new)
    with pytest.raises(
        AssertionError, match=r"Arrays are not equal|Not equal to tolerance|isfinite"
    ):
        experiment()
