"""A slot without a request costs the others nothing, whatever its last request needed."""

import jax
import pytest

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling import drafting, keys, prediction
from ssd_jax.sampling.judgement import coupled, rejection
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=1)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_nothing_is_drawn_for_requests_that_have_ended(tmp_path, monkeypatch, mode):
    drawn = []

    class Counted:
        """The keys, which count the programs' draws as these run."""

        def __getattr__(self, name):
            function = getattr(keys, name)
            if name not in ("gumbel_of", "gumbel_max"):
                return function

            def counted(*args, **settings):
                jax.debug.callback(lambda: drawn.append(name))
                return function(*args, **settings)

            return counted

    for module in (drafting, prediction, rejection, coupled):
        monkeypatch.setattr(module, "keys", Counted())
    tiny.write_checkpoint(tmp_path)
    about = {"slots": 2, "context": 64, "dtype": "float32", "compile_cache": "off", "mode": mode}
    if mode != "ar":
        about |= {"draft": str(tmp_path), "k": 2}
    if mode == "ssd":
        about |= {"budget": 4, "draft_placement": "inline"}
    with LLM(str(tmp_path), **about) as llm:
        llm.generate(["a", "b"], SAMPLED)
        jax.effects_barrier()
        assert drawn
        drawn.clear()
        llm.generate(["a"], GREEDY)
        jax.effects_barrier()
        assert not drawn
