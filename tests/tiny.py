"""The tiny tokenizer and model of the tests, built deterministically in a second."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "system\nYou are a helpful assistant.\n",
    "user\nWhat is the capital of France?\nassistant\nThe capital of France is Paris.\n",
    "user\nHow many days are in a week?\nassistant\nThere are seven days in a week.\n",
    "Return the number of items in a container. Raise an error when the argument is not a container.",
    "A function takes arguments and returns a value; a class has methods and attributes.",
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun.",
    "Every morning the baker opens the shop, weighs flour and water, and waits until the bread has risen.",
    "Rivers carry sand from the mountains towards the sea, where beaches form between rocky cliffs.",
    "user\nWrite a short poem about winter.\nassistant\nSnow covers silent fields, smoke climbs above the roof.\n",
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level BPE of 512 entries that covers every byte, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=0,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == 512
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast


def leave_ids_out(tokenizer: PreTrainedTokenizerFast, shift: int) -> PreTrainedTokenizerFast:
    """Return a copy whose last token has an id larger by ``shift``, so that ids have a gap."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] += shift
    sparse = copy.deepcopy(tokenizer)
    sparse._tokenizer = Tokenizer.from_str(json.dumps(state))
    return sparse


def sizes(width: int, num_layers: int, num_heads: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of a model in the keys of most architectures; its MLPs are twice as wide as its layers."""
    layers = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    return {"hidden_size": width, "intermediate_size": 2 * width} | layers | more


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: int) -> Path:
    """Write a random Llama (fp32), of two layers without ``changes`` of its sizes, and the tokenizer beside it."""
    config = LlamaConfig(
        **sizes(64, 2, 4, num_key_value_heads=2, vocab_size=512, max_position_embeddings=512) | changes,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
