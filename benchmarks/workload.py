"""Shared workload: grade-school maths problems as chats, a tokenizer of 8k tokens and a Llama of 10 M parameters."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

DEFAULT_DATA = Path("../shared/data/gsm8k_train.jsonl")
SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
# {% generation %}, because TRL's assistant_only_loss needs it; ours uses the same template.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% else %}{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options for raw data and the folder of the workload."""
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--workload", type=Path, default=Path("build/workload"))


def build_workload(data: Path, folder: Path) -> None:
    """Write ``chats.jsonl``, ``eval.jsonl`` (the last 256 rows) and ``model/`` into ``folder``, once."""
    if (folder / "model" / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    roles = {"user": "question", "assistant": "answer"}
    chats = [
        json.dumps({"messages": [{"role": role, "content": row[key]} for role, key in roles.items()]}) for row in rows
    ]
    (folder / "chats.jsonl").write_text("\n".join(chats[:-256]) + "\n", encoding="utf-8")
    (folder / "eval.jsonl").write_text("\n".join(chats[-256:]) + "\n", encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows for text in (row["question"], row["answer"])), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", model_max_length=2048
    )
    fast.chat_template = TEMPLATE
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
