"""``read_once``: while a run starts, a folder is listed once and a dataset opened once.

Outside of it each call looks again, so that a session that stays open sees what changes.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_results: ContextVar[dict[Hashable, Any] | None] = ContextVar("_results", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Keep the results of :func:`once` until the end of ``with``, in this thread."""
    outer = _results.get()
    token = _results.set({} if outer is None else outer)
    try:
        yield
    finally:
        _results.reset(token)


def once(key: Hashable, read: Callable[[], T]) -> T:
    """What ``read`` returns, or returned for this key before inside of :func:`read_once`."""
    results = _results.get()
    if results is None:
        return read()
    if key not in results:
        results[key] = read()
    found: T = results[key]
    return found
