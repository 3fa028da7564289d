"""``recipes merge``: merge an adapter into its base model, and verify that the predictions agree."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import ModelConfig, QuantizationConfig, TokensConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import atomic_folder, read_lines, read_record, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_KL: Final = 0.01
"""Allowed mean KL divergence of the merged model from base and adapter, nats per token: ten times bfloat16 rounding."""
MAX_KL_FROM_FEW_BITS: Final = 0.2
"""The same for an adapter trained on a quantised base, which also compensates quantisation error."""
MAX_TOKENS: Final = 64
"""Tokens per text in the comparison, whose logits are kept in memory."""

RECORD_FILE: Final = "merge.json"
PROMPTS: Final = Path(__file__).with_name("merge_prompts.txt").read_text(encoding="utf-8").splitlines()
"""Texts of the comparison if neither ``--prompts`` nor samples of the run are available."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag is wrong, a model cannot be loaded or written, or the predictions of the merged model differ
            too much; then nothing is written.
    """
    options = _parse(argv)
    settings = _read_adapter(options.adapter)
    if not (options.base or settings.get("base_model_name_or_path")):
        raise ConfigError(Problem("--base", f"{options.adapter} names no base model", "add --base, a folder or Hub id"))
    from recipes_lib.models.loading import load_tokenizer
    from recipes_lib.publish.card import write_merge_card
    from recipes_lib.publish.merging import merge, plan_merge

    base = ModelConfig(
        model_name_or_path=options.base or settings.get("base_model_name_or_path"),
        model_revision=None if options.base else settings["revision"],
        tokenizer_name_or_path=str(options.adapter) if (options.adapter / "tokenizer.json").exists() else None,
    )
    tokenizer = load_tokenizer(base, TokensConfig())
    plan = plan_merge(base, options.adapter, _read_bits(options.adapter), options.dtype)
    texts = [tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in _read_texts(options, tokenizer)]
    with atomic_folder(options.output) as model:
        record = merge(plan, tokenizer, texts, model)
        default = MAX_KL if plan.compared_on == "full precision" else MAX_KL_FROM_FEW_BITS
        record["max_kl"] = default if options.max_kl is None else options.max_kl
        sys.stdout.write("".join(f"{line}\n" for line in describe(record)))
        refuse_another_model(record)
        (model / RECORD_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        write_merge_card(model, record)
    sys.stdout.write(f"written to {options.output}\n")


def describe(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a summary of the merge and the comparison, line by line."""
    revision = f" at {record['base_revision']}" if record["base_revision"] else ""
    precision = record["compared_on"]
    yield f"base            {record['base']}{revision}, merged in float32, written in {record['dtype']}"
    yield f"adapter         {record['adapter']}, trained on the base in {record['trained_on']}"
    yield f"compared        on {record['num_tokens']} tokens of {record['num_texts']} texts, the base in {precision}"
    yield f"mean KL         {record['mean_kl']:.2e} nats per token, limit {record['max_kl']:g}"
    yield f"mean KL of base {record['mean_kl_of_the_base']:.2e} nats per token, without the adapter"
    yield f"same top token  {record['same_choice']:.1%} of the tokens"


def refuse_another_model(record: Mapping[str, Any]) -> None:
    """Raise if the predictions of the merged model differ from those of base and adapter.

    Raises:
        ConfigError: The mean KL divergence exceeds its limit, or is not below that of the base without the adapter.
    """
    mean_kl, limit, base_kl = record["mean_kl"], record["max_kl"], record["mean_kl_of_the_base"]
    use_float32 = "write --dtype float32, which avoids rounding"
    # Negated, so that NaN is refused, too.
    if not mean_kl <= limit:
        found = f"the merged model differs from base and adapter by {mean_kl:.2e} nats per token"
        remedy = use_float32 if record["compared_on"] == "full precision" else "serve the adapter on the quantised base"
        raise ConfigError(Problem("--max_kl", found, f"{remedy}, or accept it: --max_kl {2 * mean_kl:.2g}"))
    if not mean_kl < base_kl:
        found = f"the merged model differs from base and adapter by {mean_kl:.2e} nats per token, the base by "
        found += f"{base_kl:.2e}: merging has no effect"
        remedy = "the adapter does not change the base" if base_kl == 0 else use_float32
        raise ConfigError(Problem("--adapter", found, remedy))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("merge")
    text = f"allowed mean KL divergence (default: {MAX_KL}; quantised base: {MAX_KL_FROM_FEW_BITS})"
    parser.add_argument("--max_kl", type=float, metavar="NATS", help=text)
    return parser.parse_args(argv)


def _read_adapter(folder: Path) -> dict[str, Any]:
    """Read ``adapter_config.json`` of PEFT.

    Raises:
        ConfigError: The folder holds no adapter, or not one of a causal language model.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        remedy = "name the output directory of a run that trained an adapter"
        raise ConfigError(Problem("--adapter", f"{folder} holds no adapter_config.json", remedy))
    fields = {"task_type": str | None, "base_model_name_or_path": str | None}
    settings = {"revision": None, **read_record(path, fields)}
    # PEFT also saves adapters without a task; if theirs is another one, the comparison fails.
    if settings.get("task_type") not in (None, "CAUSAL_LM"):
        found = f"{folder} is an adapter for {settings['task_type']}, and only causal language models are merged"
        raise ConfigError(Problem("--adapter", found, "use a reward model as an adapter on its base"))
    return settings


def _read_bits(adapter: Path) -> QuantizationConfig:
    """Return the quantisation of the base in the run of the adapter; the default, none, without a run record."""
    path = adapter / "run.json"
    keys = read_record(path, {"config": dict})["config"] if path.is_file() else {}
    names = [field.name for field in dataclasses.fields(QuantizationConfig)]
    return QuantizationConfig(**{name: keys[name] for name in names if name in keys})


def _read_texts(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the prompts of ``--prompts``, else the last samples of the run and the default prompts, as rendered texts.

    Raises:
        ConfigError: The file of prompts cannot be read, or is empty.
    """
    if options.prompts:
        lines = read_text(options.prompts, "--prompts", "name a text file").splitlines()
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise ConfigError(Problem("--prompts", f"{options.prompts} is empty", "write one prompt per line"))
        yield from (_render(prompt, tokenizer) for prompt in prompts)
        return
    rows = [row for row in read_lines(options.adapter / "samples.jsonl") if row]
    texts = [(str(row.get("prompt", "")), str(row.get("completion", ""))) for row in rows]
    # A dictionary keeps the last sample of each prompt.
    yield from {prompt: prompt + completion for prompt, completion in texts if prompt}.values()
    yield from (_render(prompt, tokenizer) for prompt in PROMPTS)


def _render(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        return prompt
    chat = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
