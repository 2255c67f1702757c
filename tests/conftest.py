"""Fixtures that several test folders share."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indices of this session's datasets, also for the processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENDM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokenizer knows the demo's prompts."""
    from opendm.cli import main

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    assert main(["tiny-checkpoint", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def served_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with layout and statistics, as training leaves one."""
    from policies import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def run_python():
    """Run a Python program in the repository and return the finished process."""

    def run(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
