"""Recipe decorator: start or resume a run, export and verify the final model, publish it, write card and report."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import Trainer

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, DataError, DivergedError, Problem, list_first
from recipes_lib.files import find_record, fsync, inherit_read_permission, read_record
from recipes_lib.models.adapters.lora import load_adapter, load_fresh_base, read_adapter_state
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS, convert_to_original_base
from recipes_lib.models.heads.scoring import SCALE_FILE, read_reward_statistics
from recipes_lib.models.inference import compute_probe_logits, find_device, find_logit_shift
from recipes_lib.models.loading import find_model_folder
from recipes_lib.models.model_files import SENTENCEPIECE, find_sentencepiece
from recipes_lib.models.parallel.zero3 import zero3_init_disabled
from recipes_lib.models.saved_weights import BrokenSaveError, read_published_shapes, sample_weights, verify_weights
from recipes_lib.publish.card import write_card
from recipes_lib.publish.publishing import publishing
from recipes_lib.report.overview import describe_result
from recipes_lib.report.page import build_report
from recipes_lib.report.run_files import read_run
from recipes_lib.training.collectives import destroy_groups
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.run import RUN_FILE, Run, start_run


def recipe(train: Callable[[Run], None]) -> Callable[[RecipeConfig], None]:
    """Decorate a training function so that it starts or resumes, records, publishes and reports the run.

    A run that is already finished is not trained again; only a missing card or report is written.

    Args:
        train: Function that trains ``run.config`` and exports the model, called on every process. ``run.config`` has
            the resolved values of ``activation_checkpointing: auto``, and of gradient accumulation at a new world size.

    Raises:
        ConfigError: The run cannot be started (``start_run``), or its repository cannot be written (``publishing``).
    """

    @functools.wraps(train)
    def main(config: RecipeConfig) -> None:
        with publishing(config):
            run = start_run(config, read_launch())
            if not run.finished:
                with run.recording_its_end():
                    train(run)
                # NCCL warns of groups that are left. At the exit, because this process may train another model.
                atexit.register(destroy_groups)
            finish_run(run)

    return main


def finish_run(run: Run) -> None:
    """Write report and missing card of a finished run, and print their paths.

    Args:
        run: Finished run; every process may call, only the main one acts.
    """
    if not run.launch.is_main:
        return
    card, report = run.output_dir / "README.md", run.output_dir / "report.html"
    if not card.is_file() or not card.stat().st_size:
        files = read_run(run.output_dir)
        write_card(run.output_dir, files.facts, files.find_figures())
    # A kill may have truncated the page.
    is_whole = report.is_file() and "</html>" in report.read_text(encoding="utf-8", errors="replace")[-16:]
    if not run.finished or not is_whole:
        build_report(run.output_dir)
    result = describe_result(read_run(run.output_dir))
    sys.stdout.write(f"done: {result}\n  model {run.output_dir}\n  card {card}\n  report {report}\n")


UNVERIFIED: Final = "_unverified"
"""Staging folder of the model in the output directory; never uploaded."""


def export_model(trainer: Trainer, folder: Path) -> None:
    """Save the model or adapter of a finished run, reload it to verify, then move it into place; collective.

    Args:
        trainer: Trainer after training.
        folder: Output directory of the run.

    Raises:
        BrokenSaveError: The saved model is damaged; it stays in the folder ``UNVERIFIED``.
        ConfigError: The base of an adapter was moved or replaced during the run.
        DivergedError: A part of an adapter was not trained; the adapter stays in the same folder.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    # Disabled during training, since packed rows cannot be cached; users of the model need it to generate fast.
    model.config.use_cache = True
    if changes := getattr(model, "_weight_conversions", None):
        # The text model of a multimodal checkpoint (Qwen 3.5) gets its own names: older vLLM reads no prefixed ones.
        model._weight_conversions = [one for one in changes if getattr(one, "prefix_to_remove", "") != "language_model"]
    is_adapter = isinstance(model, PeftModel)
    logits = compute_probe_logits(trainer.model) if is_adapter else None
    staging = folder / UNVERIFIED
    if trainer.args.should_save:
        shutil.rmtree(staging, ignore_errors=True)
    # No rank may write before the main one has deleted leftovers of an interrupted export. Every rank must call
    # ``save_model``, because sharded weights are gathered by collective calls.
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(staging))
    if trainer.args.should_save:
        # Upstream's pickle of its arguments; run.json has the same as JSON.
        (staging / "training_args.bin").unlink()
        if logits is None:
            verify_weights(staging, read_published_shapes(model))
        else:
            _complete_adapter(model, staging)
            # accelerate wraps the forward pass of the trained model in autocast; the reloaded model needs the same.
            with trainer.accelerator.autocast(), _naming_replaced_base(folder):
                verify_adapter_export(staging, model, logits)
        for path in staging.iterdir():
            # Deletes a folder, such as that of chat templates, from an interrupted export: rename would not replace it.
            shutil.rmtree(folder / path.name, ignore_errors=True)
            inherit_read_permission(path)
            fsync(path)  # Before the run counts as done: a power cut must not leave the names without the model.
            path.replace(folder / path.name)
        staging.rmdir()
        try:
            record = read_record(folder / "run.json", {"stage": str, "config": dict})
        except DataError:
            # Deleted during training; it is written again when the run ends, and then the card (``finish_run``).
            (folder / "README.md").unlink(missing_ok=True)
            return
        copy_sentencepiece(record["config"], folder)
        write_card(folder, record, read_run(folder).find_figures())


def copy_sentencepiece(keys: Mapping[str, Any], folder: Path) -> None:
    """Copy the SentencePiece model of a loaded tokenizer, if it has one, to the folder of a saved model.

    transformers 5 does not save it, and llama.cpp converts no Gemma or Phi-3 without it.

    Args:
        keys: Names and revisions of model and tokenizer by their keys; others are ignored.
        folder: Folder of the saved model.
    """
    with suppress(shutil.SameFileError):  # Of a run over its own start model.
        if file := find_sentencepiece(keys):
            shutil.copyfile(file, folder / SENTENCEPIECE)


def verify_adapter_export(folder: Path, model: PeftModel, logits: torch.Tensor) -> None:
    """Reload a saved adapter on a fresh base, and compare its logits with those of the trained model.

    The base is loaded again from its recorded name, on the same device if it has enough memory. This detects a base
    whose weights were changed by training, or that is not the recorded one.

    Args:
        folder: Folder of the adapter.
        model: Trained model.
        logits: Result of ``compute_probe_logits`` for the trained model.

    Raises:
        BrokenSaveError: A tensor is missing, empty, not finite or of another shape, or the logits of eight tokens
            differ by more than rounding.
        ConfigError: The base cannot be loaded again, as after it was moved.
        DivergedError: The adapter was saved correctly, but the trained model's logits are not finite, or training left
            some of its B matrices at zero.
    """
    if not logits.isfinite().all():
        raise DivergedError("after the last update, the model's logits are not finite: lower learning_rate")
    # PiSSA and similar adapters are restated for the original base, with a larger rank than was trained.
    is_restated = hasattr(model, "initial_factors")
    trained = read_adapter_state(model)
    # Under ZeRO-3 sharded weights are empty placeholders.
    shapes = {name: None if is_restated or not tensor.numel() else tensor.shape for name, tensor in trained.items()}
    verify_weights(folder, shapes, ADAPTER_WEIGHTS)
    with zero3_init_disabled():
        fresh = load_fresh_base(model)
        try:
            task: Any = model.peft_config[model.active_adapter].task_type
            reopened = load_adapter(fresh, str(folder), task_type=task)
        except ConfigError as error:
            raise BrokenSaveError(f"{folder} cannot be opened again: {error}") from error
    # DeepSpeed casts all weights to its compute dtype, whose rounding the fresh model must share.
    if (dtype := model.get_base_model().dtype) != reopened.get_base_model().dtype:
        for parameter in filter(torch.is_floating_point, reopened.parameters()):
            parameter.data = parameter.data.to(dtype)
    # Sharded weights are rounded elsewhere, and a GPU without memory for both models leaves the base to the CPU, where
    # autocast is one of its own.
    kind = find_device(model).type
    with torch.autocast("cpu", torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
        shift = find_logit_shift(reopened, logits)
    if shift is not None:
        raise BrokenSaveError(
            f"{folder}: after reloading, a logit differs from the trained model's by {shift:.2g} of the largest"
        )
    # Exactly, because rounding of a deep model can hide a small difference in its logits.
    differing = [] if is_restated else _find_differences(trained, read_adapter_state(reopened))
    if differing or (not is_restated and _list_scales(model) != _list_scales(reopened)):
        raise BrokenSaveError(f"{folder}: {list_first(differing) or 'lora_alpha'} is not that of the trained model")
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
        learning = [name for name in tensors.keys() if ".lora_B." in name]  # noqa: SIM118 (it is not a mapping)
        untrained = [name for name in learning if not tensors.get_tensor(name).any()]
    if untrained:
        raise DivergedError(
            f"{len(untrained)} of {len(learning)} parts of the adapter are unchanged by training, "
            f"{untrained[0]} first: their gradients were zero in every step. A policy learns nothing from answers with "
            "equal rewards: look at the rewards in metrics.jsonl"
        )


@contextmanager
def _naming_replaced_base(folder: Path) -> Iterator[None]:
    """Convert a ``BrokenSaveError`` of the block if the model's weights are not those that the run began with.

    Raises:
        ConfigError: They were replaced.
    """
    try:
        yield
    except BrokenSaveError as error:
        record = find_record(folder / RUN_FILE)
        before, keys = record.get("weights"), record.get("config") or {}
        name = str(keys.get("model_name_or_path"))
        if before is None or before == sample_weights(find_model_folder(name, keys.get("model_revision"))):
            raise
        found = "its weights were replaced during the run, so that the adapter cannot be verified on them"
        raise ConfigError(Problem(name, found, "restore them and run the same command")) from error


def _find_differences(trained: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ, without those of which this process has a shard or placeholder."""
    whole = {name: one for name, one in trained.items() if one.numel() and not isinstance(one, DTensor)}
    return [name for name, one in whole.items() if not torch.equal(one.detach().to(saved[name]), saved[name])]


def _list_scales(model: PeftModel) -> list[float | None]:
    """Return the factor of the low-rank product in each layer."""
    return [layer.scaling.get(model.active_adapter) for layer in model.modules() if isinstance(layer, LoraLayer)]


def _complete_adapter(model: PeftModel, folder: Path) -> None:
    """Write what PEFT does not: generation config, score scale, and PiSSA factors restated for the original base."""
    base: Any = model.get_base_model()
    if base.can_generate():
        base.generation_config.save_pretrained(folder)
    if (scale := read_reward_statistics(base)) is not None:
        (folder / SCALE_FILE).write_text(json.dumps(scale._asdict()), encoding="utf-8")
    if hasattr(model, "initial_factors"):
        convert_to_original_base(folder, model.initial_factors)
