"""Client of OpenAI-compatible chat endpoints: concurrent requests with retries, a rate limit, and token counts.

Judges and ``recipes synthesize`` use this client; benchmarks use that of lm-eval (``engines.py``).
"""

from __future__ import annotations

import http.client
import itertools
import json
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from recipes_lib.errors import ConfigError, Problem, escape_controls
from recipes_lib.processes import read_api_key
from recipes_lib.stopping import STOP

Message = Mapping[str, Any]
Chat = Sequence[Message]

MAX_WAIT: Final = 60.0
"""Longest pause before another attempt, in seconds, unless the server asks for a longer one."""
FEWEST_REFUSALS: Final = 8
"""Refused requests, without an answered one, from which on the configuration is wrong, and not a single request."""
_MAX_RETRY_AFTER: Final = 600.0
"""Longest wait that a server can ask for, in seconds."""
_MAX_OUTAGE: Final = 600.0
"""Time for which requests to a server that has answered before are repeated, in seconds: a restart takes minutes."""
_POLL_SECONDS: Final = 0.5
"""Time between two polls for a stop request while requests are answered, in seconds."""
_MAX_REPLY: Final = 1 << 26
"""Size of the longest response, in bytes."""
QUIET_SECONDS: Final = 300.0
"""Shortest time between two warnings that requests to an endpoint are repeated."""
_TIMEOUTS_PER_ATTEMPT: Final = 10
"""Longest duration of an attempt, as a multiple of ``Endpoint.timeout``."""
_THIS_REQUEST: Final = (400, 413, 422)
"""Status codes that concern one request, such as too long a chat or a content filter."""
_REPEATED: Final = (408, 409, 425, 429)
"""Status codes below 500 of requests that may succeed later."""
RESUME_REMEDY: Final = "start it or wait, and run the same command to resume"
_ENDS: Final = ("stop", "eos", "eos_token", "stop_sequence", None)
"""Values of ``finish_reason`` for a complete answer; TGI has ``eos_token`` and ``stop_sequence``."""
# ValueError: invalid JSON; OverflowError: an infinite number of tokens; RecursionError: deeply nested JSON.
_FAILURES: Final = (OSError, http.client.HTTPException, ValueError, OverflowError, RecursionError)
"""Exceptions of an attempt that is repeated: a failed connection, a timeout, an incomplete or invalid response."""


THINKS: Final = "<think>"
ENDS_THINKING: Final = "</think>"
"""Delimiters of reasoning in answers."""


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Split an answer into reasoning, ``None`` if absent, and content.

    Some templates write the opening delimiter in the prompt, so that an answer may contain only the closing one.
    Reasoning that was opened and not closed, as at the length limit, has no content.
    """
    before, mark, after = text.partition(ENDS_THINKING)
    if not mark and not text.lstrip().startswith(THINKS):
        return None, text
    # Remove only the first opening delimiter: a model may write about the tag in its reasoning.
    return before.replace(THINKS, "", 1).strip(), after.strip()


def join_reasoning(thought: str | None, said: str) -> str:
    """Return an answer with its reasoning, in the usual template format."""
    return f"{THINKS}\n{thought}\n{ENDS_THINKING}\n\n{said}" if thought else said


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a chat.

    Attributes:
        text: Text without special tokens; empty after an error.
        is_finished: Whether the model ended the answer, rather than the length limit.
        num_prompt_tokens: Tokens of the chat; 0 if unknown.
        num_tokens: Tokens of the answer; 0 if unknown.
        error: Reason for a missing answer; ``None`` if there is an answer.
    """

    text: str
    is_finished: bool
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    @property
    def shown(self) -> str:
        """The text, or the reason of a missing one."""
        return self.text if self.error is None else f"error: {self.error}"


class UnansweredError(ConfigError):
    """The endpoint failed; ``replies`` are those that it gave before, for which it may charge."""

    replies: Sequence[Reply] = ()


class Answerer(Protocol):
    """Interface of a model that answers chats: local, by an engine such as vLLM, or behind an endpoint."""

    def answer(self, chats: Sequence[Chat], numbers: Sequence[int]) -> list[Reply]:
        """Answer each chat once, in order; a chat and its number determine the answer of a reproducible engine."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the answers besides the chats, as JSON values."""


@dataclass
class _Pace:
    """Evenly spaced times of requests, over all calls."""

    next: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, interval: float) -> float:
        """Return the seconds until the next free time, which is then taken."""
        # Times are assigned under the lock, and awaited without it, so that threads wait concurrently.
        with self.lock:
            now = time.monotonic()
            begin = max(now, self.next)
            self.next = begin + interval
        return begin - now


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible chat endpoint, which is sent several requests at a time.

    The API key is the environment variable ``OPENAI_API_KEY``; it is sent to this address only, never through a
    redirect, and masked in error messages.

    Attributes:
        base_url: Address, ``http://HOST/v1`` or ``http://HOST/v1/chat/completions``.
        model: Name of the model at the endpoint.
        max_new_tokens: Longest answer, in tokens.
        temperature: Sampling temperature.
        seed: Seed from which, together with the number of a chat, the ``seed`` of a request is computed.
        num_concurrent: Requests at a time.
        requests_per_minute: Rate limit, evenly spaced; ``None`` for no limit.
        timeout: Seconds without receiving data after which an attempt fails; an attempt fails after ten times this
            duration in any case.
        num_attempts: Attempts per request; failed connections, 408, 409, 425, 429 and 5xx are repeated after 1, 2, 4,
            ... seconds, or later if the server's ``Retry-After`` says so; more of them, for ten minutes, once the
            endpoint has answered.
        request: Additional fields of each request; ``None`` removes a field that is sent by default.
        tally: Number of answered (``True``) and refused (``False``) requests of this process.
        pace: Time of the next request.
        quiet: Time of the next warning that requests are repeated.

    Source: ``tests/evaluation/test_endpoint.py``.
    """

    base_url: str
    model: str
    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    num_concurrent: int = 8
    requests_per_minute: float | None = None
    timeout: float = 300.0
    num_attempts: int = 6
    request: Mapping[str, Any] = field(default_factory=dict)
    tally: Counter[bool] = field(default_factory=Counter, compare=False)
    pace: _Pace = field(default_factory=_Pace, compare=False, repr=False)
    quiet: _Pace = field(default_factory=_Pace, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Verify the attributes, which come from flags, configurations and reward functions.

        Raises:
            ConfigError: Attributes are out of range, or ``base_url`` is not the address of a chat endpoint.
        """
        lowest = {"max_new_tokens": 1, "num_concurrent": 1, "num_attempts": 1, "temperature": 0}
        problems = [
            Problem(name, f"is {getattr(self, name)}", f"write {low} or more")
            for name, low in lowest.items()
            if not getattr(self, name) >= low  # Also true for NaN.
        ]
        problems += [
            Problem(name, f"is {value}", "write a number above 0")
            for name in ("requests_per_minute", "timeout")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if not isinstance(self.request, Mapping):
            problems.append(Problem("request", f"is {self.request!r:.60}", 'write an object: {"top_p": 0.9}'))
        is_address = False
        with suppress(ValueError):  # Of an unfinished IPv6 address.
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        if not is_address:
            remedy = "write http://HOST:PORT/v1"
            problems.append(Problem("base_url", f"{self.base_url[:120]!r} is no address of an endpoint", remedy))
        elif self.url.endswith("/completions/chat/completions"):
            remedy = "write the address of its chat endpoint, .../v1 or .../v1/chat/completions"
            problems.append(Problem("base_url", f"{self.base_url} completes texts, and does not answer chats", remedy))
        if problems:
            raise ConfigError(*problems)

    @property
    def url(self) -> str:
        """Address of the requests."""
        url = self.base_url.rstrip("/")
        return url if url.endswith("/chat/completions") else f"{url}/chat/completions"

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the answers; without the address, which changes when a server restarts."""
        names = ("model", "max_new_tokens", "temperature", "seed")
        return {name: getattr(self, name) for name in names} | {"request": dict(self.request)}

    def answer(self, chats: Sequence[Chat], numbers: Sequence[int]) -> list[Reply]:
        """Answer each chat once; a request that the endpoint refuses gives a reply with ``error``.

        Raises:
            UnansweredError: The endpoint cannot be reached, does not know the model or the key, or returns invalid
                responses.
            StopPendingError: There is a stop request during training: a pause may be longer than the grace time.
            ConfigError: It has refused at least ``FEWEST_REFUSALS`` requests and answered none.
        """
        connection, jobs = _Connection(self), deque(enumerate(zip(chats, numbers, strict=True)))
        found: dict[int, Reply] = {}
        failures: list[Exception] = []

        def work() -> None:
            while not connection.is_stopped.is_set():
                # `deque.popleft` is atomic: no lock is needed.
                try:
                    at, (chat, number) = jobs.popleft()
                except IndexError:
                    return
                try:
                    found[at] = connection.ask(chat, number)
                    connection.has_answered |= found[at].error is None
                except Exception as error:  # Raised again in the caller's thread.
                    failures.append(error)
                    connection.is_stopped.set()

        # Daemon threads instead of a pool, whose threads would keep an interrupted process alive until they end.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.num_concurrent, len(jobs)))]
        for thread in threads:
            thread.start()
        try:
            _wait_for(threads)
        finally:
            # Also after a stop request or Ctrl-C, so that no thread starts another request.
            connection.is_stopped.set()
        if failures:
            if isinstance(failures[0], UnansweredError):
                failures[0].replies = list(found.values())
            raise failures[0]
        replies = [found[at] for at in range(len(chats))]
        self.tally.update(reply.error is None for reply in replies)
        # Over all calls of this process: a call may have a single chat.
        if not self.tally[True] and self.tally[False] >= FEWEST_REFUSALS:
            raise ConfigError(Problem("base_url", f"{self.url} refused every request: {replies[0].error}", _REMEDY))
        return replies


def _wait_for(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            STOP.raise_if_pending()


_REMEDY: Final = (
    "check the address, and that it serves this model; or change the fields of requests: `request_fields` or "
    "`judge_fields` of a synthesis, --request or --judge_request of a comparison, `request` of a judge as reward"
)


class _Connection:
    """Connection of one call of ``Endpoint.answer``, shared by its threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.is_stopped = endpoint, threading.Event()
        self.has_answered = endpoint.tally[True] > 0
        self._url, self._key = endpoint.url, read_key()
        self._open: Callable[..., Any] = urllib.request.build_opener(_NoRedirects).open

    def ask(self, chat: Chat, number: int) -> Reply:
        """Return the answer to a chat.

        Raises:
            UnansweredError: As ``Endpoint.answer``.
        """
        endpoint, reason, remedy = self.endpoint, "", RESUME_REMEDY
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [dict(message) for message in chat],
            "max_tokens": endpoint.max_new_tokens,
            "temperature": endpoint.temperature,
            # With this prime stride, runs with different seeds share no request below a million chats. At most 31 bits.
            "seed": (endpoint.seed * 1_000_003 + number) % (1 << 31),
            **endpoint.request,
        }
        # `None` removes a field: newer OpenAI models refuse `max_tokens`.
        sent = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        began = time.monotonic()
        for attempt in itertools.count(1):
            # A pause ends early when another request has failed for good.
            if endpoint.requests_per_minute and self.pause(endpoint.pace.take(60 / endpoint.requests_per_minute)):
                break
            wait = min(2.0 ** (attempt - 1), MAX_WAIT)
            try:
                return _read_reply(self._post(sent))
            except urllib.error.HTTPError as error:
                body_start = b""  # An error page may have megabytes.
                with suppress(*_FAILURES):  # The status code is enough if the body cannot be read.
                    body_start = self._read_body(error, 2000)
                said = body_start.decode(errors="replace") or str(error.reason)
                if place := error.headers.get("Location"):
                    said = f"a redirect to {place}"
                reason = f"{error.code} {explain(said, self._key)}"
                if error.code in _THIS_REQUEST:
                    return Reply("", is_finished=False, error=reason)
                if not _is_temporary(error.code):
                    remedy = choose_remedy(error.code, _REMEDY)
                    raise UnansweredError(Problem("base_url", f"{self._url} returned {reason}", remedy)) from None
                wait, remedy = read_wait(error.headers.get("Retry-After"), wait), RESUME_REMEDY
            except _FAILURES as error:
                reason = explain(error, self._key)
                remedy = _choose_failure_remedy(error)
            # A server that has answered before may be restarting; an address that never has is more likely wrong.
            outage = _MAX_OUTAGE if self.has_answered else 0.0
            if attempt >= endpoint.num_attempts and time.monotonic() >= began + outage:
                break
            self._warn(f"{reason}; attempt {attempt + 1} in {wait:.0f} s")
            if self.pause(wait):
                break
        found = f"{self._url} had no answer after {attempt} attempts: {reason}"
        raise UnansweredError(Problem("base_url", found, remedy))

    def _warn(self, text: str) -> None:
        """Say that a request is repeated, unless another one was a short time ago."""
        with self.endpoint.quiet.lock:
            if time.monotonic() < self.endpoint.quiet.next:
                return
            self.endpoint.quiet.next = time.monotonic() + QUIET_SECONDS
        limit = f"each waits {self.endpoint.timeout:.0f} s for data"
        sys.stderr.write(f"warning: a request to {self._url} failed: {text}, {limit}\n")

    def _post(self, sent: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data=sent, headers=headers)
        with self._open(request, timeout=self.endpoint.timeout) as response:
            # One byte more than allowed, to recognise a response that is too long.
            received = self._read_body(response, _MAX_REPLY + 1)
        if len(received) > _MAX_REPLY:
            raise ValueError(f"a reply of more than {_MAX_REPLY >> 20} MiB")
        if response.length:  # Bytes that are missing: a bounded read does not raise for them.
            raise http.client.IncompleteRead(received, response.length)
        return json.loads(received)

    def _read_body(self, response: Any, size: int) -> bytes:
        """Read at most ``size`` bytes.

        Raises:
            TimeoutError: The response takes too long, even though data arrive.
        """
        received, deadline = bytearray(), time.monotonic() + _TIMEOUTS_PER_ATTEMPT * self.endpoint.timeout
        # `read1` returns what has arrived. The socket's timeout starts again with every byte, so that `read` would
        # never return from a server that keeps sending, as proxies do to keep a connection open.
        while len(received) < size and (part := response.read1(min(size - len(received), 1 << 16))):
            received += part
            if time.monotonic() > deadline:
                raise TimeoutError("the response was not complete in time")
        return bytes(received)

    def pause(self, seconds: float) -> bool:
        """Wait until ``seconds`` have passed or another request ends the call; return True for the latter."""
        return self.is_stopped.wait(seconds)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects are errors: they would carry the API key to another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def read_key() -> str | None:
    """Return the API key of endpoints without surrounding white space, such as a line feed; ``None`` if unset.

    Raises:
        ConfigError: It has characters that are not allowed in a header: the HTTP client would quote it in its error.
    """
    key = (read_api_key() or "").strip()
    if not (key.isascii() and key.isprintable()):
        found = "has characters other than printable ASCII"
        raise ConfigError(Problem("environment variable OPENAI_API_KEY", found, "set it to the key alone"))
    return key or None


def choose_remedy(status: int | None, otherwise: str) -> str:
    """Return the remedy for the status code of a failed request, ``None`` without one; ``otherwise`` for most codes."""
    if status in (401, 403):
        return "put a valid key into the environment variable OPENAI_API_KEY"
    return RESUME_REMEDY if _is_temporary(status or 0) else otherwise


def _choose_failure_remedy(error: Exception) -> str:
    if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
        return "name its certificate, or that of its authority, in the environment variable SSL_CERT_FILE"
    # An invalid response, such as the page of a proxy, is one of another server.
    return _REMEDY if isinstance(error, ValueError) else RESUME_REMEDY


def _is_temporary(status: int) -> bool:
    return status in _REPEATED or status >= 500


def explain(reason: str | Exception, key: str | None) -> str:
    """Return the response or exception of a failed request as one short line, without the API key.

    Control characters are escaped: an error page can contain escape sequences of a terminal.
    """
    if isinstance(reason, json.JSONDecodeError):
        reason = f"the response is not JSON: {reason.doc[:200]!r}"
    line = " ".join((reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}").split())
    return escape_controls((line.replace(key, "***") if key else line)[:300])


def read_wait(retry_after: str | None, wait: float) -> float:
    """Return the seconds of ``Retry-After``, a number or a date, at least ``wait`` and at most ten minutes."""
    value = retry_after or "0"
    with suppress(ValueError, OverflowError):
        # A date ends with GMT: RFC 9110, section 5.6.7.
        asked = parsedate_to_datetime(value).timestamp() - time.time() if value.endswith("GMT") else float(value)
        return max(wait, min(asked, _MAX_RETRY_AFTER))
    return wait


def join_parts(content: Any, kind: str = "text") -> Any:
    """Return the texts of one kind of a content in parts, as of Mistral's reasoning models; other contents as it is."""
    if not isinstance(content, list):
        return content
    # The thinking of a part is itself a list of parts.
    return "".join(join_parts(part[kind]) for part in content if part["type"] == kind)


def _read_reply(received: Any) -> Reply:
    """Return the answer in a response, with its reasoning in the usual template format.

    Raises:
        ValueError: The response has no answer.
    """
    try:
        choice = received["choices"][0]
        message, content = choice["message"], choice["message"].get("content") or ""
        # Servers with a reasoning parser remove it from `content`; vLLM has renamed the field to `reasoning`.
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(content, list):
            thought, content = thought or join_parts(content, "thinking"), join_parts(content)
        usage = received.get("usage") or {}
        num_prompt_tokens, num_tokens = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
        if not isinstance(content, str):
            raise TypeError(f"its content is a {type(content).__name__}")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply holds no answer ({error!r}): {json.dumps(received)[:200]}") from error
    if isinstance(thought, str) and ENDS_THINKING not in content:
        content = join_reasoning(thought, content)
    text = content.encode(errors="replace").decode()  # JSON can contain an unpaired surrogate, which UTF-8 cannot.
    return Reply(text, choice.get("finish_reason") in _ENDS, num_prompt_tokens, num_tokens)
