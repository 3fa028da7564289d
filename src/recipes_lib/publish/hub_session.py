"""Hub requests with timeouts, retries and counts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, TypeVar

from huggingface_hub import get_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

T = TypeVar("T")

NO_ANSWER: type[Exception] = HfHubHTTPError.__bases__[0]
"""What the HTTP library under huggingface_hub raises when a connection fails or takes too long."""
SILENCE_SECONDS: Final = 120.0
"""Without a byte for so long, a request has failed. Upstream's client waits for ever."""
FIRST_PAUSE_SECONDS: Final = 2.0
LONGEST_PAUSE_SECONDS: Final = 300.0

_QUERY: Final = re.compile(r"\?[^\s'\"]*")
_FAILED: Final = (408, 425, 429)
"""Besides all from 500 on, statuses of requests that were not dealt with: too slow, too early, too often."""
_CONFLICTS: Final = (409, 412, 423)
"""Answers that another attempt may not meet: somebody else was writing."""


class GivenUpError(Exception):
    """The Hub has not taken something for longer than was waited; what it raised last is the cause."""


@dataclass(slots=True)
class RequestCount:
    """What became of the requests of this process.

    Attributes:
        num_sent: Requests that were made, those of redirects too.
        num_answered: Of them, those that were dealt with, were it by a refusal.
    """

    num_sent: int = 0
    num_answered: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def num_failed(self) -> int:
        """Requests without an answer that stands."""
        return self.num_sent - self.num_answered

    def install(self, silence_seconds: float = SILENCE_SECONDS) -> None:
        """Have every request of huggingface_hub counted, and end after a silence; for a process that only publishes."""
        session = get_session()
        kind, hooks = type(session), session.event_hooks
        watched: Any = {
            "request": [*hooks["request"], self._note_request, partial(_limit, silence_seconds)],
            "response": [*hooks["response"], self._note_response],
        }
        set_client_factory(lambda: kind(event_hooks=watched, follow_redirects=True))

    def _note_request(self, request: Any) -> None:
        with self._lock:
            self.num_sent += 1

    def _note_response(self, response: Any) -> None:
        if not _is_failure(response.status_code):
            with self._lock:
                self.num_answered += 1


@contextmanager
def limited(silence_seconds: float) -> Iterator[None]:
    """Let requests of this block fail after a silence; for a process that has other business with the Hub too."""
    session = get_session()
    before = session.event_hooks
    session.event_hooks = {**before, "request": [*before["request"], partial(_limit, silence_seconds)]}
    try:
        yield
    finally:
        session.event_hooks = before


def persist(attempt: Callable[[], T], may_wait: Callable[[float], bool], say: Callable[[str], None]) -> T:
    """Return what ``attempt`` returns, made again after growing pauses while the Hub fails in passing.

    Args:
        attempt: May be made any number of times.
        may_wait: Asked after each failure, with the seconds since the first attempt when the next would be made.
        say: Told of every failure that is followed by another attempt, in one line.

    Raises:
        GivenUpError: There shall be no other attempt.
        Exception: What another attempt would meet as well, as it was raised.
    """
    began, growing = time.monotonic(), FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except Exception as error:
            if not is_passing(error):
                raise
            seconds = max(read_pause(error) or 0.0, growing)
            if not may_wait(time.monotonic() - began + seconds):
                raise GivenUpError(describe(error)) from error
            say(f"{describe(error)}; tried again in {seconds:.0f} s")
        time.sleep(seconds)
        growing = min(2 * growing, LONGEST_PAUSE_SECONDS)


def is_passing(error: BaseException) -> bool:
    """Return whether another attempt may succeed: the Hub is busy, slow, broken or out of reach."""
    causes = list(_causes(error))
    statuses = [status for cause in causes if (status := read_status(cause)) is not None]
    if statuses:
        return _is_failure(statuses[0]) or statuses[0] in _CONFLICTS
    # What is gone or switched off stays so; an answer that is not JSON comes from whatever stands before the Hub.
    if any(isinstance(cause, FileNotFoundError | PermissionError | OfflineModeIsEnabled) for cause in causes):
        return False
    return any(isinstance(cause, NO_ANSWER | OSError | RuntimeError | json.JSONDecodeError) for cause in causes)


def read_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error reports."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def read_pause(error: BaseException) -> float | None:
    """Return the seconds that the Hub asks to be left alone for."""
    for cause in _causes(error):
        headers: Mapping[str, str] = getattr(getattr(cause, "response", None), "headers", {})
        limit = parse_ratelimit_headers(headers)
        if limit is not None and limit.remaining == 0 and read_status(cause) == 429:
            return float(limit.reset_in_seconds)
        if headers.get("Retry-After", "").strip().isdigit():
            return float(headers["Retry-After"])
    return None


def describe(error: BaseException) -> str:
    """Return in one line what the Hub answered, or else the first cause; without the signatures that URLs carry."""
    causes = list(_causes(error))
    told = next((cause for cause in causes if read_status(cause) is not None), causes[-1])
    words = next((line.strip() for line in str(told).splitlines() if line.strip()), "")
    return f"{type(told).__name__}: {_QUERY.sub('', words)}" if words else type(told).__name__


def _limit(seconds: float, request: Any) -> None:
    # Of the request, because upstream asks for no limit at all in some, as when it lists files, which overrules that of
    # the client (huggingface_hub 2.4, ``utils/_pagination.py``).
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)


def _is_failure(status: int) -> bool:
    return status in _FAILED or status >= 500


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
