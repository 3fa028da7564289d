"""``recipes export``: convert a checkpoint, sharded or not, to a model folder that transformers loads, or to GGUF."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import atomic_folder, staging_folder
from recipes_lib.models.model_files import TEMPLATES

if TYPE_CHECKING:
    from torch import Tensor

CONVERTER: Final = "convert_hf_to_gguf.py"
"""Conversion script of llama.cpp."""
_OF_TRAINING: Final = ("COMPLETE.json", "trainer_state.json", "model.safetensors.index.json")
"""JSON files of a checkpoint that are not copied."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

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
    """Write the model or adapter of a checkpoint as its run would at the end, and verify what was written.

    Host memory holds the weights once, and the largest tensors temporarily twice.

    Args:
        checkpoint: Complete checkpoint of a recipe with one model.
        output: Folder to write; it must not exist, or must be empty.

    Returns:
        Number of parameters.

    Raises:
        ConfigError: The checkpoint is damaged, or its weights do not fit its ``config.json``; or ``output`` is not
            empty.
        BrokenSaveError: The written weights are incomplete.

    Source: ``tests/commands/weights/test_export.py``, ``tests/distributed/test_sharded.py``.
    """
    from recipes_lib.training.checkpoints.manifest import find_damage

    with atomic_folder(output) as staging:
        if damage := find_damage(checkpoint):
            raise ConfigError(Problem(str(checkpoint), damage, "name another checkpoint"))
        for file in (*checkpoint.iterdir(), *(checkpoint / TEMPLATES).glob("*")):
            if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name not in _OF_TRAINING:
                copy = staging / file.relative_to(checkpoint)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)  # Without the mode, which file systems such as FAT refuse.
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
    raise ConfigError(Problem("--llama_cpp", f"there is no {CONVERTER} {llama_cpp or 'on the PATH'}", remedy))


def _write_model(checkpoint: Path, folder: Path) -> int:
    import torch
    import transformers

    from recipes_lib.models.saved_weights import read_published_shapes, verify_weights
    from recipes_lib.training.checkpoints.sharded import read_whole_weights

    if not (checkpoint / "config.json").exists():
        found = "holds no single model: a checkpoint of PPO holds policy and critic"
        raise ConfigError(Problem(str(checkpoint), found, "let the run end: the model is in its output directory"))
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    name = next(iter(config.architectures or ()), "no architecture")
    architecture: Any = getattr(transformers, name, None)
    if architecture is None:
        raise ConfigError(Problem(str(checkpoint / "config.json"), f"transformers has no {name}"))
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
        raise ConfigError(Problem(str(checkpoint), f"its weights and its config.json differ: {error}")) from error
    model.tie_weights()
    # After tying, because the file has no tensor for a tied output projection.
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if unknown or missing:
        found = f"its weights are not those of its config.json: {', '.join([*unknown, *missing][:4])}"
        raise ConfigError(Problem(str(checkpoint), found))


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
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return verify_weights(folder, {name: tensor.shape for name, tensor in weights.items()}, ADAPTER_WEIGHTS)
