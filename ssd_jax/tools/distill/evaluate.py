"""Stage *evaluate*: how good a draft is on prompts that it has never seen.

The target completes held-out prompts, greedily and at temperature 1; this text is kept. Target and
draft then run over it, and everything but the costs of forwards follows from that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ssd_jax.checkpoints.opening import dtype_of_draft
from ssd_jax.checkpoints.orbax import origin
from ssd_jax.checkpoints.tokenizer import require_same
from ssd_jax.devices.opened import OpenedModel, open_model
from ssd_jax.devices.program_lookup import surroundings
from ssd_jax.errors import InputError
from ssd_jax.speculation.fan_out import GeometricFanOut
from ssd_jax.system.atomic import write_file
from ssd_jax.system.environment import cpu_affinity, describe
from ssd_jax.system.files import read_json
from ssd_jax.tools.bench.report import json_safe
from ssd_jax.tools.distill.completions import Completion, CompletionJob, Shards
from ssd_jax.tools.distill.generate import into_shards
from ssd_jax.tools.distill.manifest import Manifest
from ssd_jax.tools.distill.prompts import PromptIds
from ssd_jax.tools.distill.rounds import MeasuredDraft, power_law, walk
from ssd_jax.tools.distill.scoring import Judged, judge
from ssd_jax.tools.distill.settings import EvaluateSettings, TargetSettings
from ssd_jax.tools.distill.shards import decode_texts, read_file
from ssd_jax.tools.distill.step_costs import StepCosts, measure_steps
from ssd_jax.tools.distill.target import digest
from ssd_jax.tuning.throughput import ar, best_sd, best_ssd, hit_rate

FORMAT = 2
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Temperatures of the two texts of every prompt."""


def choose(prompts: Sequence[PromptIds], settings: EvaluateSettings) -> list[PromptIds]:
    """The held-out prompts that are completed, set by set.

    Raises:
      InputError: a set has none.
    """
    chosen = []
    for name in settings.sets or dict.fromkeys(prompt.set for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.set == name]
        if not own:
            raise InputError(
                f"[evaluate] sets: no held-out prompt of {name!r} is left; choose other sets"
            )
        count = min(settings.prompts, len(own))
        chosen += [own[i * len(own) // count] for i in range(count)]
    return chosen


def plan_texts(job: CompletionJob) -> Shards:
    """Every prompt once at each temperature, by shard."""
    count = len(job.prompts)
    completions = [
        Completion(index=turn * count + place, prompt=place, temperature=temperature)
        for turn, temperature in enumerate(TEMPERATURES.values())
        for place in range(count)
    ]
    return into_shards(completions, job.prompts, job.settings)


def open_pair(target: TargetSettings, draft: str) -> tuple[OpenedModel, OpenedModel]:
    """Target and draft without their weights; the draft has its default dtype beside the target.

    Raises:
      InputError: it is no draft, or one of another target.
    """
    theirs = open_model(target.source, target.dtype)
    dtype = dtype_of_draft(draft, target.dtype, platform=jax.default_backend())
    own = open_model(draft, dtype, target=theirs.checkpoint)
    require_same(theirs.tokenizer, own.tokenizer, target_name=theirs.source, draft_name=own.source)
    return theirs, own


def evaluate(
    settings: EvaluateSettings, source: str, *, job: CompletionJob, manifest: Manifest, path: Path
) -> dict[str, Any]:
    """The figures, also written to `path`; figures that are there already are not made again.

    Args:
      source: of the draft, see `Config.draft`.
      job, manifest: of the text, which has been written.

    Raises:
      InputError: a draft that cannot be used, or a damaged file.
    """
    target, draft = open_pair(job.target, source)
    shards, device = manifest.data["shards"], jax.devices()[0]
    made_of = {  # what decides whether figures are still right
        "draft_sha256": digest([draft.fingerprint, sorted(origin(draft.checkpoint.path).values())]),
        "texts_sha256": [entry["sha256"] for entry in shards],
        "dtype": job.target.dtype,
        "draft_dtype": draft.model.execution.kind,
        "apart": list(settings.apart),
        "ks": list(settings.ks),
        "budgets": list(settings.budgets),
        "repeats": settings.repeats,
        "timed_on": [surroundings(device.client), device.device_kind, cpu_affinity()],
    }
    with contextlib.suppress(InputError):  # it cannot be read
        known = read_json(path)
        if (known.get("format"), known.get("made_of")) == (FORMAT, made_of):
            return known
    with job.bar("loading weights", unit="bytes") as progress:
        models = (target.model, target.load(progress)), (draft.model, draft.load())
    plan = plan_texts(job)
    texts = [  # of a passage, too, only what follows it is judged
        dataclasses.replace(sample, prompt_length=len(job.prompts[completion.prompt].ids))
        for entry, shard in zip(shards, plan, strict=True)
        for sample, completion in zip(
            decode_texts(read_file(job.directory, entry)), shard, strict=True
        )
    ]
    size = target.tokenizer.size
    with job.bar("judging", unit="tokens") as progress:
        both = judge(*models, texts, tokens=size, longest=job.context, progress=progress)
    if not all(np.isfinite(one.overlap).all() for one in both):
        raise InputError(
            f"draft {source} gives logits that are no numbers; train it again, with a lower "
            "learning_rate, or name another"
        )
    with job.bar("forwards of every width", unit="rounds") as progress:
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
            "draft": source,
            "target": job.target.source,
            "environment": describe(),
            "steps": steps,
            **figures(job.prompts, judged, settings, steps),
        }
    )
    write_file(path, (json.dumps(document, indent=1) + "\n").encode(), durable=True)
    return document


def figures(
    prompts: Sequence[PromptIds],
    judged: Mapping[str, Sequence[Judged]],
    settings: EvaluateSettings,
    steps: StepCosts,
) -> dict[str, Any]:
    """Figures as `sets`, by name, and `mean`: over the sets that are not apart, equally weighted.

    Each set has `kinds`, which are empty where its prompts have none.

    Args:
      judged: by the names of `TEMPERATURES`, one for each prompt.
    """

    def judged_at(places: Sequence[int]) -> dict[str, list[Judged]]:
        return {of: [each[place] for place in places] for of, each in judged.items()}

    sets, measured = {}, []
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        own = [place for place, prompt in enumerate(prompts) if prompt.set == name]
        found, seen = _of_set(judged_at(own), settings)
        kinds = {
            kind: _of_set(judged_at([i for i in own if prompts[i].kind == kind]), settings)[0]
            for kind in dict.fromkeys(prompts[i].kind for i in own)
            if kind
        }
        if name not in settings.apart:
            measured.append(seen)
        sets[name] = {**found, "kinds": kinds, "predicted": _predicted(seen, settings, steps)}
    averaged = ("greedy_agreement", "overlap", "tokens_per_call")
    meant = [one for name, one in sets.items() if name not in settings.apart]
    mean = {name: mean_of([one[name] for one in meant]) for name in averaged}
    over_sets = {
        of: MeasuredDraft(**mean_of([vars(one[of]) for one in measured])) for of in TEMPERATURES
    }
    return {"sets": sets, "mean": {**mean, "predicted": _predicted(over_sets, settings, steps)}}


def _of_set(
    judged: Mapping[str, Sequence[Judged]], settings: EvaluateSettings
) -> tuple[dict[str, Any], dict[str, MeasuredDraft]]:
    """Figures of a set, and the measured draft that predictions need."""
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
        middle = walks[settings.ks[(len(settings.ks) - 1) // 2]]
        alone, r = power_law(middle, [one.rank for one in judged[of]], greedy=of == "greedy")
        by_length = tuple(walks[k].rates for k in walks)
        measured[of] = MeasuredDraft(by_length=by_length, alone=alone, r=r)
    overlaps = np.concatenate([one.overlap for one in judged["sampled"]])
    return {
        "prompts": len(judged["greedy"]),
        "tokens": {of: sum(map(len, own)) for of, own in chances.items()},
        "greedy_agreement": float(np.mean(np.concatenate(chances["greedy"]))),
        "overlap": float(np.mean(overlaps)),
        "tokens_per_call": per_call,
    }, measured


def mean_of(found: Sequence[Any]) -> Any:
    """The mean of dictionaries and tuples of one structure, number by number, without NaN."""

    def mean(*values: float) -> float:
        known = [value for value in values if not math.isnan(value)]
        return float(np.mean(known)) if known else math.nan

    return jax.tree.map(mean, *found)


def _predicted(
    measured: Mapping[str, MeasuredDraft], settings: EvaluateSettings, steps: StepCosts
) -> dict[str, Any]:
    """Best K and M by Theorem 7, and their speed-ups over AR for one text."""
    costs, alone, predicted = steps.costs, ar(steps.costs), {}
    for of, seen in measured.items():
        # One acceptance rate for all places, from the longest proposals.
        rate = float(np.clip(np.mean(seen.by_length[-1]), 0.01, 0.99))
        fan_out = GeometricFanOut(acceptance=rate, r=seen.r)
        plain, sd = best_sd(costs, seen, settings.ks)
        branching, ssd = best_ssd(
            costs, seen, fan_out, ks=settings.ks, budgets=settings.budgets, waits=(True, False)
        )
        predicted[of] = {
            "sd": {"k": plain.k, "speed_up": sd / alone},
            "ssd": {
                "k": branching.k,
                "budget": branching.budget,
                "speed_up": ssd / alone,
                "hit_rate": hit_rate(seen, fan_out, branching.k, branching.budget, "hit"),
            },
        }
    return predicted
