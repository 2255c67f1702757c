"""Every call of a block that changes the file system, one by one: to log, to fail or to die at."""

import builtins
import io
import os
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch

CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove")


class Killed(BaseException):
    """Ends a process that is taken for killed."""


@contextmanager
def interposed(act):
    """Call ``act(call, target)`` before each call; an ``act`` that raises or exits prevents it.

    A write is two calls, so that a death between them leaves half of the bytes in the file.
    """
    originals = {(os, name): os.__dict__[name] for name in CALLS}
    originals |= {(module, "open"): io.open for module in (io, builtins)}
    originals[safetensors.torch, "serialize_file"] = safetensors.torch.serialize_file

    def wrapped(call, original):
        def interposer(target, *arguments, **options):
            act(call, target)
            return original(target, *arguments, **options)

        return interposer

    def opened(path, mode="r", *arguments, **options):
        if not set(mode) & set("wax+"):
            return originals[io, "open"](path, mode, *arguments, **options)
        act("open", path)
        file = originals[io, "open"](path, mode, *arguments, **options)
        write = file.write

        def write_in_two(data):
            half = len(data) // 2
            act("write", path)
            write(data[:half])
            file.flush()
            act("write", path)
            return half + write(data[half:])

        file.write = write_in_two
        return file

    def serialized(tensors, path, metadata=None):
        # it writes in Rust; in Python its write, too, can end halfway
        with opened(path, "wb") as file:
            file.write(safetensors.torch.serialize(tensors, metadata=metadata))

    replacements = {"open": opened, "serialize_file": serialized}
    for module, name in originals:
        replacement = replacements.get(name) or wrapped(name, originals[module, name])
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def logged(work):
    """The calls of ``work()`` as (call, absolute path), in order."""
    log = []

    def act(call, target):
        path = Path(f"/proc/self/fd/{target}").readlink() if call == "fsync" else Path(target)
        log.append((call, path))

    with interposed(act):
        work()
    return log


def fail_at(work, index, error, *, lasting):
    """Run ``work()``; the call of that index raises, and with ``lasting`` all later writing ones.

    Removing still works then, as on a full disk.
    """
    count = 0

    def act(call, target):
        nonlocal count
        count += 1
        is_removal = call in ("unlink", "rmdir", "remove")
        if count - 1 == index or (lasting and count > index and not is_removal):
            raise OSError(error, os.strerror(error), str(target))

    with interposed(act):
        return work()


def is_killed_at(work, index):
    """Run ``work()``, dead from its call of that index on; whether it got there.

    No call after that one takes effect, those of handlers and of clean-up included, so that the
    files are left as by a process that was killed there.
    """
    count = 0

    def act(call, target):
        nonlocal count
        count += 1
        if count > index:
            raise Killed

    try:
        with interposed(act):
            work()
    except Killed:
        return True
    return False
