"""The stages of a distillation, in order, each with a directory and a manifest of its own.

What was begun is gone on with, what is finished is not done again, and neither is mixed with
results of other settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssd_jax.checkpoints.checkpoint import Checkpoint, open_checkpoint
from ssd_jax.checkpoints.config_json import to_hf
from ssd_jax.checkpoints.orbax import origin
from ssd_jax.checkpoints.progress import Progress
from ssd_jax.checkpoints.shipped import DEFAULT, default_draft
from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.distill import prompts as prompts_stage
from ssd_jax.distill.generate import Bar, CompletionJob
from ssd_jax.distill.generate import run as generate
from ssd_jax.distill.manifest import (
    Manifest,
    check_same,
    clear_partial,
    file_digests,
    only_one,
    read_manifest,
    write_manifest,
)
from ssd_jax.distill.prompts import SPLITS, PromptFiles, read_prompts, write_prompts
from ssd_jax.distill.settings import (
    DistillSettings,
    DraftSettings,
    EvaluateSettings,
    TrainSettings,
    recorded,
)
from ssd_jax.distill.shards import read_shards
from ssd_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillTarget:
    """The target without its weights.

    Attributes:
      sha256: of its architecture, vocabulary, chat template (its source: what it writes may depend
        on the day), the tokens that begin and end a text, and the files that its weights came
        from. What `ssd-jax convert` wrote of a checkpoint has the checkpoint's own.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    sha256: str


def open_target(source: str, *, progress: Progress | None = None) -> DistillTarget:
    """Finds a target, downloads it if need be, and reads it once for its digest.

    Raises:
      InputError: see `open_checkpoint`.
    """
    checkpoint = open_checkpoint(source, progress=progress)
    tokenizer = checkpoint.load_tokenizer()
    tokens = [tokenizer.token(token) for token in range(tokenizer.size)]
    files = origin(checkpoint.path)
    template = tokenizer.chat_template
    # Jinja reads every line end as the same, and a copy of the file may have others.
    chat = None if template is None else template.replace("\r\n", "\n").replace("\r", "\n")
    ends = [tokenizer.bos_id, sorted(tokenizer.eos_ids)]
    identity = [to_hf(checkpoint.config), tokens, chat, ends, sorted(files.values())]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return DistillTarget(checkpoint=checkpoint, tokenizer=tokenizer, sha256=digest)


if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """What every stage needs.

    Attributes:
      work: directory of all stages.
      draft: source of the draft to evaluate; None is the trained one.
      bar: opens a progress bar.
      say: shows a line.
      show: shows a table.
    """

    settings: DistillSettings
    target: DistillTarget
    work: Path
    draft: str | None
    bar: Bar
    say: Callable[[str], None]
    show: Callable[[Table], None]

    def directory(self, stage: str) -> Path:
        """Where a stage keeps its files; drafts share the text, training is a draft's own."""
        return (self.own if stage == "train" else self.work) / stage

    def locked_for(self, stage: str) -> Path:
        """What one process at a time may work in; drafts of the same text can train together."""
        directory = self.own if stage == "train" else self.work
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    @property
    def own(self) -> Path:
        """Of what belongs to this configuration's draft alone."""
        return self.work / self.settings.name

    def finished(self, stage: str, asker: str) -> Manifest:
        """The manifest of an earlier stage.

        Raises:
          InputError: it is not finished.
        """
        manifest = read_manifest(self.directory(stage))
        if manifest is None or not manifest.finished:
            raise InputError(
                f"stage {asker} needs stage {stage}, which is not finished in {self.work}; run it "
                f"first, with --stage={stage} or without --stage"
            )
        return manifest


class Stopped(Exception):  # noqa: N818 (no error)
    """A stage ended early, as it was asked to; its text says why."""


class _Stage(NamedTuple):
    """`plan` says what a manifest would say now; `make` makes what is missing.

    There is no manifest before there is something to go on with: bad input binds nobody.
    """

    plan: Callable[[Distillation], Manifest]
    make: Callable[[Distillation, Manifest], None]


def run(
    settings: DistillSettings,
    work: Path,
    *,
    stage: str | None = None,
    draft: str | None = None,
    bar: Bar,
    say: Callable[[str], None],
    show: Callable[[Table], None],
) -> None:
    """Runs one stage or, without one, all of them.

    Args:
      settings: what to make.
      work: where; created if need be.
      stage: one of `STAGES`.
      draft: a draft to evaluate instead of the trained one; "default" is the one for mode ssd that
        comes with the package.
      bar: opens a progress bar: (label, *, unit).
      say: shows a line of what was done.
      show: shows a table of what was found.

    Raises:
      Stopped: a stage ended early, at a place from which it goes on.
      InputError: bad input, other settings than the ones a stage was begun with, or an earlier
        stage that is not finished; before anything that takes long.
    """
    chosen = [stage] if stage is not None else _stages_of(settings, draft)
    _check_stages(settings, chosen, draft)
    with bar("downloading", unit="bytes") as progress:
        target = open_target(settings.target.source, progress=progress)
    whole = Distillation(
        settings=settings, target=target, work=work, draft=draft, bar=bar, say=say, show=show
    )
    if draft == DEFAULT:
        whole = dataclasses.replace(whole, draft=str(default_draft(target, "ssd")))
    for name in chosen:
        _check_settings(whole, name)
    for name in chosen:
        with only_one(whole.locked_for(name)):
            _run(whole, name)


def _run(whole: Distillation, stage: str) -> None:
    directory = whole.directory(stage)
    planned = STAGES[stage].plan(whole)
    begun = read_manifest(directory)
    if begun is not None:
        check_same(directory, begun, planned)
    directory.mkdir(parents=True, exist_ok=True)
    STAGES[stage].make(whole, begun or planned)


def _stages_of(settings: DistillSettings, draft: str | None) -> list[str]:
    """Those that the configuration has all sections of.

    Raises:
      InputError: it is for evaluating alone, and no draft is given.
    """
    if not settings.prompts.train and settings.evaluate is not None and draft is None:
        raise InputError(
            f"config {settings.name} evaluates drafts and trains none; say which one, with "
            "--draft=SOURCE or --draft=default"
        )
    left_out = set()
    if not settings.prompts.train:
        left_out.add("generate")
    if settings.train is None:
        left_out.add("train")
    if settings.evaluate is None or (settings.train is None and draft is None):
        left_out.add("evaluate")
    return [name for name in STAGES if name not in left_out]


def _check_stages(settings: DistillSettings, chosen: list[str], draft: str | None) -> None:
    """Refuses stages that the configuration has nothing for."""
    if draft is not None and "evaluate" not in chosen:
        raise InputError(
            f"draft = {draft!r} is for stage evaluate, which is not asked for; leave it out, or "
            "give --stage=evaluate and a configuration with [evaluate]"
        )
    if "generate" in chosen and not settings.prompts.train:
        raise InputError(
            f"config {settings.name} lists no prompts to train on; stage generate needs them"
        )


def _check_settings(whole: Distillation, name: str) -> None:
    """Refuses other settings of any chosen stage, and an impossible draft, before the first one
    runs."""
    if name == "train":
        from ssd_jax.distill.training.loop import check

        check(*_train_sections(whole.settings), whole.target)
    if name == "evaluate":
        _evaluate_section(whole.settings)
        if whole.draft is not None:
            from ssd_jax.distill.evaluate import open_pair

            open_pair(whole.settings.target, whole.draft)
    begun = read_manifest(whole.directory(name))
    if begun is not None:
        inputs = {**begun.inputs, "target": whole.target.sha256}
        now = Manifest(stage=name, settings=_settings_of(whole.settings, name), inputs=inputs)
        check_same(whole.directory(name), begun, now)


def _settings_of(settings: DistillSettings, stage: str) -> dict:
    if stage == "prompts":
        return recorded("prompts", settings.prompts)
    if stage == "train":
        train, draft = _train_sections(settings)
        return recorded("train", train) | recorded("draft", draft)
    if stage == "evaluate":
        made_with = recorded("evaluate", _evaluate_section(settings))
        made_with |= {"generate.slots": settings.generate.slots}
        return recorded("target", settings.target) | made_with
    return recorded("target", settings.target) | recorded("generate", settings.generate)


def _plan_prompts(whole: Distillation) -> Manifest:
    files = PromptFiles(whole.settings.prompts, whole.settings.directory)
    inputs = {"target": whole.target.sha256, **files.digests()}
    settings = _settings_of(whole.settings, "prompts")
    return Manifest(stage="prompts", settings=settings, inputs=inputs)


def _make_prompts(whole: Distillation, manifest: Manifest) -> None:
    directory = whole.directory("prompts")
    if manifest.finished and _all_there(directory, manifest):
        whole.say(f"prompts, made before:\n{prompts_stage.report(manifest.data['counts'])}")
        return
    clear_partial(directory)
    files = PromptFiles(whole.settings.prompts, whole.settings.directory)
    prompts, counts = files.prepare(whole.target.tokenizer)
    data = {"counts": counts, "sha256": write_prompts(directory, prompts)}
    write_manifest(directory, dataclasses.replace(manifest, finished=True, data=data))
    whole.say(f"prompts:\n{prompts_stage.report(counts)}")


def _all_there(directory: Path, manifest: Manifest) -> bool:
    try:
        for split in SPLITS:
            read_prompts(directory, split, manifest.data["sha256"][split])
    except InputError:
        return False
    return True


def _plan_generate(whole: Distillation) -> Manifest:
    return _plan_of_prompts(whole, "generate", "train")


def _plan_of_prompts(whole: Distillation, stage: str, split: str) -> Manifest:
    """Of a stage that completes the prompts of a split."""
    made = whole.finished("prompts", stage)
    if made.inputs["target"] != whole.target.sha256:
        planned = dataclasses.replace(made, inputs={**made.inputs, "target": whole.target.sha256})
        check_same(whole.directory("prompts"), made, planned)
    return Manifest(
        stage=stage,
        settings=_settings_of(whole.settings, stage),
        inputs={"target": whole.target.sha256, "prompts": made.data["sha256"][split]},
    )


def _make_generate(whole: Distillation, manifest: Manifest) -> None:
    directory = whole.directory("generate")
    job = CompletionJob(
        target=whole.settings.target,
        settings=whole.settings.generate,
        prompts=read_prompts(whole.directory("prompts"), "train", manifest.inputs["prompts"]),
        vocabulary=whole.target.tokenizer.size,
        limit=whole.target.checkpoint.config.max_context,
        directory=directory,
        bar=whole.bar,
    )
    data = generate(job, manifest).data
    whole.say(
        f"generate: {data['completions']} completions, {data['generated']} tokens to learn of "
        f"{data['tokens']}, in {data['planned']} shards of {directory}"
    )


def _train_sections(settings: DistillSettings) -> tuple[TrainSettings, DraftSettings]:
    if settings.train is None or settings.draft is None:
        raise InputError(
            f"config {settings.name} has no [draft] and [train]; stage train needs them"
        )
    return settings.train, settings.draft


def _plan_train(whole: Distillation) -> Manifest:
    made = whole.finished("generate", "train")
    files = [
        [shard["sha256"], shard["scores"] and shard["scores"]["sha256"]]
        for shard in made.data["shards"]
    ]
    return Manifest(
        stage="train",
        settings=_settings_of(whole.settings, "train"),
        inputs={
            "target": whole.target.sha256,
            "generate": _digest(files),
        },
    )


def _make_train(whole: Distillation, manifest: Manifest) -> None:
    train, draft = _train_sections(whole.settings)
    directory = whole.directory("train")
    if manifest.finished and _has_draft(manifest, draft):
        whole.say(f"train, made before: {manifest.data['draft']}")
        return
    clear_partial(directory)
    from ssd_jax.distill.training.journal import picture_of, training_bar
    from ssd_jax.distill.training.loop import run as train_draft

    def begun() -> None:
        if read_manifest(directory) is None:
            write_manifest(directory, manifest)

    with training_bar() as progress:
        result = train_draft(
            train,
            draft,
            target=whole.target,
            samples=read_shards(whole.directory("generate"), target=whole.target.sha256),
            work=directory,
            progress=progress,
            saved=begun,
        )
    data = {
        "step": result.step,
        "store": draft.store,
        "held_out": result.held_out,
        "draft": str(result.draft),
        "files": file_digests(result.draft),
    }
    write_manifest(directory, dataclasses.replace(manifest, finished=result.finished, data=data))
    whole.say(f"train: step {result.step} of {train.steps}; the draft is {result.draft}")
    missing = picture_of(directory)
    if missing:
        whole.say(missing)
    if not result.finished:
        raise Stopped(result.stopped)


def _has_draft(manifest: Manifest, draft: DraftSettings) -> bool:
    """Whether the draft is there, as it was written."""
    files = file_digests(Path(manifest.data["draft"]))
    return manifest.data["store"] == draft.store and files == manifest.data.get("files")


def _evaluate_section(settings: DistillSettings) -> EvaluateSettings:
    if settings.evaluate is None:
        raise InputError(f"config {settings.name} has no [evaluate]; stage evaluate needs it")
    return settings.evaluate


def _plan_evaluate(whole: Distillation) -> Manifest:
    _draft_to_evaluate(whole)
    return _plan_of_prompts(whole, "evaluate", "held_out")


def _make_evaluate(whole: Distillation, manifest: Manifest) -> None:
    from ssd_jax.distill import evaluate
    from ssd_jax.distill.evaluation_table import evaluation_tables

    settings, directory = _evaluate_section(whole.settings), whole.directory("evaluate")
    held_out = read_prompts(whole.directory("prompts"), "held_out", manifest.inputs["prompts"])
    job = evaluate.text_job(
        settings,
        whole.settings.target,
        prompts=evaluate.choose(held_out, settings),
        slots=whole.settings.generate.slots,
        vocabulary=whole.target.tokenizer.size,
        limit=whole.target.checkpoint.config.max_context,
        directory=directory,
        bar=whole.bar,
    )
    written = evaluate.write_texts(job, manifest)
    draft, path = _draft_to_evaluate(whole), whole.own / EVALUATION
    if whole.draft is not None:
        place = Path(draft).expanduser()
        known_as = str(place.resolve()) if place.exists() else draft
        path = path.with_stem(f"{path.stem}-{_digest([known_as])[:12]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    evaluation = evaluate.Evaluation(
        settings=settings, draft=draft, job=job, manifest=written, path=path, bar=whole.bar
    )
    for table in evaluation_tables(evaluate.evaluate(evaluation)):
        whole.show(table)
    whole.say(f"evaluate: {path}")


def _draft_to_evaluate(whole: Distillation) -> str:
    """The given draft; else the trained one, as far as it has come.

    Raises:
      InputError: nothing is trained yet.
    """
    if whole.draft is not None:
        return whole.draft
    begun = read_manifest(whole.directory("train"))
    if begun is None or "draft" not in begun.data:
        raise InputError(
            f"stage evaluate needs a draft, and stage train has made none in {whole.own}; run it "
            "first, or give --draft=PATH"
        )
    return str(begun.data["draft"])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


EVALUATION = "evaluation.json"
"""Name of the figures of the trained draft."""

STAGES = {
    "prompts": _Stage(_plan_prompts, _make_prompts),
    "generate": _Stage(_plan_generate, _make_generate),
    "train": _Stage(_plan_train, _make_train),
    "evaluate": _Stage(_plan_evaluate, _make_evaluate),
}
