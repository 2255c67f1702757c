"""``check``: everything that can be known before a run starts, in one pass; and its short form."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from opendm.check.config import DM05CheckConfig
from opendm.check.contents import camera_row, count_left_out, leave_out, read_contents
from opendm.check.copies import SplitEpisodes, check_copies
from opendm.check.dims import check_dims
from opendm.check.episodes import check_episodes, check_index, check_samples, num_samples
from opendm.check.manifest import (
    DataFiles,
    FileSum,
    check_manifest,
    list_files,
    read_manifest,
    write_manifest,
)
from opendm.check.pictures import (
    REPLACED_CODES,
    PictureRules,
    as_replaced,
    check_pictures,
    sample_pictures,
)
from opendm.check.problem import Problem
from opendm.check.report import CheckReport
from opendm.check.statistics import check_statistics
from opendm.data.config import DM05DataConfig
from opendm.data.selection import Selection
from opendm.data.source import Source
from opendm.errors import ConfigError, DataError
from opendm.model.dm05.config import DM05ModelConfig
from opendm.trainer.config import DM05TrainerConfig

NUM_SAMPLED: Final = 8
"""Records whose pictures the short form looks at."""
SKIP_FLAG: Final = "--data-config.bad-records skip"


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """The parts of an experiment that the check reads."""

    data: DM05DataConfig
    model: DM05ModelConfig
    trainer: DM05TrainerConfig
    world_size: int = 1
    use_lora: bool = False

    @property
    def name(self) -> str:
        """Of the dataset, or of all that are mixed."""
        return " + ".join(part.dataset_name for part in self.data.parts())

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all processes."""
        trainer = self.trainer
        per_rank = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps
        return per_rank * self.world_size

    def parts(self) -> "list[CheckedRun]":
        """The same run with each of its datasets alone."""
        return [replace(self, data=part) for part in self.data.parts()]

    def info(self) -> dict[str, Any]:
        """The registration's fields, of one dataset."""
        return self.data._dataset_info()  # noqa: SLF001 - the public hook

    @property
    def skips(self) -> bool:
        """Whether bad records are left out and samples with bad pictures replaced."""
        return self.data.bad_records == "skip"

    def rules(self, *, decode: bool = False) -> PictureRules:
        """What is allowed for paths and pictures."""
        return PictureRules(
            self.info()["image_dir"],
            allow_outside_root=self.data.allow_outside_root,
            decode=decode,
        )


def check(run: CheckedRun, options: DM05CheckConfig) -> CheckReport:
    """Look at everything; nothing stops at the first problem.

    Raises:
        ConfigError: the model cannot be built with these flags, or the manifest is none.
    """
    report = CheckReport()
    sums = read_manifest(Path(options.manifest)) if options.manifest else None
    processor = _processor(run, report)
    splits = []
    for part in run.parts():
        selected = _check_files(part, options, report)
        if selected is not None:
            splits.append(split_episodes(part, selected))
            report.add(check_index(selected.source))
            report.add(check_selection(part, selected))
            if processor is not None:
                _check_tasks(part, selected, processor, report)
    report.add(check_copies(splits))
    if report.counts.get("samples"):
        report.add(check_samples(report.counts["samples"], run.global_batch, run.name))
        report.add(check_statistics(run.data, run.model.chunk_size))
    if sums is not None:
        _check_manifest(run, options, sums, report)
    if options.model and not report.errors:
        from opendm.check.batch import check_batch

        result = check_batch(run, processor)
        report.add(result.problems)
        if result.loss is not None:
            report.rows.append(("one batch", f"loss {result.loss:.4g}"))
            report.counts["loss"] = result.loss
    if options.write_manifest and not report.errors:
        files = _files(run, options)
        write_manifest(Path(options.write_manifest), files)
        report.rows.append(("manifest", f"{options.write_manifest} written: {_size(files)}"))
    return report


def check_briefly(run: CheckedRun) -> CheckReport:
    """The numbers, the statistics and the pictures of a few records; no file is read whole.

    Raises:
        DataError: a dataset cannot be opened.
    """
    report = CheckReport()
    total, splits = 0, []
    for part in run.parts():
        selected = part.data.open_source("train")
        splits.append(split_episodes(part, selected))
        total += int(num_samples(selected.source.index, selected.episodes).sum())
        report.add(check_selection(part, selected))
        uses = sample_pictures(sampled_records(selected), part.info()["image_keys"])
        problems = check_pictures(uses, part.rules())
        # a few bad pictures of a small set say little about the others
        num_files = max(len(uses), NUM_SAMPLED)
        report.add(as_replaced(problems, num_files) if part.skips else problems)
    report.add(check_copies(splits))
    report.add(check_samples(total, run.global_batch, run.name))
    report.add(check_statistics(run.data, run.model.chunk_size))
    return report


def check_selection(run: CheckedRun, selected: Selection) -> Iterator[Problem]:
    """Findings about the numbers of the episodes that are trained on."""
    index, name = selected.source.index, run.data.dataset_name
    yield from check_dims(index, name, run.info().get("state_desc"), run.data.action_mode)
    yield from check_episodes(index, selected.episodes, name, run.model.chunk_size)


def split_episodes(run: CheckedRun, selected: Selection) -> SplitEpisodes:
    """The episodes of both splits of one dataset."""
    data = run.data
    held_out: Sequence[int] = ()
    if data.val_episodes:
        with suppress(DataError):  # it has bad records, which are findings of their own
            held_out = data.open_source("val").episodes
    return SplitEpisodes(data.dataset_name, selected.source.index, selected.episodes, held_out)


def sampled_records(selected: Selection) -> list[tuple[str, dict[str, Any]]]:
    """A few records from all over the dataset, with their places."""
    source, episodes = selected.source, selected.episodes
    steps = np.linspace(0, len(episodes) - 1, min(NUM_SAMPLED, len(episodes))).astype(int)
    chosen = [episodes[step] for step in steps]
    frames = [len(source.index.episode_rows(episode)) // 2 for episode in chosen]
    pairs = zip(chosen, frames, strict=True)
    return [(source.location(e, f), source.record(e, f)) for e, f in pairs]


def _check_files(
    run: CheckedRun, options: DM05CheckConfig, report: CheckReport
) -> Selection | None:
    """All files; then the index, of what is usable."""
    info, name = run.info(), run.data.dataset_name
    root, skips = Path(info["jsonl_dir"]), run.skips
    contents = read_contents(info, name, run.rules(decode=options.decode), skip_bad=skips)
    selected, error = _open(run, has_errors=any(p.is_error for p in contents.problems))
    left_out = None
    if selected is not None:
        index = selected.source.index
        left_out = count_left_out(contents, root, index)
        if skips and contents.lines:
            leave_out(contents, root, index)
    num_bad = sum(problem.code in REPLACED_CODES for problem in contents.problems)
    if skips:
        contents.problems = as_replaced(contents.problems, contents.num_pictures)
    report.add(contents.problems)
    if error is not None and not report.errors:
        report.add([Problem(name, "dataset", str(error), code="dataset")])
    sizes = (
        f"{contents.num_episodes:,} episodes, {contents.num_frames:,} frames, "
        f"{contents.num_pictures:,} files of pictures"
    )
    report.rows += [
        (name, f"{contents.kind}: {sizes}"),
        ("cameras", camera_row(info["image_keys"], contents.cameras)),
    ]
    report.count(
        episodes=contents.num_episodes,
        frames=contents.num_frames,
        picture_files=contents.num_pictures,
        bad_pictures=num_bad,
    )
    if num_bad:
        verb = "replaces" if skips else "would replace"
        report.rows.append((SKIP_FLAG, f"{verb} the samples with {num_bad:,} bad pictures"))
    if selected is not None and left_out is not None:
        _count_usable(selected, left_out, report, skips=skips)
    return selected


def _check_manifest(
    run: CheckedRun, options: DM05CheckConfig, sums: Mapping[str, FileSum], report: CheckReport
) -> None:
    files = _files(run, options)
    problems = list(check_manifest(Path(options.manifest), sums, files))
    report.add(problems)
    verdict = f"{len(problems)} differences" if problems else "no difference"
    report.rows.append(("manifest", f"{verdict}; {_size(files)} in {files.base}"))


def _files(run: CheckedRun, options: DM05CheckConfig) -> DataFiles:
    infos = [part.info() for part in run.parts()]
    folders = [info[key] for info in infos for key in ("jsonl_dir", "image_dir")]
    return list_files(folders, leave_out=[options.manifest, options.write_manifest])


def _size(files: DataFiles) -> str:
    return f"{len(files.sizes):,} files, {files.num_bytes:,} bytes"


def _count_usable(
    selected: Selection, left_out: tuple[int, int], report: CheckReport, *, skips: bool
) -> None:
    samples = int(num_samples(selected.source.index, selected.episodes).sum())
    episodes, frames = left_out
    report.count(
        samples=samples,
        train_episodes=len(selected.episodes),
        left_out_episodes=episodes,
        left_out_frames=frames,
    )
    report.rows.append(("usable", f"{samples:,} samples of {len(selected.episodes):,} episodes"))
    if frames or episodes:
        verb = "leaves" if skips else "would leave"
        text = f"{verb} out {frames:,} frames of {episodes:,} episodes"
        report.rows.append((SKIP_FLAG, text))


def _open(run: CheckedRun, *, has_errors: bool) -> tuple[Selection | None, DataError | None]:
    """The training split; where records are bad, of what skip mode would leave."""
    error = None
    for data in (run.data, replace(run.data, bad_records="skip")):
        if has_errors and data.bad_records != "skip":
            continue  # it refuses the dataset, and says less than the scan has said
        try:
            return data.open_source("train"), None
        except (DataError, ConfigError) as refused:
            error = refused if isinstance(refused, DataError) else DataError(str(refused))
    return None, error


def _processor(run: CheckedRun, report: CheckReport) -> Any:
    """The processor of the checkpoint, where it can be read."""
    from opendm.data.processor import load_processor

    folder = str(run.model.processor_folder(use_lora=run.use_lora))
    try:
        return load_processor(folder)
    except ConfigError as error:
        report.add([Problem(folder, "processor", str(error), code="processor")])
        return None


def _check_tasks(run: CheckedRun, selected: Selection, processor: Any, report: CheckReport) -> None:
    """Tokens of the tasks."""
    from opendm.check.prompts import PromptShape, check_prompts

    info, data = run.info(), run.data
    shape = PromptShape(
        info["image_prompts"],
        selected.source.index.state.shape[1],
        data.n_bins,
        run.trainer.model_max_length,
        {key: info.get(key) for key in ("robot_type", "control_mode", "speed")},
        add_state=data.add_state,
        is_history=data.is_history,
    )
    problems, tokens = check_prompts(task_places(selected.source), processor, shape)
    report.add(problems)
    if tokens is not None:
        bars = ", ".join(
            f"{low}{f'-{high}' if high > low else ''}: {count}"
            for low, high, count in tokens.histogram()
        )
        length = tokens.lengths[tokens.longest]
        text = f"{bars} tasks; limit {tokens.limit}; longest {length}: {tokens.longest!r:.60}"
        report.rows.append(("tokens", text))
        report.count(tasks=len(tokens.lengths))
        report.counts["longest_prompt"] = max(length, report.counts.get("longest_prompt", 0))


def task_places(source: Source) -> dict[str, str]:
    """Every task and where its first frame stands."""
    index = source.index
    numbers, rows = np.unique(index.task, return_index=True)
    places = {}
    for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
        episode = int(np.searchsorted(index.starts, row, side="right")) - 1
        place = source.location(episode, row - int(index.starts[episode]))
        places[index.tasks[number]] = place
    return places
