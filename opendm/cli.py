"""The console script ``opendm``: every command, over the same code as the playground files."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from opendm.errors import ConfigError, OpenDMError
from opendm.runtime import Runtime, chosen_opengl, configure_logging

DEFAULT_EXP = "playground/dm05_sft_demo.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        words = words[1:]
        return _guarded(lambda: train(words))
    if words[:1] == ["check"]:
        return _guarded(lambda: check(words[1:]))
    if words[:1] == ["serve"]:
        return _guarded(lambda: serve(words[1:]))
    arguments = _parser().parse_args(words)
    configure_logging("INFO", Runtime())
    return _guarded(lambda: arguments.run(arguments))


def train(words: list[str]) -> int:
    """``opendm train --exp FILE [flags]``: run an experiment file in this process."""
    parser = argparse.ArgumentParser(prog="opendm train", add_help=False, allow_abbrev=False)
    parser.add_argument("--exp", default=DEFAULT_EXP)
    known, flags = parser.parse_known_args(words)
    return _run_experiment(known.exp, flags)


def check(words: list[str]) -> int:
    """``opendm check --exp FILE [flags of training]``: say what would fail in training."""
    parser = argparse.ArgumentParser(prog="opendm check", add_help=False, allow_abbrev=False)
    parser.add_argument("--exp", default=DEFAULT_EXP)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--manifest", metavar="PATH")
    parser.add_argument("--write-manifest", metavar="PATH")
    known, flags = parser.parse_known_args(words)
    flags += ["--task", "check"]
    flags += ["--check-config.json-path", known.json] if known.json else []
    flags += ["--check-config.no-model"] if known.no_model else []
    flags += ["--check-config.decode"] if known.decode else []
    flags += ["--check-config.strict"] if known.strict else []
    flags += ["--check-config.manifest", known.manifest] if known.manifest else []
    write = known.write_manifest
    flags += ["--check-config.write-manifest", write] if write else []
    return _run_experiment(known.exp, flags)


def _run_experiment(file: str, flags: list[str]) -> int:
    if not Path(file).is_file():
        raise ConfigError(
            f"--exp {file!r} does not exist; give the path of an experiment file, such as "
            f"{DEFAULT_EXP}"
        )
    saved = sys.argv
    sys.argv = [file, *flags]
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv = saved
    return 0


def evaluate_open_loop(arguments: argparse.Namespace) -> int:
    """``opendm eval open-loop``: judge a checkpoint on episodes that it has not seen."""
    from opendm.eval.open_loop import evaluate_open_loop as evaluate

    evaluate(
        *arguments.checkpoint,
        untrained=arguments.untrained,
        dataset_name=arguments.dataset_name,
        output=arguments.output or arguments.checkpoint[-1],
        stride=arguments.stride,
    )
    return 0


def evaluate_metaworld(arguments: argparse.Namespace) -> int:
    """``opendm eval metaworld``: let checkpoints act on starts that nobody has seen."""
    from opendm.eval.metaworld.evaluate import Plan, evaluate_metaworld

    plan = Plan(
        checkpoints=arguments.checkpoint,
        tasks=list(dict.fromkeys(arguments.task)),
        num_episodes=arguments.episodes,
        seed=arguments.seed,
        actions_per_query=arguments.actions_per_query,
        num_flow_steps=arguments.flow_steps,
        untrained=arguments.untrained,
        demonstrations=arguments.demonstrations,
        use_controls=not arguments.no_controls,
        gl=arguments.gl or chosen_opengl() or "osmesa",
        num_processes=arguments.processes,
    )
    evaluate_metaworld(plan, arguments.output or arguments.checkpoint[-1])
    return 0


def export(arguments: argparse.Namespace) -> int:
    """``opendm export``: a checkpoint of a run as a plain one, verified."""
    from opendm.trainer.export import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.output)
    print(f"wrote {arguments.output}")
    return 0


def merge(arguments: argparse.Namespace) -> int:
    """``opendm merge``: an adapter and its base as a plain checkpoint."""
    from opendm.model.dm05.lora_merge import merge_adapter

    merge_adapter(arguments.adapter, arguments.output, arguments.base)
    print(f"wrote {arguments.output}")
    return 0


def tiny_checkpoint(arguments: argparse.Namespace) -> int:
    """``opendm tiny-checkpoint``: a small random checkpoint, made without a network."""
    from opendm.data.formats import dataset_info, open_source
    from opendm.model.dm05.tiny import SIZES, build_tiny_checkpoint

    outside = arguments.allow_outside_root
    info = dataset_info(arguments.dataset_name, allow_outside_root=outside)
    source = open_source(info["jsonl_dir"], columns=info.get("columns"), allow_outside_root=outside)
    prompts = sorted(source.index.tasks)
    words = [f"{label} image:" for label in info["image_prompts"]] + [
        f"Robot: {info.get('robot_type') or 'Robot'}\nOverall speed: 0.5\nTask: ",
        "Overall States: 0 1",
        "States: 0",
    ]
    build_tiny_checkpoint(
        arguments.output,
        prompts,
        seed=arguments.seed,
        size=SIZES[arguments.size],
        # the demo's tokenizer stays what its published figures were made with
        more_text=[] if arguments.size == "demo" else words,
    )
    print(f"wrote {arguments.output}")
    return 0


def serve(words: list[str]) -> int:
    """``opendm serve --checkpoint DIR [flags]``: serve a checkpoint; flags as of a training run."""
    from opendm.exp.dm05_exp import DM05Exp, parse, run

    parser = argparse.ArgumentParser(prog="opendm serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path)
    known, flags = parser.parse_known_args(words)
    wants_help = "--help" in flags or "-h" in flags
    if known.checkpoint is None and not wants_help:
        raise ConfigError("opendm serve needs --checkpoint DIR, the folder of a trained checkpoint")
    exp = parse(DM05Exp, flags)
    exp.task, exp.model_config.model_name_or_path = "inference", str(known.checkpoint)
    return run(exp)


def stats(arguments: argparse.Namespace) -> int:
    """``opendm stats show|compute|diff``: normalisation statistics as text."""
    from opendm.constants.robot import ActionMode
    from opendm.eval.stats_table import run_compute, run_diff, run_show

    root = arguments.norm_stats_root
    if arguments.action == "show":
        return run_show(arguments.target, root)
    if arguments.action == "diff":
        return run_diff(arguments.left, arguments.right, root)
    return run_compute(
        arguments.dataset_name,
        ActionMode[arguments.action_mode.upper()],
        arguments.chunk_size,
        norm_stats_root=root,
        compute_norm_stats_max_batches=arguments.max_batches,
    )


def _add_stats(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    actions = commands.add_parser("stats", help="normalisation statistics").add_subparsers(
        metavar="action", required=True, dest="action"
    )
    show = actions.add_parser("show", help="a table per robot, with what is odd in it")
    show.add_argument("target", help="a file, a checkpoint's folder, or a dataset")
    compute = actions.add_parser("compute", help="compute and show those of a dataset")
    compute.add_argument("--dataset-name", required=True, help="as --data-config.dataset-name")
    compute.add_argument("--action-mode", choices=("relative", "absolute"), default="relative")
    compute.add_argument("--chunk-size", type=int, default=50, help="actions of a chunk")
    compute.add_argument("--max-batches", type=int, help="count this many batches of 128 samples")
    difference = actions.add_parser("diff", help="what differs; exit code 1 if anything does")
    difference.add_argument("left", help="as of show")
    difference.add_argument("right")
    for action in (show, compute, difference):
        action.add_argument("--norm-stats-root", default="./norm_stats", help="folder of the files")
        action.set_defaults(run=stats)


def view(arguments: argparse.Namespace) -> int:
    """``opendm data view``: a dataset as one HTML page."""
    from opendm.constants.robot import ActionMode
    from opendm.eval.data_view import view_dataset

    mode = arguments.action_mode and ActionMode[arguments.action_mode.upper()]
    view_dataset(
        arguments.dataset,
        arguments.output,
        chunk_size=arguments.chunk_size,
        action_mode=mode,
        allow_outside_root=arguments.allow_outside_root,
    )
    print(f"wrote {arguments.output}")
    return 0


def _add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    actions = commands.add_parser("data", help="look at a dataset").add_subparsers(
        metavar="action", required=True
    )
    page = actions.add_parser("view", help="one HTML page with pictures, curves and histograms")
    page.add_argument("dataset", help="as --data-config.dataset-name")
    page.add_argument("--output", type=Path, required=True, help="the HTML file")
    page.add_argument("--chunk-size", type=int, default=50, help="actions of a chunk")
    page.add_argument("--action-mode", choices=("relative", "absolute"), help="[as registered]")
    _add_allow_outside(page)
    page.set_defaults(run=view)


def _add_allow_outside(parser: argparse.ArgumentParser) -> None:
    text = "allow image paths and links that leave the dataset's folders"
    parser.add_argument("--allow-outside-root", action="store_true", help=text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="opendm", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="command", required=True)
    commands.add_parser("train", help="train an experiment file", add_help=False)

    commands.add_parser("check", help="say what would fail in training", add_help=False)
    commands.add_parser("serve", help="serve a checkpoint over HTTP", add_help=False)

    kinds = commands.add_parser("eval", help="judge a checkpoint").add_subparsers(
        metavar="kind", required=True
    )
    _add_open_loop(kinds.add_parser("open-loop", help="action error on held-out episodes"))

    _add_stats(commands)
    _add_data(commands)

    _add_metaworld(kinds.add_parser("metaworld", help="success in the simulator, with controls"))

    plain = commands.add_parser("export", help="copy a checkpoint without its training state")
    plain.add_argument("--checkpoint", type=Path, required=True, help="checkpoint-N of a run")
    plain.add_argument("--output", type=Path, required=True, help="folder to make")
    plain.set_defaults(run=export)

    merged = commands.add_parser("merge", help="make a full checkpoint of a LoRA adapter")
    merged.add_argument("--adapter", type=Path, required=True, help="folder of the adapter")
    merged.add_argument("--output", type=Path, required=True, help="folder to make")
    merged.add_argument("--base", type=Path, help="where its base is, if it was moved")
    merged.set_defaults(run=merge)

    tiny = commands.add_parser("tiny-checkpoint", help="make a small random checkpoint")
    tiny.add_argument("--output", type=Path, default=Path("checkpoints/tiny"), help="folder")
    tiny.add_argument("--dataset-name", default="demo", help="whose prompts train the tokenizer")
    tiny.add_argument("--size", choices=("demo", "sim"), default="demo", help="of its pictures")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights")
    _add_allow_outside(tiny)
    tiny.set_defaults(run=tiny_checkpoint)
    return parser


def _add_open_loop(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        nargs="+",
        required=True,
        help="trained checkpoint; of several the last is judged, the others stand beside it",
    )
    add("--untrained", type=Path, required=True, help="where training started")
    add("--dataset-name", default="demo_heldout", help="held-out dataset")
    add("--output", type=Path, help="folder of report.html [the last checkpoint]")
    add("--stride", type=int, default=4, help="evaluate every N-th frame")
    parser.set_defaults(run=evaluate_open_loop)


def _add_metaworld(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        nargs="+",
        required=True,
        help="the last one is judged, earlier ones show how success grew",
    )
    add("--task", nargs="+", required=True, help="names of Meta-World, such as drawer-open-v3")
    add("--episodes", type=int, default=100, help="starts per task and condition")
    add("--seed", type=int, default=50_000, help="of the first start")
    add("--actions-per-query", type=int, default=8, help="actions executed of each chunk")
    add("--flow-steps", type=int, default=10, help="integration steps of a query")
    add("--untrained", type=Path, help="where training started [what the run's record names]")
    add("--demonstrations", type=Path, help="training episodes [those of the run's record]")
    add("--no-controls", action="store_true", help="measure the checkpoints alone")
    add(
        "--processes",
        type=int,
        default=min(8, len(os.sched_getaffinity(0))),
        help="share the episodes [cores, at most 8]",
    )
    add("--gl", choices=("osmesa", "egl"), help="OpenGL backend [MUJOCO_GL, else osmesa]")
    add("--output", type=Path, help="folder of metaworld.html [the last checkpoint]")
    parser.set_defaults(run=evaluate_metaworld)


def _guarded(command: "object") -> int:
    try:
        return command()  # type: ignore[operator]
    except OpenDMError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
