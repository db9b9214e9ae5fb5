"""The engines of `bench_rivals.py`, each importable only in its own environment.

An engine is opened once (weights loaded, one warm-up generation done) and then asked for one
prompt at a time, greedily and past any end-of-sequence token, batch 1, KV cache on. Speed is that
of decoding alone: tokens after the first, over the time from the first token to the last.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

TRANSFORMERS_LOOPS = ("eager", "generate", "compiled", "tuned")
ENGINES = (
    *(f"transformers:{loop}" for loop in TRANSFORMERS_LOOPS),
    *(name + loop for name in ("llama.cpp", "ssd_jax") for loop in ("", ":lookup", ":draft")),
)
CACHE_MULTIPLE = 64  # static caches are rounded up to this many positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What to decode: a GGUF file or model directory, and the lines of the prompt file.

    Attributes:
      draft: GGUF file of the draft model; None is the one that comes with ssd_jax.
      k: most tokens that a draft proposes at a time.
    """

    model: Path
    prompts: Sequence[Mapping[str, Any]]
    max_tokens: int
    dtype: str
    threads: int
    draft: Path | None
    k: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One generation: decode speed without prefill, and the ids it produced."""

    tokens_per_second: float
    token_ids: list[int]


class Engine(Protocol):
    """One loaded model."""

    def versions(self) -> dict[str, str]: ...

    def generate(self, index: int) -> Measurement:
        """Decodes `max_tokens` tokens after prompt `index` of the workload."""
        ...


def open_engine(name: str, workload: Workload) -> Engine:
    """Loads an engine of `ENGINES`."""
    family, _, loop = name.partition(":")
    if family == "llama.cpp":
        from bench_llama import LlamaCpp

        return LlamaCpp(workload, loop)
    return (SsdJax if family == "ssd_jax" else Transformers)(workload, loop)


class SsdJax:
    """This package: one slot, autoregressive, or SD with prompt lookup or a draft model."""

    def __init__(self, workload: Workload, loop: str) -> None:
        from ssd_jax import LLM, SamplingParams

        self._workload = workload
        draft = "ngram" if loop == "lookup" else str(workload.draft or "default")
        mode = {"mode": "sd", "draft": draft, "k": str(workload.k)} if loop else {"mode": "ar"}
        self._llm = LLM(str(workload.model), dtype=workload.dtype, slots=1, context=1024, **mode)
        self._params = SamplingParams(max_tokens=workload.max_tokens, ignore_eos=True)

    def versions(self) -> dict[str, str]:
        import jax

        import ssd_jax

        return {"jax": jax.__version__, "ssd_jax": getattr(ssd_jax, "__version__", "?")}

    def generate(self, index: int) -> Measurement:
        line = self._workload.prompts[index]
        prompt = line.get("ids") or line.get("prompt") or line["messages"]
        output = self._llm.generate([prompt], self._params)[0]
        return Measurement(
            tokens_per_second=output.metrics["tokens_per_second"],
            token_ids=[int(token) for token in output.token_ids],
        )


class Transformers:
    """Hugging Face transformers on CPU torch, in one of four decode loops.

    `eager` calls the model once per token with a `DynamicCache`; `generate` is the library's own
    loop, timed by a streamer; `compiled` and `tuned` call a `torch.compile`d step with a
    `StaticCache`, whose weights inductor freezes (prepacks) at compile time; `tuned` also lets
    inductor choose and generate the matrix-product kernels. Prefill is eager in all four.
    """

    def __init__(self, workload: Workload, loop: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(workload.threads)
        transformers.utils.logging.disable_progress_bar()
        self._torch, self._transformers = torch, transformers
        self._workload = workload
        self._model, tokenizer = self._load(workload.model, getattr(torch, workload.dtype))
        self._prompts = [self._encode(tokenizer, line) for line in workload.prompts]
        longest = max(ids.shape[1] for ids in self._prompts) + workload.max_tokens
        self._cache_length = -(-longest // CACHE_MULTIPLE) * CACHE_MULTIPLE
        self._loop: Callable[[Any], Measurement] = {
            "eager": self._eager,
            "generate": self._generate,
            "compiled": self._compiled,
            "tuned": self._compiled,
        }[loop]
        if loop in ("compiled", "tuned"):
            self._compile(tune=loop == "tuned")

    def versions(self) -> dict[str, str]:
        return {
            "torch": self._torch.__version__,
            "transformers": self._transformers.__version__,
        }

    def generate(self, index: int) -> Measurement:
        return self._loop(self._prompts[index])

    def _load(self, path: Path, dtype: Any) -> tuple[Any, Any]:
        file = {"gguf_file": path.name} if path.is_file() else {}
        source = path.parent if path.is_file() else path
        tokenizer = self._transformers.AutoTokenizer.from_pretrained(source, **file)
        model = self._transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **file)
        if any(value.dtype != dtype for value in model.parameters()):
            raise RuntimeError(f"{path}: not every weight is {dtype}; this would time other work")
        return model.eval(), tokenizer

    def _encode(self, tokenizer: Any, line: Mapping[str, Any]) -> Any:
        if "ids" in line:
            return self._torch.tensor([line["ids"]])
        messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
        if tokenizer.chat_template:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        else:
            encoded = tokenizer("\n".join(message["content"] for message in messages))
        return self._torch.tensor([encoded["input_ids"]])

    def _eager(self, ids: Any) -> Measurement:
        cache = self._transformers.DynamicCache(config=self._model.config)

        def step(token: Any) -> Any:
            out = self._model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1, keepdim=True)

        with self._torch.inference_mode():
            return self._timed(step(ids), lambda token, position: step(token), ids.shape[1])

    def _compiled(self, ids: Any) -> Measurement:
        torch = self._torch
        with torch.no_grad():
            self._cache.reset()
            first = self._step(ids, torch.arange(ids.shape[1]))
            return self._timed(
                first,
                lambda token, position: self._compiled_step(token, torch.tensor([position])),
                ids.shape[1],
            )

    def _compile(self, *, tune: bool) -> None:
        import torch._inductor.config as inductor

        inductor.freezing = True
        if tune:
            inductor.max_autotune = True
            inductor.max_autotune_gemm_backends = "CPP"
        self._cache = self._transformers.StaticCache(
            config=self._model.config, max_cache_len=self._cache_length
        )
        self._compiled_step = self._torch.compile(self._step, dynamic=False)

    def _step(self, tokens: Any, positions: Any) -> Any:
        out = self._model(
            tokens,
            past_key_values=self._cache,
            use_cache=True,
            position_ids=positions[None],
            cache_position=positions,
            logits_to_keep=1,
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def _timed(
        self, first: Any, step: Callable[[Any, int], Any], prompt_length: int
    ) -> Measurement:
        """Times `step(token, position)` from the first token, given, to the last."""
        more = self._workload.max_tokens - 1
        token, ids = first, [first.item()]
        start = time.perf_counter()
        for position in range(prompt_length, prompt_length + more):
            token = step(token, position)
            ids.append(token.item())
        seconds = time.perf_counter() - start
        return Measurement(tokens_per_second=more / seconds, token_ids=ids)

    def _generate(self, ids: Any) -> Measurement:
        count, times = self._workload.max_tokens, []

        class Clock(self._transformers.generation.streamers.BaseStreamer):
            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        out = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            streamer=Clock(),
        )
        tokens = out[0, ids.shape[1] :].tolist()
        start, *_, end = times[1:]  # the first call hands over the prompt
        return Measurement(tokens_per_second=(count - 1) / (end - start), token_ids=tokens)
