"""Commands that write a model folder: ``recipes export``, ``recipes merge`` and ``recipes student``.

They convert a checkpoint, sharded or not, to a folder that transformers loads, or to GGUF; merge an adapter into its
base model, and verify that the predictions agree; and initialise a student from some layers of its teacher.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import ModelConfig, QuantizationConfig, TokensConfig
from recipes_lib.errors import ConfigError, DataError, Problem, reported_at
from recipes_lib.files import atomic_folder, find_record, read_lines, read_record, read_text, staging_folder
from recipes_lib.models.model_files import TEMPLATES

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

CONVERTER: Final = "convert_hf_to_gguf.py"
"""Conversion script of llama.cpp."""
_OF_TRAINING: Final = ("COMPLETE.json", "trainer_state.json", "ppo_state.json", "model.safetensors.index.json")
"""JSON files of a checkpoint that are not copied."""
_ANOTHER: Final = "name another checkpoint-N of a run; the output_dir of a finished run needs no export"


def main_export(argv: Sequence[str]) -> None:
    """Run ``recipes export``.

    Raises:
        ConfigError: As ``export_checkpoint`` or ``export_gguf``, or a GGUF file is named without ``--gguf``.
    """
    options = CommandParser("export").parse_args(argv)
    if options.output.suffix == ".gguf" and not options.gguf:
        remedy = "add `--gguf f16`, or another type; or name a folder"
        raise ConfigError(Problem(str(options.output), "is the name of a GGUF file, and --gguf is missing", remedy))
    from recipes_lib.models.loading import hide_progress_bars

    hide_progress_bars()
    if options.gguf:
        export_gguf(options.checkpoint, options.output, options.gguf, options.llama_cpp)
        size = options.output.stat().st_size
        sys.stdout.write(f"{size:,} bytes written to {options.output}\n")
        return
    num_parameters = export_checkpoint(options.checkpoint, options.output)
    sys.stdout.write(f"{num_parameters:,} parameters written to {options.output}\n")


def export_checkpoint(checkpoint: Path, output: Path) -> int:
    """Write the model or adapter of a checkpoint (of RL, the policy) as its run would at the end, and verify it.

    Host memory holds the weights once, and the largest tensors temporarily twice.

    Args:
        checkpoint: Complete checkpoint.
        output: Folder to write; it must not exist, or must be empty.

    Returns:
        Number of parameters.

    Raises:
        ConfigError: The checkpoint is damaged, or its weights do not fit its ``config.json``; or ``output`` is not
            empty.
        BrokenSaveError: The written weights are incomplete.

    Source: ``tests/commands/test_export.py``, ``tests/distributed/test_sharded.py``.
    """
    from recipes_lib.publish.final_model import copy_sentencepiece
    from recipes_lib.training.checkpoints.manifest import find_damage

    with atomic_folder(output) as staging:
        if damage := find_damage(checkpoint):
            raise ConfigError(Problem(str(checkpoint), damage, _ANOTHER))
        for file in (*checkpoint.iterdir(), *(checkpoint / TEMPLATES).glob("*")):
            if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name not in _OF_TRAINING:
                copy = staging / file.relative_to(checkpoint)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)  # Without the mode, which file systems such as FAT refuse.
        with suppress(DataError):  # Without a record of the run, or with a damaged one.
            record = read_record(checkpoint.resolve().parent / "run.json", {"config": dict})
            copy_sentencepiece(record["config"], staging)
        write = _write_adapter if (checkpoint / "adapter_config.json").exists() else _write_model
        return write(checkpoint, staging)


def export_gguf(source: Path, output: Path, kind: str, llama_cpp: Path | None) -> None:
    """Write a model as a GGUF file with the converter of llama.cpp.

    Args:
        source: Folder of a model, or a complete checkpoint.
        output: File to write.
        kind: Weight type, as the converter names it: ``f16``, ``q8_0``.
        llama_cpp: Checkout of llama.cpp; ``None`` to find the converter on the ``PATH``.

    Raises:
        ConfigError: The converter or the model does not exist, the file already exists, or the conversion fails.
    """
    command = _find_converter(llama_cpp)
    if output.suffix != ".gguf" or output.exists():
        found = "already exists" if output.exists() else "is not the name of a GGUF file"
        raise ConfigError(Problem(str(output), found, "write a new name that ends with .gguf"))
    is_checkpoint = (source / "COMPLETE.json").exists()
    if (source / "adapter_config.json").exists():
        remedy = "merge it first: `recipes merge --adapter ... --output ...`"
        raise ConfigError(Problem(str(source), "is an adapter", remedy))
    if not is_checkpoint and not (source / "config.json").exists():
        raise ConfigError(Problem(str(source), "holds no model", "name the output directory of a finished run"))
    with staging_folder(output) as folder:
        model, file = source, folder / output.name
        # The converter reads a complete model; a checkpoint may be sharded.
        if is_checkpoint:
            model = folder / "model"
            export_checkpoint(source, model)
        command += [str(model), "--outfile", str(file), "--outtype", kind]
        code = subprocess.run(command, check=False).returncode
        if code or not file.is_file():
            found = f"failed with exit code {code}" if code else "has not written a file"
            raise ConfigError(Problem(shlex.join(command), found, "see its output above"))
        file.replace(output)


def _find_converter(llama_cpp: Path | None) -> list[str]:
    """Return the command of the converter of llama.cpp.

    Raises:
        ConfigError: The converter does not exist.
    """
    if llama_cpp is None:
        if found := shutil.which(CONVERTER):
            return [found]
    elif (script := llama_cpp / CONVERTER).is_file():
        return [sys.executable, str(script)]
    remedy = "clone github.com/ggml-org/llama.cpp, install its requirements.txt, and name its folder by --llama_cpp"
    place = f"in {llama_cpp}" if llama_cpp else "on the PATH"
    raise ConfigError(Problem("--llama_cpp", f"there is no {CONVERTER} {place}", remedy))


def _write_model(checkpoint: Path, folder: Path) -> int:
    import torch
    import transformers

    from recipes_lib.models.saved_weights import read_published_shapes, verify_weights
    from recipes_lib.training.checkpoints.sharded import read_whole_weights

    if not (checkpoint / "config.json").exists():
        remedy = "let the run end: the model is in its output directory"
        raise ConfigError(Problem(str(checkpoint), "has no config.json", remedy))
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    name = next(iter(config.architectures or ()), "no architecture")
    architecture: Any = getattr(transformers, name, None)
    if architecture is None:
        remedy = "install the version of transformers that its run has recorded in run.json"
        raise ConfigError(Problem(str(checkpoint / "config.json"), f"transformers has no {name}", remedy))
    # On the meta device, because the weights of the checkpoint are assigned instead of copied.
    with torch.device("meta"):
        model = architecture(config)
    _assign_weights(model, read_whole_weights(checkpoint), checkpoint)
    # Training switches the cache off; generation needs it.
    model.config.use_cache = True
    if (checkpoint / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint)
    model.save_pretrained(folder)
    return verify_weights(folder, read_published_shapes(model))


def _assign_weights(model: Any, weights: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Assign weights to a model on the meta device.

    Raises:
        ConfigError: Weights are missing, unknown or of another shape.
    """
    try:
        _, unknown = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        found = f"its weights and its config.json differ: {error}"
        raise ConfigError(Problem(str(checkpoint), found, _ANOTHER)) from error
    model.tie_weights()
    # After tying, because the file has no tensor for a tied output projection.
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if unknown or missing:
        found = f"its weights are not those of its config.json: {', '.join([*unknown, *missing][:4])}"
        raise ConfigError(Problem(str(checkpoint), found, _ANOTHER))


def _write_adapter(checkpoint: Path, folder: Path) -> int:
    from safetensors.torch import save_file

    from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS, name_in_file, read_base_changing_init
    from recipes_lib.models.saved_weights import verify_weights
    from recipes_lib.training.checkpoints.sharded import read_whole_weights

    if init := read_base_changing_init(checkpoint):
        # Such an initialisation subtracts the adapter from the base, and only the run has the changed base.
        found = f"its adapter belongs to a base that {init} has changed, and the checkpoint does not hold that base"
        raise ConfigError(Problem(str(checkpoint), found, "let the run end: its output directory holds the adapter"))
    weights = {name_in_file(name): tensor for name, tensor in read_whole_weights(checkpoint).items()}
    settings = find_record(checkpoint / "adapter_config.json")
    if settings.get("ensure_weight_tying"):
        # Shards hold the trained copy of tied embeddings, the largest module, once; PEFT looks for it under both names.
        largest = max((one for name, one in weights.items() if ".lora_" not in name), key=lambda one: one.numel())
        for name in settings["modules_to_save"]:
            if not any(key.endswith(f".{name}.weight") for key in weights):
                weights[f"base_model.model.{name}.weight"] = largest.clone()
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return verify_weights(folder, {name: tensor.shape for name, tensor in weights.items()}, ADAPTER_WEIGHTS)


MAX_KL: Final = 0.01
"""Allowed mean KL divergence of the merged model from base and adapter, nats per token: ten times bfloat16 rounding.
The help of ``--max_kl`` in ``flags.yaml`` repeats both numbers."""
MAX_KL_FROM_FEW_BITS: Final = 0.2
"""The same for an adapter trained on a quantised base, which also compensates quantisation error."""
MAX_TOKENS: Final = 64
"""Tokens per text in the comparison, whose logits are kept in memory."""

PROMPTS: Final = Path(__file__).with_name("merge_prompts.txt").read_text(encoding="utf-8").splitlines()
"""Texts of the comparison if neither ``--prompts`` nor samples of the run are available."""


def main_merge(argv: Sequence[str]) -> None:
    """Run ``recipes merge``.

    Raises:
        ConfigError: A flag is wrong, a model cannot be loaded or written, or the predictions of the merged model differ
            too much; then nothing is written.
    """
    options = CommandParser("merge").parse_args(argv)
    settings = _read_adapter(options.adapter)
    if not (options.base or settings.get("base_model_name_or_path")):
        raise ConfigError(Problem("--base", f"{options.adapter} names no base model", "add --base, a folder or Hub id"))
    from recipes_lib.models.loading import load_tokenizer
    from recipes_lib.publish.card import write_merge_card
    from recipes_lib.publish.final_model import copy_sentencepiece
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
        (model / "merge.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        copy_sentencepiece(dataclasses.asdict(base), model)
        write_merge_card(model, options.output.resolve().name, record)
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


def _read_adapter(folder: Path) -> dict[str, Any]:
    """Read ``adapter_config.json`` of PEFT.

    Raises:
        ConfigError: The folder holds no adapter, or not one of a causal language model.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        remedy = (
            "name the output directory of a run that trained an adapter; one of the Hub is first downloaded by "
            "`hf download ID --local-dir DIR`"
        )
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


def main_student(argv: Sequence[str]) -> None:
    """Run ``recipes student``.

    Raises:
        ConfigError: A flag is wrong, or the teacher cannot be loaded or pruned; then nothing is written.
    """
    options = CommandParser("student").parse_args(argv)
    from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
    from recipes_lib.models.structure import map_layers, prune_layers, verify_copy
    from recipes_lib.publish.final_model import copy_sentencepiece

    teacher = ModelConfig(model_name_or_path=options.teacher, model_revision=options.revision, dtype="auto")
    with reported_at("--teacher"):
        tokenizer = load_tokenizer(teacher, TokensConfig())
        teacher_config, _ = load_model_config(teacher)
    count = teacher_config.get_text_config().num_hidden_layers
    if options.layers is None and not 1 <= (options.num_layers or 0) <= count:
        found = f"{options.num_layers or 0} layers are requested, and the teacher has {count}"
        raise ConfigError(Problem("--num_layers", found, f"write a number from 1 to {count}"))
    layers = options.layers or list(map_layers(options.num_layers, count))
    with atomic_folder(options.output) as student:
        model = load_causal_lm(teacher, "eager")
        num_before = model.num_parameters()
        prune_layers(model, layers)
        model.config.use_cache = True
        model.save_pretrained(student)
        tokenizer.save_pretrained(student)
        copy_sentencepiece(dataclasses.asdict(teacher), student)
        again = load_causal_lm(ModelConfig(model_name_or_path=str(student), dtype="auto"), "eager")
        verify_copy(again, model, options.output)
        record = {"teacher": options.teacher, "teacher_revision": options.revision, "layers": layers, "of": count}
        (student / "student.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    sys.stdout.write(
        f"layers       {', '.join(map(str, layers))} of {count}\n"
        f"parameters   {model.num_parameters():,} of {num_before:,}\n"
        f"written to {options.output}; distil it by `model_name_or_path: {options.output}`\n"
    )
