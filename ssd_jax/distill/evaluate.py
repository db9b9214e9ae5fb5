"""Stage *evaluate*: how good a draft is on prompts that it has never seen.

The target completes held-out prompts, greedily and at temperature 1; this text is kept. Target and
draft then run over it, and everything but the costs of forwards follows from that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ssd_jax.bench.environment import describe
from ssd_jax.bench.report import json_safe
from ssd_jax.checkpoints.orbax import origin
from ssd_jax.checkpoints.vocabulary import require_same
from ssd_jax.distill import generate
from ssd_jax.distill.generate import Bar, Completion, CompletionJob, into_shards
from ssd_jax.distill.manifest import Manifest, write_atomic
from ssd_jax.distill.prompts import PromptIds
from ssd_jax.distill.rounds import MeasuredDraft, mean_of, power_law, walk
from ssd_jax.distill.scoring import GivenText, Judged, judge
from ssd_jax.distill.settings import EvaluateSettings, GenerateSettings, TargetSettings
from ssd_jax.distill.shards import decode_texts, read_file
from ssd_jax.distill.step_costs import StepCosts, measure_steps
from ssd_jax.errors import InputError
from ssd_jax.files import read_json
from ssd_jax.opened import OpenedModel, open_model
from ssd_jax.speculation.fan_out import Geometric
from ssd_jax.speculation.tuning import Plan, ar, best_sd, best_ssd, hit_rate

FORMAT = 1
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Of the two texts of every prompt."""


def choose(prompts: Sequence[PromptIds], settings: EvaluateSettings) -> list[PromptIds]:
    """The held-out prompts that are completed, set by set.

    Raises:
      InputError: a set that has none.
    """
    names = settings.sets or tuple(dict.fromkeys(prompt.set for prompt in prompts))
    chosen = []
    for name in names:
        own = [prompt for prompt in prompts if prompt.set == name]
        if not own:
            raise InputError(
                f"[evaluate] sets: no held-out prompt of {name!r} is left; choose other sets"
            )
        count = min(settings.prompts, len(own))
        chosen += [own[i * len(own) // count] for i in range(count)]
    return chosen


def text_job(
    settings: EvaluateSettings,
    target: TargetSettings,
    *,
    prompts: Sequence[PromptIds],
    slots: int,
    vocabulary: int,
    limit: int,
    directory: Path,
    bar: Bar,
) -> CompletionJob:
    """What makes the text of `prompts`, those of `choose`; see `generate.CompletionJob`."""
    made = GenerateSettings(
        max_tokens=settings.max_tokens,
        temperatures=tuple(TEMPERATURES.values()),
        seed=settings.seed,
        slots=slots,
        top_n=0,
    )
    return CompletionJob(
        target=target,
        settings=made,
        prompts=prompts,
        vocabulary=vocabulary,
        limit=limit,
        directory=directory,
        bar=bar,
    )


def write_texts(job: CompletionJob, manifest: Manifest) -> Manifest:
    """Completes what is not completed yet; see `generate.run`."""
    return generate.run(job, manifest, _plan(job))


def read_texts(job: CompletionJob, manifest: Manifest) -> dict[str, list[GivenText]]:
    """By the names of `TEMPERATURES`, one of each prompt.

    Raises:
      InputError: a damaged file.
    """
    found: list[GivenText] = []
    samples = [
        sample
        for entry in manifest.data["shards"]
        for sample in decode_texts(read_file(job.directory, entry))
    ]
    completions = [completion for shard in _plan(job) for completion in shard]
    for completion, sample in zip(completions, samples, strict=True):
        found.append(GivenText(sample.tokens, len(job.prompts[completion.prompt].ids)))
    count = len(job.prompts)
    return {name: found[i * count : (i + 1) * count] for i, name in enumerate(TEMPERATURES)}


def _plan(job: CompletionJob) -> list[list[Completion]]:
    count = len(job.prompts)
    completions = [
        Completion(index=turn * count + place, prompt=place, temperature=temperature)
        for turn, temperature in enumerate(TEMPERATURES.values())
        for place in range(count)
    ]
    return into_shards(completions, job.prompts, job.settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a draft is judged with.

    Attributes:
      draft: its source, see `Config.draft`.
      job: of the text, which is written.
      manifest: of that.
      path: of the result.
    """

    settings: EvaluateSettings
    draft: str
    job: CompletionJob
    manifest: Manifest
    path: Path
    bar: Bar


def open_pair(target: TargetSettings, draft: str) -> tuple[OpenedModel, OpenedModel]:
    """Target and draft without their weights.

    Raises:
      InputError: a draft that is none, or of another target.
    """
    theirs = open_model(target.source, target.dtype)
    own = open_model(draft, target.dtype, target=theirs)
    require_same(theirs.tokenizer, own.tokenizer, target_name=theirs.source, draft_name=own.source)
    return theirs, own


def evaluate(evaluation: Evaluation) -> dict[str, Any]:
    """The figures, which are also written; those that are there already are not made again.

    Raises:
      InputError: a draft that cannot be used, or a damaged file.
    """
    job, settings = evaluation.job, evaluation.settings
    target, draft = open_pair(job.target, evaluation.draft)
    made_of = _made_of(evaluation, draft)
    known = _read(evaluation.path)
    if known is not None and known["made_of"] == made_of:
        return known
    with evaluation.bar("loading weights", unit="bytes") as progress:
        models = (target.model, target.load(progress)), (draft.model, draft.load())
    texts = read_texts(job, evaluation.manifest)
    given = [text for name in TEMPERATURES for text in texts[name]]
    with evaluation.bar("judging", unit="tokens") as progress:
        both = judge(
            *models, given, tokens=target.tokenizer.size, longest=job.context, progress=progress
        )
    with evaluation.bar("forwards of every width", unit="rounds") as progress:
        steps = measure_steps(
            *models,
            ks=settings.ks,
            budgets=settings.budgets,
            context=job.context,
            repeats=settings.repeats,
            progress=progress,
        )
    count = len(job.prompts)
    judged = {name: both[i * count : (i + 1) * count] for i, name in enumerate(TEMPERATURES)}
    document = json_safe(
        {
            "format": FORMAT,
            "made_of": made_of,
            "draft": evaluation.draft,
            "target": job.target.source,
            "environment": describe(jax.devices()[0]),
            "steps": {
                "target_ms": steps.target_ms,
                "target": steps.target,
                "draft": steps.draft,
            },
            **figures(job.prompts, judged, settings, steps),
        }
    )
    write_atomic(evaluation.path, (json.dumps(document, indent=1) + "\n").encode())
    return document


def draft_digest(draft: OpenedModel) -> str:
    """SHA-256 of a draft's architecture, map and files."""
    about = [draft.fingerprint, sorted(origin(draft.checkpoint.path).values())]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _made_of(evaluation: Evaluation, draft: OpenedModel) -> dict[str, Any]:
    """What decides whether figures are still right."""
    settings, manifest = evaluation.settings, evaluation.manifest
    return {
        "draft_sha256": draft_digest(draft),
        "texts_sha256": [entry["sha256"] for entry in manifest.data["shards"]],
        "dtype": evaluation.job.target.dtype,
        **{name: list(getattr(settings, name)) for name in ("ks", "budgets")},
        "repeats": settings.repeats,
    }


def _read(path: Path) -> dict[str, Any] | None:
    """Figures that were written; None where they cannot be used."""
    try:
        document = read_json(path)
    except InputError:
        return None
    return document if document.get("format") == FORMAT and "made_of" in document else None


def figures(
    prompts: Sequence[PromptIds],
    judged: Mapping[str, Sequence[Judged]],
    settings: EvaluateSettings,
    steps: StepCosts,
) -> dict[str, Any]:
    """`sets`: by name; `mean`: over the sets, each counting alike.

    Args:
      prompts: as completed.
      judged: by the names of `TEMPERATURES`, one of each prompt.
      settings, steps: numbers of tokens and branches, and what they cost.
    """
    sets, measured = {}, []
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        own = [place for place, prompt in enumerate(prompts) if prompt.set == name]
        of_set = {of: [each[place] for place in own] for of, each in judged.items()}
        sets[name], found = _of_set(of_set, settings)
        measured.append(found)
        sets[name]["predicted"] = _predicted(found, settings, steps)
    mean = _mean(list(sets.values()))
    mean["predicted"] = _predicted(
        {of: mean_of([one[of] for one in measured]) for of in TEMPERATURES}, settings, steps
    )
    return {"sets": sets, "mean": mean}


def _of_set(
    judged: Mapping[str, Sequence[Judged]], settings: EvaluateSettings
) -> tuple[dict[str, Any], dict[str, MeasuredDraft]]:
    """Figures of a set, and what predictions need."""
    chances = {
        "greedy": [(one.rank == 0).astype(float) for one in judged["greedy"]],
        "sampled": [one.kept.astype(float) for one in judged["sampled"]],
    }
    per_call, measured = {}, {}
    for of, own in chances.items():
        walks = {k: walk(own, k) for k in range(1, max(settings.ks) + 1)}
        per_call[of] = {k: walks[k].tokens_per_call for k in settings.ks}
        per_call[f"{of}_all_hits"] = {
            k: walk(own, k, tail=max(k - 1, 1)).tokens_per_call for k in settings.ks
        }
        middle = settings.ks[(len(settings.ks) - 1) // 2]
        ranks = [one.rank for one in judged[of]]
        alone, r = power_law(walks[middle], ranks, greedy=of == "greedy")
        by_length = tuple(walks[k].rates for k in walks)
        measured[of] = MeasuredDraft(by_length=by_length, alone=alone, r=r)
    overlaps = np.concatenate([one.overlap for one in judged["sampled"]])
    return {
        "prompts": len(judged["greedy"]),
        "tokens": {of: sum(len(one) for one in own) for of, own in chances.items()},
        "greedy_agreement": float(np.mean(np.concatenate(chances["greedy"]))),
        "overlap": float(np.mean(overlaps)),
        "tokens_per_call": per_call,
    }, measured


def _mean(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    per_call = [one["tokens_per_call"] for one in sets]
    return {
        **{n: float(np.mean([one[n] for one in sets])) for n in ("greedy_agreement", "overlap")},
        "tokens_per_call": {
            of: {k: float(np.mean([one[of][k] for one in per_call])) for k in ks}
            for of, ks in per_call[0].items()
        },
    }


def _predicted(
    measured: Mapping[str, MeasuredDraft], settings: EvaluateSettings, steps: StepCosts
) -> dict[str, Any]:
    """Best K and M by Theorem 7, and how many times as fast as AR they make one text."""
    costs, predicted = steps.costs, {}
    for of, seen in measured.items():
        fan_out = Geometric(acceptance=_rate(seen), r=seen.r)
        plain, sd = best_sd(costs, seen, settings.ks)
        branching, ssd = best_ssd(
            costs,
            seen,
            fan_out,
            ks=settings.ks,
            budgets=settings.budgets,
            waits=(True, False),
        )
        alone = ar(costs)
        predicted[of] = {
            "sd": {"k": plain.k, "speed_up": sd / alone},
            "ssd": {
                "k": branching.k,
                "budget": branching.budget,
                "speed_up": ssd / alone,
                "hit_rate": _hit_rate(seen, fan_out, branching),
            },
        }
    return predicted


def _rate(seen: MeasuredDraft) -> float:
    """One acceptance rate for all places, from the longest proposals; within (0, 1)."""
    return float(np.clip(np.mean(seen.by_length[-1]), 0.01, 0.99))


def _hit_rate(seen: MeasuredDraft, fan_out: Geometric, plan: Plan) -> float:
    """After a hit."""
    return hit_rate(seen, fan_out, plan.k, plan.budget, "hit")
