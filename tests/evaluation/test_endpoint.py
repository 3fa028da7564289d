"""Client of chat endpoints: requests, retries, timeouts, refusals and secrets."""

from __future__ import annotations

import itertools
import json
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import OpenerDirector

import pytest
from tests.evaluation.chat_endpoint import ChatEndpoint

from recipes_lib.errors import ConfigError
from recipes_lib.evaluation import endpoint as client
from recipes_lib.evaluation.endpoint import Endpoint, join_reasoning, read_wait, split_reasoning

CHATS = [[{"role": "user", "content": f"say {word}"}] for word in ("one", "two", "three", "four")]


def echo(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"].removeprefix("say ")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Requested pauses in seconds; nothing sleeps."""
    made: list[float] = []

    def pause(connection: Any, seconds: float) -> bool:
        made.append(seconds)
        return False

    monkeypatch.setattr(client._Connection, "pause", pause)
    return made


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


def answer_all(server: ChatEndpoint, **options: Any) -> list[client.Reply]:
    return Endpoint(server.url, "m", **options).answer(CHATS, range(len(CHATS)))


def test_replies_are_ordered_with_usage_and_distinct_seeds() -> None:
    server = ChatEndpoint(echo)
    replies = answer_all(server, max_new_tokens=7, temperature=0.5, request={"top_p": 0.9, "max_tokens": None})
    assert [reply.text for reply in replies] == ["one", "two", "three", "four"]
    assert {(reply.num_prompt_tokens, reply.num_tokens, reply.is_finished) for reply in replies} == {(2, 1, True)}
    by_word = {echo(body): body for body in server.asked}
    assert len({body["seed"] for body in server.asked}) == 4
    first = dict(by_word["one"])
    answer_all(server, max_new_tokens=7, temperature=0.5, request={"top_p": 0.9, "max_tokens": None})
    assert first in server.asked[4:], "the same chat is asked alike"
    answer_all(server, seed=1)
    assert len({body["seed"] for body in server.asked}) == 8, "other seeds share no request"
    assert {name: first[name] for name in ("model", "temperature", "top_p")} == {
        "model": "m", "temperature": 0.5, "top_p": 0.9,
    }  # fmt: skip
    assert "max_tokens" not in first, "null removes a field"


@pytest.mark.parametrize(
    ("finish", "is_finished"),
    [("stop", True), ("stop_sequence", True), ("eos_token", True), ("length", False), ("content_filter", False)],
)
def test_finish_reason_tells_complete_answers(finish: str, is_finished: bool) -> None:
    server = ChatEndpoint(echo)
    server.finish = finish
    assert {reply.is_finished for reply in answer_all(server)} == {is_finished}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_status_is_retried_with_backoff_and_one_warning(status, waits, capsys) -> None:
    failed: dict[str, int] = {}

    def fail_twice(body: dict[str, Any]) -> Any:
        failed[echo(body)] = failed.get(echo(body), 0) + 1
        return echo(body) if failed[echo(body)] > 2 else (status, {}, "busy")

    server = ChatEndpoint(fail_twice)
    assert [reply.text for reply in answer_all(server)] == ["one", "two", "three", "four"]
    assert sorted(waits) == [1, 1, 1, 1, 2, 2, 2, 2]
    found = f"{status} busy; attempt 2 in 1 s, each waits 300 s for data"
    assert capsys.readouterr().err == f"warning: a request to {server.url}/chat/completions failed: {found}\n"


def test_retry_after_header_is_respected(waits: list[float]) -> None:
    left = iter([(429, {"Retry-After": "17"}, "slow down")])
    server = ChatEndpoint(lambda body: next(left, echo(body)))
    answer_all(server, num_concurrent=1)
    assert waits == [17]


@pytest.mark.parametrize(
    "text",
    [
        *("<html>", "{}", '{"choices": []}', '{"choices": [{"message": {"content": 7}}]}', "[1", "[" * 200_000),
        '{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": Infinity}}',
    ],
)
def test_malformed_reply_is_retried_then_reported(text: str, waits: list[float]) -> None:
    server = ChatEndpoint(lambda body: (200, {}, text))
    with pytest.raises(ConfigError, match="had no answer after 3 attempts") as caught:
        answer_all(server, num_attempts=3, num_concurrent=1)
    if text == "<html>":  # The page of a proxy or of another server, which waiting does not change.
        assert "the response is not JSON: '<html>'\n    check the address" in str(caught.value)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "timeout", "message"),
    [
        (lambda body: threading.Event().wait(), 0.5, "TimeoutError: timed out"),
        (lambda body: (200, {"Content-Length": "99"}, '{"choices": ['), 300.0, "IncompleteRead"),
    ],
    ids=["never", "half a body"],
)
def test_hanging_or_truncated_response_fails(answer: Any, timeout: float, message: str, waits: list[float]) -> None:
    with pytest.raises(ConfigError, match=f"had no answer after 2 attempts: {message}"):
        answer_all(ChatEndpoint(answer), num_attempts=2, num_concurrent=1, timeout=timeout)


def serve_slowly(head: bytes, parts: Iterator[bytes]) -> str:
    """Serve requests with ``head`` and then ``parts``, one every 20 ms, then reset the connection; return the URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket, own: Iterator[bytes]) -> None:
        with connection, connection.makefile("rb") as request, suppress(OSError):
            # The whole request: a client that is still sending would see the reset instead of the response.
            headers = dict(line.lower().split(b": ") for line in list(iter(request.readline, b"\r\n"))[1:])
            request.read(int(headers[b"content-length"]))
            connection.sendall(head)
            for part in own:
                time.sleep(0.02)
                connection.sendall(part)
            # SO_LINGER with timeout 0 makes close() send RST.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def accept() -> None:
        for own in itertools.tee(parts, 4):
            threading.Thread(target=serve, args=(listener.accept()[0], own), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_endless_response_times_out(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUTS_PER_ATTEMPT", 0.01)
    address = serve_slowly(b"HTTP/1.1 200 OK\r\n\r\n", itertools.repeat(b" "))
    with pytest.raises(ConfigError, match="after 2 attempts: TimeoutError: the response was not complete in time"):
        Endpoint(address, "m", num_attempts=2, timeout=30).answer(CHATS[:1], [0])


@pytest.mark.parametrize("parts", [[], [b"busy"]], ids=["reset", "reset in the body"])
def test_error_response_with_truncated_body_is_retried(parts: list[bytes], waits: list[float]) -> None:
    address = serve_slowly(b"HTTP/1.1 503 Overloaded\r\nContent-Length: 99\r\n\r\n", iter(parts))
    with pytest.raises(ConfigError, match="after 3 attempts: 503 Overloaded"):
        Endpoint(address, "m", num_attempts=3, timeout=5).answer(CHATS[:1], [0])


def test_unreachable_server_error_names_resume(waits: list[float]) -> None:
    with pytest.raises(ConfigError, match="run the same command to resume"):
        Endpoint("http://127.0.0.1:9/v1", "m", num_attempts=2).answer(CHATS[:1], [0])


def test_untrusted_certificate_error_names_the_variable(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise URLError(ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"))

    monkeypatch.setattr(OpenerDirector, "open", refuse)
    with pytest.raises(ConfigError, match=r"self-signed certificate.*\n.*SSL_CERT_FILE"):
        Endpoint("https://127.0.0.1:9/v1", "m").answer(CHATS[:1], [0])


def test_outage_of_a_server_that_has_answered_takes_more_attempts(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([(503, {}, "restarting")] * 6)
    server = ChatEndpoint(lambda body: (503, {}, "gone") if echo(body) == "three" else next(left, echo(body)))
    endpoint = Endpoint(server.url, "m", num_attempts=2)
    endpoint.tally[True] = 1
    assert endpoint.answer(CHATS[:1], [0])[0].text == "one"
    assert waits == [1, 2, 4, 8, 16, 32]
    monkeypatch.setattr(client, "_MAX_OUTAGE", 0.0)
    with pytest.raises(ConfigError, match="after 2 attempts: 503 gone"):
        endpoint.answer(CHATS[2:3], [2])


def test_outage_after_an_answer_to_another_chat_of_the_call_takes_more_attempts(waits: list[float]) -> None:
    left = iter([(503, {}, "restarting")] * 6)
    server = ChatEndpoint(lambda body: echo(body) if echo(body) == "one" else next(left, echo(body)))
    replies = Endpoint(server.url, "m", num_attempts=2, num_concurrent=1).answer(CHATS[:2], [0, 1])
    assert [reply.text for reply in replies] == ["one", "two"]


def test_api_key_is_sent_and_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-private")
    server = ChatEndpoint(lambda body: (401, {}, "wrong key sk-very-private"))
    with pytest.raises(ConfigError, match=r"wrong key \*\*\*") as caught:
        answer_all(server)
    assert "very-private" not in str(caught.value)
    assert set(server.keys) == {"Bearer sk-very-private"}
    assert len(server.asked) <= len(CHATS), "nothing is repeated"
    assert "very-private" not in json.dumps(Endpoint(server.url, "m").describe())


def test_api_key_is_stripped_and_invalid_one_is_refused_unprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ChatEndpoint(echo)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-private\r\n")
    answer_all(server)
    assert set(server.keys) == {"Bearer sk-very-private"}
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-private\nsecond line")
    with pytest.raises(ConfigError, match="other than printable ASCII") as caught:
        answer_all(server)
    assert "very-private" not in str(caught.value)


def test_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-private")
    other = ChatEndpoint(echo)
    for status in (302, 307):
        server = ChatEndpoint(lambda body, status=status: (status, {"Location": f"{other.url}/chat/completions"}, ""))
        with pytest.raises(ConfigError, match=f"returned {status} a redirect to {other.url}"):
            answer_all(server)
    assert not other.asked


def test_refused_request_is_an_error_of_its_row_unless_all_are() -> None:
    server = ChatEndpoint(lambda body: (400, {}, "too long") if echo(body) == "two" else echo(body))
    replies = answer_all(server)
    assert [reply.error for reply in replies] == [None, "400 too long", None, None]
    server.answer = lambda body: (400, {}, "unknown field seed")
    endpoint = Endpoint(server.url, "m")
    assert all(reply.error for reply in endpoint.answer(CHATS, range(4))), "four may be too long"
    with pytest.raises(ConfigError, match=r"refused every request: 400 unknown field seed.*\n.*`request_fields`"):
        endpoint.answer(CHATS, range(4))
    server.answer = echo
    answered = Endpoint(server.url, "m")
    answered.answer(CHATS, range(4))
    server.answer = lambda body: (400, {}, "too long")
    for _ in range(3):
        assert all(reply.error for reply in answered.answer(CHATS, range(4))), "it serves others"


def test_unpaired_surrogate_in_reply_is_replaced() -> None:
    body = json.dumps({"choices": [{"message": {"content": "a\ud83d"}, "finish_reason": "stop"}]})
    assert answer_all(ChatEndpoint(lambda _: (200, {}, body)))[0].text == "a?"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "4", "reasoning_content": "2 + 2"}, ("2 + 2", "4")),
        ({"content": "4", "reasoning": "2 + 2", "reasoning_content": None}, ("2 + 2", "4")),
        ({"content": None, "reasoning": "2 +"}, ("2 +", "")),
        ({"content": "<think>2 + 2</think>4", "reasoning_content": "2 + 2"}, ("2 + 2", "4")),
        ({"content": "4", "reasoning": {"effort": "low"}}, (None, "4")),
        ({"content": [{"type": "thinking", "thinking": [text("2 + "), text("2")]}, text("4")]}, ("2 + 2", "4")),
        ({"content": [text("4"), {"type": "reference", "reference_ids": [1]}, text(".")]}, (None, "4.")),
    ],
)
def test_separate_reasoning_is_part_of_the_answer(message: dict[str, Any], expected: tuple[str | None, str]) -> None:
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": None})
    assert {split_reasoning(reply.text) for reply in answer_all(ChatEndpoint(lambda _: (200, {}, body)))} == {expected}


def test_requests_per_minute_paces_requests(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 100.0))
    endpoint = Endpoint(ChatEndpoint(echo).url, "m", requests_per_minute=30, num_concurrent=1)
    for part in (CHATS[:3], CHATS[3:]):
        endpoint.answer(part, range(len(part)))
    assert waits == pytest.approx([0, 2, 4, 6])


def test_requests_that_wait_for_their_turn_are_not_sent_after_a_failure() -> None:
    server = ChatEndpoint(lambda _: (401, {}, "no"))
    with pytest.raises(ConfigError, match="returned 401"):
        Endpoint(server.url, "m", requests_per_minute=1, num_concurrent=4).answer(CHATS, range(4))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("file:///etc/passwd", "no address"),
        *(
            ("localhost:8000", "no address"),
            ("ftp://h/v1", "no address"),
            ("http:///v1", "no address"),
            ("http://[::1/v1", "no address"),
        ),
        ("http://h/v1/completions", "answer chats"),
    ],
)
def test_invalid_url_is_refused(url: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Endpoint(url, "m").answer(CHATS, range(4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_concurrent", 0), ("num_attempts", 0), ("max_new_tokens", 0), ("temperature", -1)),
        *(("requests_per_minute", 0), ("timeout", 0), ("request", [1])),
        *(("requests_per_minute", math.nan), ("temperature", math.nan)),
    ],
)
def test_out_of_range_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: is "):
        Endpoint("http://h/v1", "m", **{name: value})


def test_base_url_and_chat_url_are_equivalent() -> None:
    assert Endpoint("http://h/v1/", "m").url == Endpoint("http://h/v1/chat/completions", "m").url


@pytest.mark.parametrize("opening", ["<think>\n", ""])
def test_split_and_join_reasoning(opening: str) -> None:
    thought, said = split_reasoning(f"{opening}Two and two.\n</think>\n\nFour.")
    assert (thought, said) == ("Two and two.", "Four.")
    assert join_reasoning(thought, said) == "<think>\nTwo and two.\n</think>\n\nFour."
    assert join_reasoning(None, said) == "Four."
    assert split_reasoning(" Four.\n") == (None, " Four.\n")


def test_unclosed_reasoning_has_no_content() -> None:
    assert split_reasoning("\n<think>\nTwo and two, [[A]]") == ("Two and two, [[A]]", "")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *((None, 2), ("17", 17), ("0.5", 2), ("86400", 600), ("soon", 2)),
        *((f"Wed, 21 Oct {year} 07:28:40 GMT", wait) for year, wait in (("2026", 40), ("2025", 2), ("9" * 20, 2))),
    ],
)
def test_retry_after_extends_the_wait_within_limits(header, seconds, monkeypatch) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC).timestamp()
    monkeypatch.setattr(client, "time", SimpleNamespace(time=lambda: now))
    assert read_wait(header, 2.0) == seconds
