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
from ssd_jax.checkpoints.tokenizers.tokenizer import require_tokens
from ssd_jax.devices.opening.models import OpenedModel, open_model
from ssd_jax.devices.programs.lookup import surroundings
from ssd_jax.errors import InputError
from ssd_jax.speculation.fan_out import GeometricFanOut
from ssd_jax.system.atomic import write_file
from ssd_jax.system.environment import cpu_affinity, describe
from ssd_jax.system.files import read_json
from ssd_jax.tools.bench.report import json_safe
from ssd_jax.tools.distill.completions import Completion, CompletionJob, Shards
from ssd_jax.tools.distill.generate import into_shards
from ssd_jax.tools.distill.manifest import Manifest
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.rounds import MeasuredDraft, power_law, walk
from ssd_jax.tools.distill.scoring import DraftFigures, judge
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
    selection = []
    for name in settings.sets or dict.fromkeys(prompt.set for prompt in prompts):
        candidates = [prompt for prompt in prompts if prompt.set == name]
        if not candidates:
            raise InputError(
                f"[evaluate] sets: no held-out prompt of {name!r} is left; choose other sets"
            )
        count = min(settings.prompts, len(candidates))
        selection += [candidates[i * len(candidates) // count] for i in range(count)]
    return selection


def plan_texts(job: CompletionJob) -> Shards:
    """Every prompt once at each temperature, by shard."""
    count = len(job.prompts)
    completions = [
        Completion(index=pass_index * count + prompt, prompt=prompt, temperature=temperature)
        for pass_index, temperature in enumerate(TEMPERATURES.values())
        for prompt in range(count)
    ]
    return into_shards(completions, job.prompts, job.settings)


def open_pair(target: TargetSettings, draft: str) -> tuple[OpenedModel, OpenedModel]:
    """Target and draft without their weights; the draft has its default dtype beside the target.

    Raises:
      InputError: it is no draft, or one of another target.
    """
    target_model = open_model(target.source, target.dtype)
    dtype = dtype_of_draft(draft, target.dtype, platform=jax.default_backend())
    draft_model = open_model(
        draft, dtype, target=target_model.checkpoint, tokens=target_model.tokenizer.size
    )
    require_tokens(
        target_model.tokenizer,
        draft_model.tokenizer,
        target_name=target_model.source,
        draft_name=draft_model.source,
    )
    return target_model, draft_model


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
        previous = read_json(path)
        if (previous.get("format"), previous.get("made_of")) == (FORMAT, made_of):
            return previous
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
        text_figures = judge(*models, texts, tokens=size, longest=job.context, progress=progress)
    if not all(np.isfinite(text.overlap).all() for text in text_figures):
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
    by_temperature = {
        name: text_figures[i * count : (i + 1) * count] for i, name in enumerate(TEMPERATURES)
    }
    document = json_safe(
        {
            "format": FORMAT,
            "made_of": made_of,
            "draft": source,
            "target": job.target.source,
            "environment": describe(),
            "steps": steps,
            **figures(job.prompts, by_temperature, settings, steps),
        }
    )
    write_file(path, (json.dumps(document, indent=1) + "\n").encode(), durable=True)
    return document


def figures(
    prompts: Sequence[PromptIds],
    by_temperature: Mapping[str, Sequence[DraftFigures]],
    settings: EvaluateSettings,
    steps: StepCosts,
) -> dict[str, Any]:
    """Figures as `sets`, by name, and `mean`: over the sets that are not apart, equally weighted.

    Each set has `kinds`, which are empty where its prompts have none.

    Args:
      by_temperature: by the names of `TEMPERATURES`, one for each prompt.
    """

    def figures_at(indices: Sequence[int]) -> dict[str, list[DraftFigures]]:
        return {name: [texts[i] for i in indices] for name, texts in by_temperature.items()}

    sets, measurements = {}, []
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        indices = [i for i, prompt in enumerate(prompts) if prompt.set == name]
        set_figures, measured = _set_figures(figures_at(indices), settings)
        kinds = {
            kind: _set_figures(
                figures_at([i for i in indices if prompts[i].kind == kind]), settings
            )[0]
            for kind in dict.fromkeys(prompts[i].kind for i in indices)
            if kind
        }
        if name not in settings.apart:
            measurements.append(measured)
        sets[name] = {
            **set_figures,
            "kinds": kinds,
            "predicted": _predict(measured, settings, steps),
        }
    metrics = ("greedy_agreement", "overlap", "tokens_per_call")
    averaged_sets = [entry for name, entry in sets.items() if name not in settings.apart]
    mean = {name: mean_of([entry[name] for entry in averaged_sets]) for name in metrics}
    over_sets = {
        name: MeasuredDraft(**mean_of([vars(entry[name]) for entry in measurements]))
        for name in TEMPERATURES
    }
    return {"sets": sets, "mean": {**mean, "predicted": _predict(over_sets, settings, steps)}}


def _set_figures(
    by_temperature: Mapping[str, Sequence[DraftFigures]], settings: EvaluateSettings
) -> tuple[dict[str, Any], dict[str, MeasuredDraft]]:
    """Figures of a set, and the measured draft that predictions need."""
    chances = {
        "greedy": [(text.rank == 0).astype(float) for text in by_temperature["greedy"]],
        "sampled": [text.acceptance.astype(float) for text in by_temperature["sampled"]],
    }
    per_call, measurements = {}, {}
    for temperature, text_chances in chances.items():
        walks = {k: walk(text_chances, k) for k in range(1, max(settings.ks) + 1)}
        per_call[temperature] = {k: walks[k].tokens_per_call for k in settings.ks}
        per_call[f"{temperature}_all_hits"] = {
            k: walk(text_chances, k, tail=max(k - 1, 1)).tokens_per_call for k in settings.ks
        }
        middle_rounds = walks[settings.ks[(len(settings.ks) - 1) // 2]]
        single_miss, r = power_law(
            middle_rounds,
            [text.rank for text in by_temperature[temperature]],
            greedy=temperature == "greedy",
        )
        by_length = tuple(walks[k].rates for k in walks)
        measurements[temperature] = MeasuredDraft(by_length=by_length, single_miss=single_miss, r=r)
    overlaps = np.concatenate([text.overlap for text in by_temperature["sampled"]])
    return {
        "prompts": len(by_temperature["greedy"]),
        "tokens": {
            temperature: sum(map(len, text_chances))
            for temperature, text_chances in chances.items()
        },
        "greedy_agreement": float(np.mean(np.concatenate(chances["greedy"]))),
        "overlap": float(np.mean(overlaps)),
        "tokens_per_call": per_call,
    }, measurements


def mean_of(trees: Sequence[Any]) -> Any:
    """The mean of dictionaries and tuples of one structure, number by number, without NaN."""

    def mean(*values: float) -> float:
        numbers = [value for value in values if not math.isnan(value)]
        return float(np.mean(numbers)) if numbers else math.nan

    return jax.tree.map(mean, *trees)


def _predict(
    measurements: Mapping[str, MeasuredDraft], settings: EvaluateSettings, steps: StepCosts
) -> dict[str, Any]:
    """Best K and M by Theorem 7, and their speed-ups over AR for one text."""
    costs, ar_speed, predictions = steps.costs, ar(steps.costs), {}
    for temperature, measured in measurements.items():
        # One acceptance rate for all places, from the longest proposals.
        rate = float(np.clip(np.mean(measured.by_length[-1]), 0.01, 0.99))
        fan_out = GeometricFanOut(acceptance=rate, r=measured.r)
        sd_plan, sd_speed = best_sd(costs, measured, settings.ks)
        ssd_plan, ssd_speed = best_ssd(
            costs, measured, fan_out, ks=settings.ks, budgets=settings.budgets, waits=(True, False)
        )
        predictions[temperature] = {
            "sd": {"k": sd_plan.k, "speed_up": sd_speed / ar_speed},
            "ssd": {
                "k": ssd_plan.k,
                "budget": ssd_plan.budget,
                "speed_up": ssd_speed / ar_speed,
                "hit_rate": hit_rate(measured, fan_out, ssd_plan.k, ssd_plan.budget, "hit"),
            },
        }
    return predictions
