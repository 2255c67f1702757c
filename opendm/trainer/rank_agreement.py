"""Before training, the ranks compare what must be the same on all of them."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from opendm.errors import EngineError

KEY: Final = "opendm/agreement"
ROUND: Final = f"{KEY}/round"
POLL_S: Final = 0.05
SHOWN: Final = 40  # characters of a value in a message


def compare(facts: Mapping[str, str], timeout_s: float) -> None:
    """Check that every rank holds the same facts; a collective without tensors.

    It goes through the process group's store, so that a rank that never comes is named, and so that
    it needs no device.

    Args:
        facts: by name; a long one as its hash. The first that differs is named.
        timeout_s: how long to wait for the last rank.

    Raises:
        EngineError: the same line on all ranks, unless a rank did not come.
    """
    if not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public name
    # A second comparison must not read the first one's values: each rank counts its own calls.
    number = store.add(f"{ROUND}/{rank}", 1)
    keys = [f"{KEY}/{number}/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(list(facts.items())))
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):  # store.wait would keep a signal waiting, too
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise EngineError(
                f"{_ranks(missing)} did not come to compare the configuration within {timeout_s:g} "
                "s; see their output"
            )
        time.sleep(POLL_S)
    stated = [dict(json.loads(store.get(key))) for key in keys]
    if problem := first_difference(stated):
        raise EngineError(problem)


def first_difference(stated: Sequence[Mapping[str, str]]) -> str:
    """The line that names the first fact on which ranks differ, and those ranks; "" if none.

    Args:
        stated: what each rank said, in order of rank; in rank 0's order of names.
    """
    names = [*stated[0], *(name for facts in stated for name in facts if name not in stated[0])]
    for name in names:
        expected = stated[0].get(name, "nothing")
        others = [
            rank for rank, facts in enumerate(stated) if facts.get(name, "nothing") != expected
        ]
        if others:
            given = stated[others[0]].get(name, "nothing")
            who = "differ" if len(others) > 1 else "differs"
            return (
                f"{_ranks(others)} {who} from rank 0 in {name}: {_short(given)} instead of "
                f"{_short(expected)}; start every rank with the same flags, code and files"
            )
    return ""


def _short(value: str) -> str:
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def flat_facts(prefix: str, value: Any) -> dict[str, str]:
    """One fact per leaf of nested mappings, so that a difference is named by its path."""
    if isinstance(value, Mapping) and value:
        parts = [flat_facts(f"{prefix}.{key}", part) for key, part in value.items()]
        return {name: fact for part in parts for name, fact in part.items()}
    return {prefix: str(value)}


def code_facts(package: Path, libraries: Sequence[str]) -> dict[str, str]:
    """Hash of a package's source files, and versions of libraries.

    Args:
        package: folder of the package.
        libraries: names of distributions.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    code = {f"code of {package.name}": digest.hexdigest()}
    return code | {f"version of {name}": version(name) for name in libraries}


def parameter_facts(model: nn.Module) -> dict[str, str]:
    """Number and hash of the parameters' names, shapes and what is trained, in their order."""
    lines = [
        f"{name} {tuple(parameter.shape)} {parameter.requires_grad}"
        for name, parameter in model.named_parameters()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"number of parameters": str(len(lines)), "names or order of parameters": digest}


def file_fact(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
