"""The final model as any Hugging Face tool expects it, opened again before it is called done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import Trainer

from recipes_lib.publish.card import write_card

INDEX = "model.safetensors.index.json"


class BrokenExportError(RuntimeError):
    """What was saved is not what was trained; the folder must not be used."""


def export_model(trainer: Trainer, folder: Path) -> None:
    """Save the model of a finished run into its output directory, open it again, and write its card.

    Args:
        trainer: After training; every process must call.
        folder: The output directory, with ``run.json``.

    Raises:
        BrokenExportError: What was saved is not whole.
    """
    # Off while packed documents had to be kept apart; whoever loads the model wants fast generation.
    trainer.accelerator.unwrap_model(trainer.model).config.use_cache = True
    trainer.save_model(str(folder))
    if not trainer.args.should_save:
        return
    # Upstream's pickle of its arguments; run.json holds the same as JSON.
    (folder / "training_args.bin").unlink()
    model = trainer.accelerator.unwrap_model(trainer.model)
    verify_export(folder, [name for name, _ in model.named_parameters()])
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    figures = {name: value for name, value in (evaluations or [{}])[-1].items() if name.startswith("eval_")}
    write_card(folder, json.loads((folder / "run.json").read_text(encoding="utf-8")), figures)


def verify_export(folder: Path, expected_names: Iterable[str]) -> int:
    """Open a saved model again and return its number of parameters.

    Args:
        folder: Folder with ``model.safetensors`` or its shards and their index.
        expected_names: Parameters that must be there; tied ones once.

    Raises:
        BrokenExportError: A file or a parameter is missing, or a tensor is empty or not finite; all are named.
    """
    try:
        files = {name: folder / file for name, file in _read_index(folder).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BrokenExportError(f"{folder} cannot be opened again: {error}") from error
    faults = [f"{name} is missing" for name in expected_names if name not in files]
    present = {file for file in files.values() if file.exists()}
    faults += [f"{file.name} is missing" for file in sorted(set(files.values()) - present)]
    num_parameters = 0
    for file in sorted(present):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                tensor = tensors.get_tensor(name)
                num_parameters += tensor.numel()
                if tensor.numel() == 0:
                    faults.append(f"{name} is empty")
                elif not torch.isfinite(tensor).all():
                    faults.append(f"{name} is not finite")
    if faults:
        raise BrokenExportError(f"{folder}: " + "; ".join(faults))
    return num_parameters


def _read_index(folder: Path) -> dict[str, str]:
    """Map every saved tensor to its file, by the index when there are shards."""
    if (folder / INDEX).exists():
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), "model.safetensors")
