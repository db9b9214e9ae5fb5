"""Which models run in which formats and where: `docs/models.md`.

`python -m tests.models_page` computes the stored logits of every family on this machine, compiles a
decoder of it for chips that JAX's compilers know without having them, notes what became of it in
docs/models.json, and writes the page. Platforms and families may be named, as in
`python -m tests.models_page cpu v5e llama`; with `--page` it writes the page alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator

import jax
import numpy as np

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.registry import ARCHITECTURES, FAMILIES, MISSING
from ssd_jax.tools.aot.parts import ChipSlice, compile_program
from ssd_jax.tools.aot.programs import Sizes, of_target
from tests.models.golden import our_logits
from tests.models.golden_logits import GOLDENS, NAMES, golden
from tests.models.test_families import CONFIGURATIONS, MOST_DOWNLOADED, RANKING
from tests.support import EVIDENCE, Note, Place, merged, places, versions
from tests.tools.aot import specs

NOTES, PAGE = EVIDENCE.with_name("models.json"), EVIDENCE.with_name("models.md")
GGUF = {model_type: "read" for model_type, _ in ARCHITECTURES.values()} | {
    "mistral": "read, as llama or mistral3",
    "mistral3": "read, as llama or mistral3",
    "mixtral": "read, as llama",
    "olmo3": "read, as olmo2",
    "gemma3_text": "read, as gemma3",
    "gemma3": "read",
    "glm": "read, as chatglm",
    "granitemoehybrid": "read, as granite",
    "internlm3": "read, as llama",
    "iquestcoder": "read, as llama",
    "ministral3": "read, as mistral3",
    "qwen2_vl": "read, as qwen2vl",
    "qwen2_5_vl": "read, as qwen2vl",
    "solar_open": "read, as glm4moe",
    **dict.fromkeys(("ministral", "helium", "cwm", "hyperclovax", "vaultgemma"), "no such files"),
}
"""Of families with GGUF files, by which architecture of llama.cpp; its converter has none for
some."""
TOLERANCE = 1e-4
STATES = {
    "ran": "gives the logits of `transformers` within 1e-4 in float32, with random weights",
    "compiled": "compiled by the platform's compiler, without a device",
    "failed": "does not compile, or gives something else",
}


def goldens() -> dict[str, list[str]]:
    """Stored logits by family."""
    families = {name: open_checkpoint(str(GOLDENS / name)).config.family for name in NAMES}
    return {
        family: [n for n in NAMES if families[n] == family]
        for family in sorted({*families.values()})
    }


def ran(names: list[str]) -> None:
    """Compares logits with those that are stored."""
    for name in names:
        tokens, expected = golden(name)
        np.testing.assert_allclose(our_logits(GOLDENS / name, tokens), expected, atol=TOLERANCE)


def compiled(names: list[str], place: Place) -> None:
    """Compiles a target's forward of decoders with these mechanisms, of sizes that chips take, with
    the kernels that a user gets there."""
    assert place.mesh is not None
    slice_ = ChipSlice(name=place.name, devices=[*place.mesh.devices.flat])
    room = Sizes(slots=4, context=2048, k=specs.K, branches=specs.BRANCHES)
    for name in names:
        config = open_checkpoint(str(GOLDENS / name)).config
        small = specs.config(head_dim=128)
        sizes = {
            field: getattr(small, field)
            for field in ("vocab_size", "hidden_size", "intermediate_size", "num_heads")
        }
        m, scaling = config.mechanisms, config.rope_scaling
        rotary = m.rotary_dim and 128 * m.rotary_dim // config.head_dim
        if scaling is not None and scaling.kind == "longrope":
            pairs = rotary // 2 if rotary else 64
            factors = {"short_factors": (1.0,) * pairs, "long_factors": (2.0,) * pairs}
            scaling = dataclasses.replace(scaling, **factors)
        experts = m.experts
        if experts is not None:
            experts = dataclasses.replace(
                experts, intermediate=256, shared=256 * (experts.shared > 0)
            )
        config = dataclasses.replace(
            config,
            **sizes,
            num_kv_heads=small.num_kv_heads,
            head_dim=128,
            rope_scaling=scaling,
            mechanisms=dataclasses.replace(m, rotary_dim=rotary, experts=experts),
        )
        model = slice_.model(config, "bfloat16", (0,))
        forward = of_target(model, room)["forward", specs.K]
        _, module = compile_program(forward, model, slice_.chip)
        if experts is not None and model.execution.experts.name != "xla":
            calls = module.instructions("custom-call")
            assert any("expert_products" in call.rest for call in calls), "experts have no kernel"


def survey(wanted: list[str]) -> Iterator[Note]:
    """Tries every family, or those that are named; prints what fails, and goes on."""
    today = datetime.date.today().isoformat()
    families = goldens()
    asked = [name for name in wanted if name in families] or [*families]
    for place in places([name for name in wanted if name not in families]):
        for family, names in ((name, families[name]) for name in asked):
            state = "ran" if place.mesh is None else "compiled"
            try:
                ran(names) if place.mesh is None else compiled(names, place)
            except Exception as error:
                print(f"{family} on {place.name}: {error}", file=sys.stderr)
                state = "failed"
            print(f"{place.name}: {family}: {state}", flush=True)
            yield Note(family, place.name, state, today, versions(place.name))


def read() -> list[Note]:
    """What is known."""
    return [Note(*fields) for fields in json.loads(NOTES.read_text())] if NOTES.exists() else []


def render(notes: list[Note]) -> str:
    """The page."""
    known = {(note.part, note.platform): note.state for note in notes}
    platforms = list(dict.fromkeys(note.platform for note in notes))
    columns = ["models", "safetensors", "GGUF", *platforms]
    lines = [
        "# Models",
        "",
        "Made by `python -m tests.models_page`; nothing here is typed. Families are files beside",
        "[`registry.py`](../ssd_jax/models/families/registry.py); each runs in every mode,",
        "placement and dtype, and `ssd-jax convert` writes each in this package's format.",
        "",
        *(f"- `{state}`: {what}" for state, what in STATES.items() if state in known.values()),
        "- `refused`: with an error that names what is missing, before weights load",
        "",
        f"| `model_type` | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in FAMILIES:
        cells = [
            ", ".join(_models(name)),
            "read",
            GGUF.get(name, "refused"),
            *(known.get((name, platform), "") for platform in platforms),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += _configurations()
    lines += ["", "## What other models need", "", "| `model_type` | needs |", "|---|---|"]
    lines += [f"| {types.replace(' ', ', ')} | {part} |" for part, types in MISSING.items()]
    lines += ["", "## When, with what", ""]
    for platform in platforms:
        of = sorted({(note.date, note.versions) for note in notes if note.platform == platform})
        lines.append(f"- {platform}: {'; '.join(f'{date}, {what}' for date, what in of)}")
    return "\n".join(lines) + "\n"


def _configurations() -> list[str]:
    """The sections about the most downloaded models, and about others."""
    ranked = [
        f"| {name} | {n / 1e6:.1f} | {_reading(name)} |" for name, n in MOST_DOWNLOADED.items()
    ]
    are_read = sum(_reading(name) == "read" for name in MOST_DOWNLOADED)
    others = [
        f"| {name} | {_reading(name)} |" for name in CONFIGURATIONS if name not in MOST_DOWNLOADED
    ]
    return [
        "",
        "## The most downloaded models",
        "",
        f"Of the 40 most downloaded text models of 2025 and 2026, {are_read} are read. These are",
        "the models that the Hub tags `text-generation` with the most downloads up to",
        f"{RANKING['date']},",
        "in millions. Counted are those published from July 2024 on, so that nearly all their",
        "downloads are of these two years; left out are models for tests and copies of others, in",
        "GGUF, MLX or quantised. Source: an answer of the Hub's `/api/models` in the archive",
        "[wss-hugging-face](https://github.com/neldivad/wss-hugging-face) (CC BY 4.0), of whose",
        "1,000 models the 500 with the most downloads in the month before were gone through.",
        "",
        "Configurations are written without what nothing here depends on. The sizes and RoPE of",
        f"{len(RANKING['compared'])} models were compared with those in",
        "[litgpt](https://github.com/Lightning-AI/litgpt/blob/main/litgpt/config.py) (`compared`",
        "in [`most_downloaded.json`](../tests/models/most_downloaded.json)); the others have not",
        "been compared with a copy.",
        "",
        "| | downloads | |",
        "|---|---|---|",
        *ranked,
        "",
        "## Other well-known models",
        "",
        "| | |",
        "|---|---|",
        *others,
    ]


def _models(family: str) -> list[str]:
    """Names of the well-known models of a family."""
    return [
        name.partition("/")[2]
        for name, config in CONFIGURATIONS.items()
        if config["model_type"] == family and _reading(name) == "read"
    ]


def _reading(name: str) -> str:
    try:
        ModelConfig.from_hf(CONFIGURATIONS[name], source="config.json")
    except InputError as error:
        return f"refused: {str(error).removeprefix('config.json: ').partition('; supported')[0]}"
    return "read"


def main(arguments: list[str]) -> None:
    """Surveys, or with --page only writes the page; one that is interrupted keeps its notes."""
    notes = read()
    for note in survey(arguments) if arguments != ["--page"] else ():
        notes = merged(notes, [note])
        lines = ",\n".join(map(json.dumps, notes))
        NOTES.write_text(f"[\n{lines}\n]\n")
    PAGE.write_text(render(notes))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 1)
    main(sys.argv[1:])
