"""The tests of products with packed weights catch the faults that they are there for."""

import jax
import pytest

from ssd_jax.kernels import handlers
from ssd_jax.kernels.experts import cpu as experts
from ssd_jax.kernels.linear import cpu
from tests.kernels import test_linear, test_packed_experts
from tests.kernels.edited import use_edited
from tests.kernels.processor import flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(handlers.why_missing() is not None, reason="no C++ compiler"),
]


def products_of_experts():
    for sizes in ((1, 0, 1, 1, 0), (3, 9, 0, 20, 33), (7, 256, 5, 30, 2)):
        test_packed_experts.check("bfloat16", sizes)


def mxfp4():
    test_linear.test_products_are_the_references("MXFP4", (33, 768))


def few_rows_of_float8():
    test_linear.test_a_row_has_the_same_bits_beside_any_rows("F8_E4M3", 768)


MUTANTS = {
    "another expert's weights": (
        "cpu.cc", "weight.panels + expert * weight.Panels()",
        "weight.panels + (expert ^ 1) * weight.Panels()", products_of_experts,
    ),
    "experts' weights side by side without their padding": (
        "cpu.cc", "weight.panels + expert * weight.Panels() * weight.panel_bytes",
        "weight.panels + expert * weight.outputs * weight.panel_bytes / kPanel",
        products_of_experts,
    ),
    "products of an expert where another's are": (
        "cpu.cc", "float* y = weight.y + first * weight.outputs;",
        "float* y = weight.y + first / 2 * weight.outputs;", products_of_experts,
    ),
    "an expert's rows that are left out": (
        "cpu.cc", "row < rows.rows; row += kTile",
        "row < std::min(rows.rows, kTile); row += kTile", products_of_experts,
    ),
    "experts that are never multiplied": (
        "cpu.cc", "MultiplyExperts(pool, groups, *operands, tiles);\n        groups.clear();",
        "groups.clear();", products_of_experts,
    ),
    "rows of no expert that are not zeros": (
        "cpu.cc", "weight.y + rows * weight.outputs, 0.0f);",
        "weight.y + rows * weight.outputs, 1.0f);", products_of_experts,
    ),
    "a float of four bits that is another": (
        "grouped.h", "{12, 13, 14, 15, 16, 18, 20, 24,", "{12, 13, 14, 15, 16, 17, 20, 24,", mxfp4
    ),
    "an exponent off by one": (
        "grouped.h", "(Floats)((Words)bytes << 23) * 0.5f", "(Floats)((Words)bytes << 23)", mxfp4
    ),
    "halves of a byte that are exchanged": (
        "grouped.h", "high = FromE2M1(high);",
        "high = FromE2M1(high);\n      std::swap(low, high);", mxfp4,
    ),
    "few rows of 8-bit floats that are multiplied with another's inputs": (
        "float8.h", "second, Word(words + 4)", "second, Word(words)",
        few_rows_of_float8,
    ),
    "few rows without the scales of their weights' blocks": (
        "float8.h", "MulAdd(Load<Floats>(scales + v * sizeof(Floats)), sums[r][v],",
        "MulAdd(Floats{} + 1.0f, sums[r][v],", few_rows_of_float8,
    ),
}  # fmt: skip
ONLY_VECTORS_OF_64_BYTES = tuple(name for name, case in MUTANTS.items() if case[0] == "float8.h")


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Has calls take the handlers of a source in which one text is another."""

    def forget() -> None:
        test_packed_experts.program.cache_clear()
        jax.clear_caches()

    def mutate(file: str, old: str, new: str) -> None:
        calls = {
            (cpu, "PRODUCTS"): "ssd_jax_linear_products",
            (experts, "EXPERT_PRODUCTS"): "ssd_jax_linear_expert_products",
        }
        use_edited(monkeypatch, tmp_path, f"linear/{file}", (old, new), calls)
        forget()

    yield mutate
    forget()


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, use):
    if name in ONLY_VECTORS_OF_64_BYTES and ("avx512vl" not in flags() or "amx_bf16" in flags()):
        pytest.skip("this processor has no vectors of 64 bytes, or tiles in their place")
    file, old, new, experiment = MUTANTS[name]
    experiment()
    use(file, old, new)
    with pytest.raises(AssertionError, match=r"Arrays are not equal|Not equal to tolerance"):
        experiment()
