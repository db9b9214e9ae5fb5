"""Requests for an engine with a policy of its own."""

from ssd_jax.engine.engine import Engine
from tests.llm.lengths import Comparing
from tests.llm.runs import run
from tests.loading.variation import varied


def by_policy(llm, asked, **policy):
    """What an engine with other policies and the same programs says."""
    roles = varied(llm.loaded, **policy).roles("ssd", llm.config.speculated)
    decoder, eos_ids = llm.tokenizer.open_stream, llm.tokenizer.eos_ids
    engine = Engine(roles.target, decoder, eos_ids, drafter=roles.drafter)
    Comparing(engine)
    return run(engine, asked)
