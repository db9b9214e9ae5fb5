"""Settings of a request that vLLM has and this package lacks, with what to do instead."""

from __future__ import annotations

from ssd_jax.options.other_names import Names, Unsupported

_OFF = (None, False)
_BEAMS = "there is no beam search; sample n texts and compare their cumulative_logprob"

OTHER_NAMES: Names = {
    "best_of": Unsupported("give n, and choose among outputs by cumulative_logprob", (None, 1)),
    "use_beam_search": Unsupported(_BEAMS, _OFF),
    "length_penalty": Unsupported(_BEAMS, (None, 1)),
    "early_stopping": Unsupported(_BEAMS, _OFF),
    "detokenize": Unsupported("texts are always made; read token_ids beside them", (None, True)),
    "spaces_between_special_tokens": Unsupported("special tokens are written as they are", _OFF),
    "truncate_prompt_tokens": Unsupported(
        "give the ids that are to stay as the prompt: llm.encode(prompt)[-count:]"
    ),
    "guided_decoding": Unsupported("give structured_outputs"),
    "logits_processors": Unsupported("logit_bias changes logits of tokens", (None, [])),
    "allowed_token_ids": Unsupported("logit_bias raises ids above others"),
    "output_kind": Unsupported("generate returns finished texts, stream what is new"),
    "skip_reading_prefix_cache": Unsupported("`LLM(prefix_caching=False)` reads none", _OFF),
    "extra_args": Unsupported("give settings of SamplingParams by name"),
}
