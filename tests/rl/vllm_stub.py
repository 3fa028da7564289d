"""Stub of a vLLM server for TRL's client, around a transformers model."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
from trl.generation import vllm_client


class Stub(ThreadingHTTPServer):
    """HTTP server on loopback; weights are passed in memory instead of NCCL.

    Attributes:
        model: Model that samples.
        requests: Path and body of each request.
        settings: Response of ``/server_info``.
        statuses: HTTP error status by path.
        errors: Exceptions of request handlers, injected or because the client disconnected.
    """

    def __init__(self, model: Any, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model
        self.requests: list[tuple[str, Any]] = []
        self.settings: dict[str, Any] = {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": "nccl"},
        }
        self.statuses: dict[str, int] = {}
        self.errors: list[BaseException | None] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Record the error instead of printing its traceback."""
        self.errors.append(sys.exception())

    def receive(self, iterator: Any, trainer_args: Any) -> None:
        """Load the weights that ``trainer_send_weights`` would send over NCCL."""
        self.model.load_state_dict({name: tensor.clone() for name, tensor in iterator}, strict=False)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert (body["top_p"], body["top_k"], body["repetition_penalty"], body["n"]) == (1.0, 0, 1.0, 1)
        with self._lock, torch.no_grad():
            return {"choices": [self._answer(prompt, body) for prompt in body["prompt"]]}

    def _answer(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        ids, logps = list(prompt), []
        while len(logps) < body["max_tokens"] and not (logps and ids[-1] in body["stop_token_ids"]):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            log_probs = (logits / body["temperature"]).log_softmax(0)
            ids.append(int(torch.multinomial(log_probs.exp(), 1)))
            logps.append(float(log_probs[ids[-1]]))
        answer = ids[len(prompt) :]
        return {
            "prompt_token_ids": prompt,
            "token_ids": answer,
            "logprobs": {
                "tokens": [f"token_id:{index}" for index in answer],
                "token_logprobs": logps,
                "top_logprobs": [None] * len(answer),
            },
        }


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers = {
            "/health": {},
            "/v1/models": {"data": [{"id": "stub"}]},
            "/server_info": {"vllm_config": self.server.settings},
        }
        if path in self.server.statuses:
            self.send_error(self.server.statuses[path])
        else:
            self._send(answers[path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        self.server.requests.append((self.path, body))
        self._send(self.server.complete(body) if self.path == "/v1/completions" else {"success": True})

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(model: Any, monkeypatch: Any, port: int = 0) -> Iterator[Stub]:
    """Serve ``model``, and patch TRL's client: vLLM counts as installed, and weights go to the stub."""
    stub = Stub(model, port)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda *_, **__: setattr(stub, "is_open", True))
    engine = SimpleNamespace(trainer_send_weights=stub.receive)
    monkeypatch.setattr(vllm_client, "NCCLWeightTransferEngine", engine, raising=False)
    monkeypatch.setattr(vllm_client, "NCCLTrainerSendWeightsArgs", lambda **_: None, raising=False)
    monkeypatch.setattr(vllm_client.VLLMClient, "communicator", SimpleNamespace(group=None), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    thread = threading.Thread(target=stub.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        thread.join()
        stub.server_close()
