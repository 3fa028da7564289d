"""Client of OpenAI-compatible chat endpoints: concurrent requests with retries, a rate limit, and token counts.

lm-eval asks its questions by its own client (``engines.py``); judges and ``recipes synthesize`` by this one.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from recipes_lib.errors import ConfigError, Problem, escape_controls
from recipes_lib.processes import read_api_key

Message = Mapping[str, Any]
Chat = Sequence[Message]

MAX_WAIT: Final = 60.0
"""Longest pause before another attempt, in seconds, unless the server asks for a longer one."""
FEWEST_REFUSALS: Final = 8
"""Refused requests, without an answered one, that show a wrong field or model: a single one may be too long."""
_MAX_ASKED_WAIT: Final = 600.0
_MAX_REPLY: Final = 1 << 26
_THIS_REQUEST: Final = (400, 413, 422)
"""Status codes that concern one request: too long, or refused by a filter."""
REPEATED: Final = (408, 409, 425, 429)
"""Status codes below 500 of a request that may succeed later."""
KEY_REFUSED: Final = (401, 403)
KEY_REMEDY: Final = "put a valid key into the environment variable OPENAI_API_KEY"
RESUME_REMEDY: Final = "start it or wait, and run the same command to resume"
_FAILURES: Final = (OSError, http.client.HTTPException, ValueError, OverflowError, RecursionError)
"""A connection that fails or takes too long; a reply that is cut short, not JSON, or counts infinitely many tokens."""


THINKS: Final = "<think>"
ENDS_THINKING: Final = "</think>"
"""Delimiters of reasoning in answers."""


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Split an answer into reasoning, ``None`` if absent, and content.

    Some templates open the reasoning in the prompt, so that only its end stands in the answer.
    """
    before, mark, after = text.partition(ENDS_THINKING)
    # Only the first delimiter: a model may write about the tag in its reasoning.
    return (before.replace(THINKS, "", 1).strip(), after.strip()) if mark else (None, text)


def join_reasoning(thought: str | None, said: str) -> str:
    """Return an answer with its reasoning, in the usual template format."""
    return f"{THINKS}\n{thought}\n{ENDS_THINKING}\n\n{said}" if thought else said


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a chat.

    Attributes:
        text: Without special tokens; empty after an error.
        is_finished: Whether it ended by itself, and not at the limit of its length.
        num_prompt_tokens: Tokens of the chat; 0 if unknown.
        num_tokens: Tokens of the answer; 0 if unknown.
        error: Why there is no answer to this chat.
    """

    text: str
    is_finished: bool
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None


class Answerer(Protocol):
    """Interface of what answers chats: a local model, vLLM, or an endpoint."""

    def answer(self, chats: Sequence[Chat], numbers: Sequence[int]) -> list[Reply]:
        """Answer each chat once, in order; a chat and its number determine the answer, as far as the engine allows."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the answers besides the chats, as JSON values."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of chats, which answers several at a time.

    The API key is the environment variable ``OPENAI_API_KEY``; it is sent to this address only, never through a
    redirect, and replaced in error messages.

    Attributes:
        base_url: ``http://HOST/v1`` or ``http://HOST/v1/chat/completions``.
        model: Name by which the endpoint knows the model.
        max_new_tokens: Longest answer.
        temperature: Of sampling.
        seed: With the number of a chat, the ``seed`` of its request.
        num_concurrent: Requests at a time.
        requests_per_minute: Upper bound, evenly spaced; ``None``: no bound.
        timeout: Seconds that an attempt may take without receiving anything.
        num_attempts: For each request; failed connections, 408, 409, 425, 429 and 5xx are repeated after 1, 2, 4, ...
            seconds, or when the server's ``Retry-After`` says.
        request: Further fields of each request; ``None`` removes one that is sent by default.
        tally: How many requests were answered, and how many refused, in this process.

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

    def __post_init__(self) -> None:
        """Verify the attributes, which flags, configurations and reward functions of a recipe give.

        Raises:
            ConfigError: Some are out of range, or the address is none of chats; all of them.
        """
        lowest = {"max_new_tokens": 1, "num_concurrent": 1, "num_attempts": 1, "temperature": 0}
        problems = [
            Problem(name, f"is {getattr(self, name)}", f"write {low} or more")
            for name, low in lowest.items()
            if getattr(self, name) < low
        ]
        problems += [
            Problem(name, f"is {value}", "write a number above 0")
            for name in ("requests_per_minute", "timeout")
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        if not isinstance(self.request, Mapping):
            problems.append(Problem("request", f"is {self.request!r:.60}", 'write an object: {"top_p": 0.9}'))
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            remedy = "write http://HOST:PORT/v1"
            problems.append(Problem("base_url", f"{self.base_url[:120]!r} is no address of an endpoint", remedy))
        elif self.url.endswith("/completions/chat/completions"):
            remedy = "write the address of its chats, .../v1 or .../v1/chat/completions"
            problems.append(Problem("base_url", f"{self.base_url} completes texts, and does not answer chats", remedy))
        if problems:
            raise ConfigError(*problems)

    @property
    def url(self) -> str:
        """Address of the requests."""
        url = self.base_url.rstrip("/")
        return url if url.endswith("/chat/completions") else f"{url}/chat/completions"

    def describe(self) -> dict[str, Any]:
        """Return what determines the answers; not the address, which another launch of a server may change."""
        names = ("model", "max_new_tokens", "temperature", "seed")
        return {name: getattr(self, name) for name in names} | {"request": dict(self.request)}

    def answer(self, chats: Sequence[Chat], numbers: Sequence[int]) -> list[Reply]:
        """Answer each chat once.

        Raises:
            ConfigError: The endpoint cannot be reached, does not know the model or the key, returns no chats, or
                refuses the first ``FEWEST_REFUSALS`` requests or more, and no other was answered.
        """
        connection, jobs = _Connection(self), deque(enumerate(zip(chats, numbers, strict=True)))
        found: dict[int, Reply] = {}
        failures: list[Exception] = []

        def work() -> None:
            while not connection.is_stopped.is_set():
                try:
                    at, (chat, number) = jobs.popleft()
                except IndexError:
                    return
                try:
                    found[at] = connection.ask(chat, number)
                except Exception as error:  # Raised again by the caller's thread.
                    failures.append(error)
                    connection.is_stopped.set()

        # Not a pool, whose threads would keep an interrupted process until their requests end.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.num_concurrent, len(jobs)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            # Also after ctrl-C, so that no thread begins another request.
            connection.is_stopped.set()
        if failures:
            raise failures[0]
        replies = [found[at] for at in range(len(chats))]
        self.tally.update(reply.error is None for reply in replies)
        # Over all calls of this process, since a call may have one chat only.
        if not self.tally[True] and self.tally[False] >= FEWEST_REFUSALS:
            raise ConfigError(Problem("base_url", f"{self.url} refused every request: {replies[0].error}", _REMEDY))
        return replies


_REMEDY: Final = "see that it serves this model; further fields of a request go into `request`"


@dataclass
class _Connection:
    """Requests of one call, from several threads."""

    endpoint: Endpoint
    is_stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._url, self._key = self.endpoint.url, read_api_key()
        self._pace, self._next = threading.Lock(), 0.0
        self._open: Callable[..., Any] = urllib.request.build_opener(_NoRedirects).open

    def ask(self, chat: Chat, number: int) -> Reply:
        """Return the answer to a chat.

        Raises:
            ConfigError: As ``Endpoint.answer``.
        """
        endpoint, told = self.endpoint, ""
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [dict(message) for message in chat],
            "max_tokens": endpoint.max_new_tokens,
            "temperature": endpoint.temperature,
            # A prime stride: runs of neighbouring seeds share no request below a million chats. At most 31 bits.
            "seed": (endpoint.seed * 1_000_003 + number) % (1 << 31),
            **endpoint.request,
        }
        # A null removes a field: newer models of OpenAI refuse `max_tokens`.
        sent = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        for attempt in range(endpoint.num_attempts):
            self._wait_for_turn()
            wait = min(2.0**attempt, MAX_WAIT)
            try:
                return _read_reply(self._post(sent))
            except urllib.error.HTTPError as error:
                # The head of the body: an error page may have megabytes.
                told = f"{error.code} {self._shorten(error.read(2000).decode(errors='replace') or error.reason)}"
                if error.code in _THIS_REQUEST:
                    return Reply("", is_finished=False, error=told)
                if error.code not in REPEATED and error.code < 500:
                    remedy = KEY_REMEDY if error.code in KEY_REFUSED else _REMEDY
                    raise ConfigError(Problem("base_url", f"{self._url} returned {told}", remedy)) from None
                wait = read_wait(error.headers.get("Retry-After"), wait)
            except _FAILURES as error:
                told = self._shorten(f"{type(error).__name__}: {error}")
            # Not after the last attempt; and no longer than until another request has failed for good.
            if attempt + 1 < endpoint.num_attempts and self.pause(wait):
                break
        found = f"{self._url} had no answer after {endpoint.num_attempts} attempts: {told}"
        raise ConfigError(Problem("base_url", found, RESUME_REMEDY))

    def _post(self, sent: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data=sent, headers=headers)
        with self._open(request, timeout=self.endpoint.timeout) as response:
            # One byte more than allowed tells a reply that is too long from one of exactly that length.
            received = response.read(_MAX_REPLY + 1)
        if len(received) > _MAX_REPLY:
            raise ValueError(f"a reply of more than {_MAX_REPLY >> 20} MiB")
        if response.length:  # `read` with a bound returns what there is, and half a reply would be told as broken JSON.
            raise http.client.IncompleteRead(received, response.length)
        return json.loads(received)

    def _wait_for_turn(self) -> None:
        if self.endpoint.requests_per_minute is None:
            return
        # Slots are given out under the lock and waited for outside of it: threads wait side by side.
        with self._pace:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + 60 / self.endpoint.requests_per_minute
        self.pause(begin - now)

    def pause(self, seconds: float) -> bool:
        """Wait, unless another request ends the call meanwhile; return whether one did."""
        return self.is_stopped.wait(seconds)

    def _shorten(self, text: str) -> str:
        line = " ".join(text.split())
        return escape_controls((line.replace(self._key, "***") if self._key else line)[:300])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects are errors: they would carry the API key to another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def read_wait(asked: str | None, wait: float) -> float:
    """Return the seconds of ``Retry-After``, at least ``wait`` and at most ten minutes; dates are rare and not read."""
    try:
        return max(wait, min(float(asked or 0), _MAX_ASKED_WAIT))
    except ValueError:
        return wait


def _read_reply(received: Any) -> Reply:
    """Return the answer in a response.

    Raises:
        ValueError: It holds none.
    """
    try:
        choice = received["choices"][0]
        text = choice["message"].get("content") or ""
        usage = received.get("usage") or {}
        num_prompt_tokens, num_tokens = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
        if not isinstance(text, str):
            raise TypeError(f"its content is a {type(text).__name__}")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply holds no answer ({error!r}): {json.dumps(received)[:200]}") from error
    text = text.encode(errors="replace").decode()  # JSON can hold half a surrogate pair, which no file can.
    return Reply(text, choice.get("finish_reason") in ("stop", "eos", None), num_prompt_tokens, num_tokens)
