"""Float32 products are float32 on every platform, as the program asks for it."""

import jax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.tools.aot import specs

SMALL = specs.config(
    vocab_size=1024, hidden_size=128, intermediate_size=128, num_heads=2, num_kv_heads=2
)


def products(jaxpr):
    """All of a program's, those in loops and calls too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from products(getattr(value, "jaxpr", value))


def is_jaxpr(value):
    return isinstance(value, ClosedJaxpr | Jaxpr)


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_float32_ask_for_it(dtype):
    found = specs.programs(SMALL, dtype=dtype, slots=2, context=256)
    assert {name.split()[1] for name in found} >= {"forward", "accept", "prefill", "expand", "grow"}
    seen = set()
    for name, spec in found.items():
        traced = jax.make_jaxpr(spec.function)(*spec.arguments)
        for product in products(traced.jaxpr):
            wide = any(invar.aval.dtype == "float32" for invar in product.invars)
            highest = str(product.params["precision"]).count("HIGHEST") == 2
            assert highest == wide, (name, product)
            seen.add(wide)
    assert (dtype == "float32") in seen
