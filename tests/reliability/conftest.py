"""A model for runs of seconds, whole runs to compare with, and the record of long forms."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from run_ranks import experiment, run_ranks

from opendm.exp.dm05_exp import run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers, 32 wide: kills and resumes do not ask for more."""
    from opendm.data.formats import dataset_info, open_source
    from opendm.model.dm05.tiny import build_processor, random_model, tiny_config

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    processor = build_processor(open_source(dataset_info("demo")["jsonl_dir"]).index.tasks)
    config = tiny_config(len(processor.tokenizer), num_layers=2, hidden_size=32)
    random_model(config).save_pretrained(folder, dtype=torch.float32)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def whole(tiny_checkpoint, tmp_path_factory):
    """Folders of runs of 6 steps that nobody disturbed, by number of ranks."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(experiment(tiny_checkpoint, folder / "1")) == 0
    exp = experiment(tiny_checkpoint, folder / "2", trainer_config__per_device_train_batch_size=2)
    assert run_ranks(exp, 2, folder) == [0, 0]
    return {1: folder / "1", 2: folder / "2"}


@pytest.fixture(scope="session")
def record() -> Callable[[str], None]:
    """Print a line, and append it with its moment to ``soak-<date>.md`` in the repository root."""

    def append(text: str) -> None:
        now = datetime.now(UTC)
        print(text)
        with (REPOSITORY / f"soak-{now:%Y-%m-%d}.md").open("a", encoding="utf-8") as file:
            file.write(f"- {now:%Y-%m-%d %H:%M} UTC: {text}\n")

    return append
