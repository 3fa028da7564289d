"""Shared fixtures: an offline, single-threaded process and a tiny tokenizer and model, built once a session."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from tests.tiny import build_tokenizer, save_model
from transformers import PreTrainedTokenizerFast

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 entries that covers every byte, with a ChatML template; treat it as read-only."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``tiny_tokenizer`` as ``AutoTokenizer`` loads it; treat it as read-only."""
    folder = tmp_path_factory.mktemp("tiny_tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random two-layer Llama (fp32) and the tokenizer beside it; treat it as read-only."""
    return save_model(tmp_path_factory.mktemp("tiny_model"), tiny_tokenizer)
