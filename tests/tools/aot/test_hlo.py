"""What is read from the text of a compiled program, on programs whose answers are known."""

import jax
import jax.numpy as jnp
import pytest

from ssd_jax.tools.aot import hlo

X = jnp.ones((64, 256))


def module(function, *arguments):
    return hlo.read(jax.jit(function).lower(*arguments).compile().as_text())


def trips(found):
    """Of every loop, 0 where they are unknown, in ascending order."""
    return sorted(found.trips(loop) or 0 for loop in found.instructions("while"))


def halved(x, *, until):
    return jax.lax.while_loop(lambda x: until(x), lambda x: x / 2, x)


def test_a_scan_has_known_trips_and_a_search_has_not():
    def both(x):
        x = halved(x, until=lambda x: x.max() > 0.1)
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x.T) @ x, None), x, None, length=7)[0]

    found = module(both, X)
    assert trips(found) == [0, 7]
    assert not [*found.instructions("conditional")]


def test_nested_loops_are_all_found():
    def nested(x):
        def body(x, _):
            return halved(jnp.tanh(x @ x.T) @ x, until=lambda x: x.min() > 1), None

        return jax.lax.scan(body, x, None, length=5)[0]

    assert trips(module(nested, X)) == [0, 5]


def test_a_condition_is_found_where_both_sides_are_large():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x) @ x.T, lambda: jnp.cos(x) @ x.T)

    (found,) = module(either, X).instructions("conditional")
    assert "cond" in found.rest


def test_copies_of_a_size_are_found_wherever_they_are():
    text = """%fused (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,16]{0,1} copy(%x)
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %small = f32[8]{0} copy(%x)
  %part = ((f32[8,16]{1,0}), f32[4,16]{1,0:S(1)}, s32[]) slice-start(%x), slice={[0:4], [0:16]}
  ROOT %turned = f32[8,16]{0,1} fusion(%x), kind=kLoop, calls=%fused
}
"""
    found = hlo.read(text)
    assert [copy.name for copy in found.copies(512)] == ["copy.1", "part"]
    assert [copy.name for copy in found.copies(32)] == ["copy.1", "small", "part"]


def test_sizes_of_results_are_read():
    line = (
        "  ROOT %a.1 = (bf16[2,3]{1,0:T(8,128)(2,1)}, pred[5]{0}, s64[]) fusion(%x, %y.2), kind=k"
    )
    (found,) = hlo.read("%f (x: f32[]) -> f32[] {\n" + line).instructions()
    assert (found.nbytes, found.dims) == (2 * 3 * 2 + 5 + 8, (2, 3))
    assert (found.operands, found.root, found.opcode) == (("x", "y.2"), True, "fusion")


@pytest.mark.parametrize(
    ("known", "step", "expected"), [(True, 1, 9), (True, 2, 5), (True, 3, 3), (False, 1, None)]
)
def test_trips_are_read_from_the_condition_where_the_configuration_has_none(known, step, expected):
    """As TPU programs have it; products of parts that neighbours have take two parts a turn."""
    bound = "%c = s32[] constant(9)" if known else "%c = s32[] get-tuple-element(%a), index=1"
    text = f"""%cond (a: (s32[], s32[])) -> pred[] {{
  %a = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  {bound}
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}}

%body (a: (s32[], s32[])) -> (s32[], s32[]) {{
  %a = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %n = s32[] get-tuple-element(%a), index=1
  %s = s32[] constant({step})
  %next = s32[] add(%i, %s)
  ROOT %both = (s32[], s32[]) tuple(%next, %n)
}}

ENTRY %main (a: (s32[], s32[])) -> (s32[], s32[]) {{
  %a = (s32[], s32[]) parameter(0)
  ROOT %w = (s32[], s32[]) while(%a), condition=%cond, body=%body
}}
"""
    found = hlo.read(text)
    (loop,) = found.instructions("while")
    assert found.trips(loop) == expected
