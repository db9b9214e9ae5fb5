"""A slot without a request costs the others nothing, whatever its last request needed."""

import jax

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling import drafting, keys, prediction
from ssd_jax.sampling.judgement import coupled, rejection
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=1)


def test_nothing_is_drawn_for_requests_that_have_ended(tmp_path, monkeypatch):
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
    settings = {"slots": 2, "context": 64, "dtype": "float32", "compile_cache": "off"}
    settings |= {"mode": "ssd", "draft": str(tmp_path), "k": 2, "budget": 4}
    with LLM(str(tmp_path), draft_placement="inline", **settings) as llm:
        assert llm.modes == ("ar", "sd", "ssd")
        for mode in llm.modes:
            llm.generate(["a", "b"], SAMPLED, mode=mode)
            jax.effects_barrier()
            assert drawn, mode
            drawn.clear()
            llm.generate(["a"], GREEDY, mode=mode)
            jax.effects_barrier()
            assert not drawn, mode
