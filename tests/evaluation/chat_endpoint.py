"""OpenAI-compatible chat endpoint on the loopback interface, with answers from the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatEndpoint(ThreadingHTTPServer):
    """Threaded server that runs until the process exits.

    Attributes:
        answer: Maps a request body to the reply text, or to a tuple of status code, headers and body.
        asked: Bodies of all requests, in order of arrival.
        keys: Their ``Authorization`` headers.
        has_usage: Whether replies contain token counts (numbers of words).
        finish: The ``finish_reason``.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.has_usage, self.finish = answer, True, "stop"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have disconnected."""


class _Handler(BaseHTTPRequestHandler):
    server: ChatEndpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers["Authorization"])
            reply = self.server.answer(body)
        status, headers, text = reply if isinstance(reply, tuple) else (200, {}, self._reply(body, reply))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def _reply(self, body: dict[str, Any], text: Any) -> str:
        reply: dict[str, Any] = {"choices": [{"message": {"content": text}, "finish_reason": self.server.finish}]}
        if self.server.has_usage:
            read = " ".join(message["content"] for message in body["messages"])
            reply["usage"] = {"prompt_tokens": len(read.split()), "completion_tokens": len(str(text).split())}
        return json.dumps(reply)

    def log_message(self, *_: Any) -> None: ...
