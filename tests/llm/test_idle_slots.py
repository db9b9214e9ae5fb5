"""A slot without a request costs the others nothing, whatever its last request needed."""

import jax

from ssd_jax.kernels import noise
from ssd_jax.kernels.verify import xla
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling import drafting, prediction
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=1)


def test_nothing_is_drawn_for_requests_that_have_ended(tmp_path, monkeypatch):
    drawn = []

    def counted(function):
        """It counts the programs' draws as these run."""

        def draw(*args, **settings):
            jax.debug.callback(lambda: drawn.append(function.__name__))
            return function(*args, **settings)

        return draw

    for module in (drafting, prediction):
        monkeypatch.setattr(module, "gumbel_of", counted(noise.gumbel_of))
    monkeypatch.setattr(xla, "gumbel_max", counted(noise.gumbel_max))
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
