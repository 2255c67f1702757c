"""The console script ``opendm``: every command, over the same code as the playground files."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from opendm.errors import ConfigError, OpenDMError
from opendm.runtime import Runtime, configure_logging

DEFAULT_EXP = "playground/dm05_sft_demo.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        words = words[1:]
        return _guarded(lambda: train(words))
    arguments = _parser().parse_args(words)
    configure_logging("INFO", Runtime())
    return _guarded(lambda: arguments.run(arguments))


def train(words: list[str]) -> int:
    """``opendm train --exp FILE [flags]``: run an experiment file in this process."""
    parser = argparse.ArgumentParser(prog="opendm train", add_help=False, allow_abbrev=False)
    parser.add_argument("--exp", default=DEFAULT_EXP)
    known, flags = parser.parse_known_args(words)
    if not Path(known.exp).is_file():
        raise ConfigError(
            f"--exp {known.exp!r} does not exist; give the path of an experiment file, such as "
            f"{DEFAULT_EXP}"
        )
    saved = sys.argv
    sys.argv = [known.exp, *flags]
    try:
        runpy.run_path(known.exp, run_name="__main__")
    finally:
        sys.argv = saved
    return 0


def evaluate_open_loop(arguments: argparse.Namespace) -> int:
    """``opendm eval open-loop``: judge a checkpoint on episodes that it has not seen."""
    from opendm.eval.open_loop import evaluate_open_loop as evaluate

    evaluate(
        arguments.checkpoint,
        untrained=arguments.untrained,
        dataset_name=arguments.dataset_name,
        output=arguments.output or arguments.checkpoint,
        stride=arguments.stride,
    )
    return 0


def export(arguments: argparse.Namespace) -> int:
    """``opendm export``: a checkpoint of a run as a plain one, verified."""
    from opendm.trainer.export import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.output)
    print(f"wrote {arguments.output}")
    return 0


def tiny_checkpoint(arguments: argparse.Namespace) -> int:
    """``opendm tiny-checkpoint``: a small random checkpoint, made without a network."""
    from opendm.data.episodes import find_episodes, iterate_frames
    from opendm.dataset.register import dataset_fields
    from opendm.model.dm05.tiny import build_tiny_checkpoint

    episodes = find_episodes(dataset_fields(arguments.dataset_name)["jsonl_dir"])
    prompts = sorted({next(iterate_frames(episode))[1]["prompt"] for episode in episodes})
    build_tiny_checkpoint(arguments.output, prompts, seed=arguments.seed)
    print(f"wrote {arguments.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="opendm", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="command", required=True)
    commands.add_parser("train", help="train an experiment file", add_help=False)

    kinds = commands.add_parser("eval", help="judge a checkpoint").add_subparsers(
        metavar="kind", required=True
    )
    open_loop = kinds.add_parser("open-loop", help="action error on held-out episodes")
    open_loop.add_argument("--checkpoint", type=Path, required=True, help="trained checkpoint")
    open_loop.add_argument("--untrained", type=Path, required=True, help="where training started")
    open_loop.add_argument("--dataset-name", default="demo_heldout", help="held-out dataset")
    open_loop.add_argument("--output", type=Path, help="folder of report.html [the checkpoint]")
    open_loop.add_argument("--stride", type=int, default=4, help="evaluate every N-th frame")
    open_loop.set_defaults(run=evaluate_open_loop)

    plain = commands.add_parser("export", help="copy a checkpoint without its training state")
    plain.add_argument("--checkpoint", type=Path, required=True, help="checkpoint-N of a run")
    plain.add_argument("--output", type=Path, required=True, help="folder to make")
    plain.set_defaults(run=export)

    tiny = commands.add_parser("tiny-checkpoint", help="make a small random checkpoint")
    tiny.add_argument("--output", type=Path, default=Path("checkpoints/tiny"), help="folder")
    tiny.add_argument("--dataset-name", default="demo", help="whose prompts train the tokenizer")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights")
    tiny.set_defaults(run=tiny_checkpoint)
    return parser


def _guarded(command: "object") -> int:
    try:
        return command()  # type: ignore[operator]
    except OpenDMError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
