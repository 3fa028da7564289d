"""Replacements for models and datasets of the shipped configurations: shapes without weights, small random models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from tests import tiny
from tests.tiny import sizes
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from recipes_lib.planning.compute import SHIPPED_SHAPES


@dataclass(frozen=True)
class Shape:
    """Facts of a model card.

    Attributes:
        num_parameters: Parameters, shared ones counted once.
        template: Name in TRL's ``chat_templates``; ``None`` for a base model.
    """

    num_parameters: int
    template: str | None = None


SHAPES: Mapping[str, Shape] = {
    "meta-llama/Llama-3.1-8B": Shape(8_030_261_248),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(8_030_261_248, "llama3"),
    "meta-llama/Llama-3.1-70B": Shape(70_553_706_496),
    "meta-llama/Llama-3.3-70B-Instruct": Shape(70_553_706_496, "llama3"),
    "meta-llama/Llama-3.2-1B": Shape(1_235_814_400),
    "Qwen/Qwen3-0.6B-Base": Shape(596_049_920, "qwen3"),
    "Qwen/Qwen3-0.6B": Shape(596_049_920, "qwen3"),
    "Qwen/Qwen3-8B-Base": Shape(8_190_735_360, "qwen3"),
    "Qwen/Qwen3-8B": Shape(8_190_735_360, "qwen3"),
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(494_032_768, "qwen2_5"),
    "mistralai/Mistral-7B-v0.1": Shape(7_241_732_096),
    "alignment-handbook/zephyr-7b-sft-full": Shape(7_241_732_096, "zephyr"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(134_515_008, "chatml"),
    "HuggingFaceTB/SmolLM2-1.7B": Shape(1_711_376_384),
    "HuggingFaceTB/SmolLM3-3B-Base": Shape(3_075_098_624),
    "google/gemma-3-1b-it": Shape(999_885_952, "gemma3"),
}
"""Hub id -> facts beside its sizes, which are in ``planning/shapes.yaml``."""


def build_config(name: str, **changes: Any) -> Any:
    """Build the configuration of the model ``name``."""
    return AutoConfig.for_model(**{**SHIPPED_SHAPES[name], "dtype": "bfloat16", **changes})


TEMPLATES: Mapping[str, str] = {
    "chatml": tiny.CHATML_TEMPLATE,
    "zephyr": "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
}
"""Chat templates that TRL does not have."""
TOKENS: Mapping[str, tuple[tuple[str, ...], str, str | None]] = {
    "llama": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>"),
        "<|eot_id|>",
        None,
    ),
    "mistral": (("<s>", "<unk>"), "</s>", None),
    "qwen": (("<|im_start|>", "<think>", "</think>"), "<|im_end|>", "<|endoftext|>"),
    "smol": (("<|im_start|>",), "<|im_end|>", None),
    "gemma": (("<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<pad>"),
}
"""Family -> special tokens, end-of-text token, padding token."""
SMALL = sizes(32, 2, 4, num_key_value_heads=2, max_position_embeddings=16384)


def find_family(name: str) -> str:
    """Return the tokenizer family of the model ``name``, a key of ``TOKENS``."""
    names = {
        "Llama": "llama",
        "Qwen": "qwen",
        "SmolLM": "smol",
        "gemma": "gemma",
        "istral": "mistral",
        "zephyr": "mistral",
    }
    return next(family for part, family in names.items() if part in name)


def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Build a small tokenizer with the special tokens and the chat template of the model ``name``."""
    special, end, pad = TOKENS[find_family(name)]
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, end, *([pad] if pad else [])]})
    tokenizer.eos_token, tokenizer.pad_token = end, pad
    if special[0].startswith(("<|begin", "<s", "<bos")):
        tokenizer.bos_token = special[0]
    template = SHAPES[name].template
    if template is not None:
        path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = TEMPLATES.get(template) or path.read_text(encoding="utf-8")
    if find_family(name) == "gemma":
        _add_image_token(tokenizer, build_config(name).vocab_size)
    tokenizer.model_max_length = 131072
    return tokenizer


def _add_image_token(tokenizer: PreTrainedTokenizerFast, token_id: int) -> None:
    """Add the image placeholder token, for which text-only models have no embedding."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in state["added_tokens"]} | {"<image_soft_token>": token_id}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens("<image_soft_token>", special_tokens=True)


def save_shape(name: str, folder: Path) -> Path:
    """Write the full-size configuration and the tokenizer of the model ``name``, without weights."""
    tokenizer = build_tokenizer(name)
    build_config(name, **_ids(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_small(name: str, folder: Path, *, is_scorer: bool = False) -> Path:
    """Write a small random model of the architecture of ``name`` and its tokenizer; a reward model if ``is_scorer``."""
    tokenizer = build_tokenizer(name)
    sizes = SMALL | {key: 8 for key in ("head_dim",) if key in SHIPPED_SHAPES[name]}
    config = build_config(name, **sizes, vocab_size=len(tokenizer), dtype="float32", **_ids(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if is_scorer:
            config.num_labels = 1
        auto_class = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
        model = auto_class.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def make_rows(dataset: str, num_rows: int, *, offset: int = 0) -> list[dict[str, Any]]:
    """Make rows with the columns of a Hub dataset."""
    return [_ROWS[dataset](number + offset) for number in range(num_rows)]


def write_rows(dataset: str, folder: Path) -> tuple[Path, Path]:
    """Write a training and a held-out file with the columns of a Hub dataset, and return both paths."""
    paths = []
    for name, num_rows, offset in (("train", 24, 0), ("test", 4, 100)):
        path = folder / f"{dataset.replace('/', '--')}_{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(dataset, num_rows, offset=offset)))
        paths.append(path)
    return paths[0], paths[1]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _chat(number: int) -> dict[str, Any]:
    turns = [_turn("user", f"{number}?"), _turn("assistant", f"{number}, yes."), _turn("user", "And then?")]
    return {
        "prompt": f"{number}?",
        "prompt_id": f"{number:064x}",
        "messages": [*turns, _turn("assistant", f"Then {number + 1}. " * (1 + number % 5))],
    }


def _pair(number: int) -> dict[str, Any]:
    question = _turn("user", f"What is {number} times {number}?")
    chosen = [question, _turn("assistant", f"It is {number * number}. " * (1 + number % 3))]
    rejected = [question, _turn("assistant", "Who knows? " * (1 + number % 2) + str(number))]
    return {
        "prompt": question["content"],
        "prompt_id": f"{number:064x}",
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    }


_ROWS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "HuggingFaceH4/ultrachat_200k": _chat,
    "HuggingFaceH4/ultrafeedback_binarized": _pair,
    "HuggingFaceTB/smoltalk": lambda number: {"messages": _chat(number)["messages"], "source": "smol-magpie-ultra"},
    "openai/gsm8k": lambda number: {
        "question": f"Add {number} and 1.",
        "answer": f"{number} + 1 = <<{number}+1={number + 1}>>{number + 1}\n#### {number + 1}",
    },
    "HuggingFaceTB/finemath": lambda number: {"url": f"https://example.org/{number}", "text": f"{number} + 1. " * 40},
    "HuggingFaceFW/fineweb-edu": lambda number: {"id": str(number), "text": f"Rivers carry {number} grains. " * 30},
}
