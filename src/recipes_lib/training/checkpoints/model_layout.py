"""Model layouts: what each process holds of weights and optimizer states, how a checkpoint holds it, and norms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME

from recipes_lib.errors import DataError, Problem
from recipes_lib.models.adapters.lora import read_adapter_state
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.model_files import INDEX
from recipes_lib.models.parallel.pipeline_parallel import build_whole_on_meta
from recipes_lib.models.saved_weights import WEIGHTS, read_published_shapes, read_shapes, verify_weights
from recipes_lib.training.checkpoints.saver import (
    CheckpointSaver,
    Task,
    compare_state,
    compare_weights,
    is_adapter,
    list_frozen,
    write_state,
)
from recipes_lib.training.checkpoints.sharded import (
    MODEL_SHARDS,
    OPTIMIZER_SHARDS,
    compare_own_shards,
    copy_model_shards,
    copy_optimizer_shards,
    gather_trained_state,
    load_model_shards,
    load_optimizer_shards,
    load_whole_model,
    load_whole_optimizer,
    read_trained_state,
    shard_like,
    verify_shards,
)
from recipes_lib.training.collectives import get_rank
from recipes_lib.training.layouts.fsdp import has_shards

Parameters = Mapping[str, nn.Parameter]
"""What is trained by its name, under which optimizer states are kept in shards."""
_STATES: Final = (OPTIMIZER_NAME, "scheduler.pt", "scaler.pt", "rng_state*.pth")
Build = Callable[[Any], torch.optim.Optimizer]
"""Builds the optimizer of a model."""


class ModelLayout:
    """A layout that upstream saves, loads and clips: DeepSpeed's. The others override what upstream does not do.

    A new layout is a new subclass, chosen in ``choose_layout``.

    Attributes:
        engine: Name in ``COMPLETE.json``.
        is_shared: Whether every process writes a part of a checkpoint.
        writes_copies: Whether it is written from copies, asynchronously; otherwise training waits.
        has_engine_norm: Whether the engine computes the gradient norm and clips.

    Source: ``tests/training/checkpoints/test_model_layout.py``, ``tests/distributed/``.
    """

    engine: ClassVar[str] = "DEEPSPEED"
    is_shared: ClassVar[bool] = True
    writes_copies: ClassVar[bool] = False
    has_engine_norm: bool = True

    def save_model(self, folder: Path, model: Any, tokenizer: Any, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Save the model into a checkpoint; every process must call.

        Args:
            folder: Of the checkpoint.
            model: As it is trained, without wrapper.
            tokenizer: Saved beside it.
            saver: Copies what training changes while it is written.

        Returns:
            What is left to write; ``None``: upstream must save it.
        """
        return None

    def save_optimizer(
        self, folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, saver: CheckpointSaver
    ) -> Sequence[Task] | None:
        """Save the optimizer's states; as ``save_model``."""
        return None

    def load_model(self, folder: Path, model: nn.Module) -> bool:
        """Load the weights of a checkpoint; return whether that is done, or upstream must do it."""
        is_sharded = (folder / MODEL_SHARDS).is_dir()
        if is_sharded:
            load_model_shards(folder, read_trained_state(model))
        return is_sharded

    def load_optimizer(
        self, folder: Path, model: Any, parameters: Parameters, optimizer: torch.optim.Optimizer, build: Build
    ) -> bool:
        """Load the optimizer's states of a checkpoint; as ``load_model``.

        Args:
            folder: Of the checkpoint.
            model: As it is trained, without wrapper.
            parameters: What ``optimizer`` trains.
            optimizer: In the groups that the saved one had; it need not have stepped.
            build: For a layout whose processes hold some of the groups' parameters.
        """
        is_sharded = (folder / OPTIMIZER_SHARDS).is_dir()
        if is_sharded:
            load_optimizer_shards(folder, parameters, optimizer)
        return is_sharded

    def gather(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the whole model's weights on the main process; ``None``: upstream gathers, or nothing must be."""
        return None

    def drop_copies(self, model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights that upstream gathered, those of a tied tensor once: ZeRO-1 and 2 copy it under each name."""
        tied = getattr(model, "all_tied_weights_keys", {})
        return {name: tensor for name, tensor in state.items() if name not in tied}

    def build_verification(self, model: Any) -> Callable[[Path], None]:
        """Return what opens a checkpoint of the model as it is now again, and raises ``BrokenSaveError``."""
        if get_rank() != 0:
            return lambda _: None
        if is_adapter(model):
            shapes = {name: tensor.shape for name, tensor in read_adapter_state(model).items()}
        else:
            # What is replicated is saved by the names under which the model itself holds its tensors; upstream saves
            # sharded weights as for publication.
            shapes = read_published_shapes(model) if self.is_shared else read_shapes(model)
        file = ADAPTER_WEIGHTS if is_adapter(model) else WEIGHTS

        def verify(folder: Path) -> None:
            # Sharded weights are saved in a form of the engine's own besides, or in that alone.
            if not self.is_shared or any((folder / name).exists() for name in (file, INDEX)):
                verify_weights(folder, shapes, file)

        return verify

    def compare(self, folder: Path, model: Any, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Compare what this process wrote, before the manifest is, with what is trained; raises ``BrokenSaveError``."""


class ReplicatedLayout(ModelLayout):
    """Every process holds all weights and states: the main one copies them, and a thread writes the copy."""

    engine = ""
    is_shared = False
    writes_copies = True
    has_engine_norm = False

    def __init__(self) -> None:
        """Copy no tokenizer yet."""
        self._tokenizer: Any = None

    def save_model(self, folder: Path, model: Any, tokenizer: Any, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Copy the weights that training changes."""
        if not saver.is_main:
            return ()
        folder.mkdir(parents=True, exist_ok=True)  # Another process may have its random state there.
        if self._tokenizer is None:
            # A tokenizer cannot be written by one thread while another pads with it.
            self._tokenizer = copy.deepcopy(tokenizer)
        state = saver.take(model.state_dict(), unchanging=list_frozen(model))
        return [partial(self._write_model, folder, model, state)]

    def save_optimizer(
        self, folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, saver: CheckpointSaver
    ) -> Sequence[Task] | None:
        """Copy the states."""
        if not saver.is_main:
            return ()
        return [partial(write_state, saver.take(optimizer.state_dict()), folder / OPTIMIZER_NAME)]

    def compare(self, folder: Path, model: Any, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Compare to the bit, and read every state as a later start would."""
        live = read_adapter_state(model) if is_adapter(model) else model.state_dict()
        for file in sorted(folder.glob("*.safetensors")):
            compare_weights(file, live)
        for file in sorted(file for pattern in _STATES for file in folder.glob(pattern)):
            compare_state(file, optimizer.state_dict() if file.name == OPTIMIZER_NAME else None)

    def save_trained(
        self, place: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, saver: CheckpointSaver
    ) -> Sequence[Task]:
        """Save what is trained of a model and its optimizer's states; every process must call.

        Args:
            place: Begins the names of the files, of a checkpoint that has several learners.
            parameters: By name.
            optimizer: Over them, after a step.
            saver: As for ``save_model``.
        """
        if not saver.is_main:
            return ()
        copies = saver.take({"weights": dict(parameters), "states": optimizer.state_dict()})
        return [
            partial(_write_weights, copies["weights"], Path(f"{place}.safetensors")),
            partial(write_state, copies["states"], Path(f"{place}_optimizer.pt")),
        ]

    def verify_trained(self, place: Path, shapes: Mapping[str, torch.Size]) -> None:
        """Open the weights that this process wrote again; raises ``BrokenSaveError``."""
        if get_rank() == 0:
            verify_weights(place.parent, shapes, f"{place.name}.safetensors")

    def compare_trained(self, place: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """As ``compare``, of what ``save_trained`` wrote."""
        if get_rank() == 0:
            compare_weights(Path(f"{place}.safetensors"), parameters)
            compare_state(Path(f"{place}_optimizer.pt"), optimizer.state_dict())

    def _write_model(self, folder: Path, model: Any, state: Mapping[str, Any]) -> None:
        # By the names that upstream will load into the model: by those of publication it would skip experts in
        # silence. Whether embeddings were resized would be asked of the Hub.
        options: Any = {"save_embedding_layers": False} if is_adapter(model) else {"save_original_format": False}
        model.save_pretrained(folder, state_dict=dict(state), **options)
        self._tokenizer.save_pretrained(folder)


class ShardedLayout(ModelLayout):
    """Tensors are torch's ``DTensor``, sharded by FSDP2 or tensor parallelism: every process writes its own shards."""

    engine = "FSDP"
    writes_copies = True

    def __init__(self, *, has_engine_norm: bool) -> None:
        """Say whether accelerate sharded the model, and so clips its gradients."""
        self.has_engine_norm = has_engine_norm

    def save_model(self, folder: Path, model: Any, tokenizer: Any, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Copy the shards that training changes, and write, on the main process, the configuration."""
        if saver.is_main:
            base = unwrap_adapter(model)
            configs = model.peft_config.values() if is_adapter(model) else [model.config]
            # As upstream's save_pretrained has it; FSDP2 puts its own word before the name of the class.
            base.config.architectures = [type(base).__name__.removeprefix("FSDP")]
            answers = [base.generation_config] if base.can_generate() else []
            for part in (*configs, *answers, tokenizer):
                part.save_pretrained(folder)
        return [copy_model_shards(folder, read_trained_state(model), saver, list_frozen(model))]

    def save_optimizer(
        self, folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, saver: CheckpointSaver
    ) -> Sequence[Task] | None:
        """Copy the shards."""
        return [copy_optimizer_shards(folder, parameters, optimizer, saver)]

    def load_model(self, folder: Path, model: nn.Module) -> bool:
        """Load shards of any number of processes, or what one process wrote whole."""
        if not super().load_model(folder, model):
            load_whole_model(folder, model)
        return True

    def load_optimizer(
        self, folder: Path, model: Any, parameters: Parameters, optimizer: torch.optim.Optimizer, build: Build
    ) -> bool:
        """Load shards of any number of processes, or what one process wrote whole."""
        if not super().load_optimizer(folder, model, parameters, optimizer, build):
            groups = [group["params"] for group in optimizer.param_groups]
            load_whole_optimizer(folder / OPTIMIZER_NAME, optimizer, groups)
        return True

    def gather(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Gather tensor by tensor, from all stages."""
        return gather_trained_state(model)

    def build_verification(self, model: Any) -> Callable[[Path], None]:
        """Each process opens the shards that it wrote."""
        return partial(verify_shards, shapes=self._read_shapes(model))

    def compare(self, folder: Path, model: Any, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Compare to the bit."""
        compare_own_shards(folder, read_trained_state(model), parameters, optimizer)

    def save_trained(
        self, place: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, saver: CheckpointSaver
    ) -> Sequence[Task]:
        """As ``ReplicatedLayout.save_trained``, each process its shards."""
        return [
            copy_model_shards(place, parameters, saver),
            copy_optimizer_shards(place, parameters, optimizer, saver),
        ]

    def verify_trained(self, place: Path, shapes: Mapping[str, torch.Size]) -> None:
        """As ``ReplicatedLayout.verify_trained``."""
        verify_shards(place, shapes)

    def compare_trained(self, place: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """As ``ReplicatedLayout.compare_trained``."""
        compare_own_shards(place, parameters, parameters, optimizer)

    def _read_shapes(self, model: Any) -> Mapping[str, torch.Size]:
        # Of a ``DTensor`` the shape is that of the whole tensor.
        return {name: tensor.shape for name, tensor in read_trained_state(model).items()}


class PipelineLayout(ShardedLayout):
    """Every process holds the layers of its pipeline stage, whole or sharded over those that hold the same."""

    def load_optimizer(
        self, folder: Path, model: Any, parameters: Parameters, optimizer: torch.optim.Optimizer, build: Build
    ) -> bool:
        """Load what this stage holds of the states."""
        if (folder / OPTIMIZER_SHARDS).is_dir():
            load_optimizer_shards(folder, parameters, optimizer, is_part=True)
            return True
        whole = build_whole_on_meta(model)
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        # Whatever builds an optimizer groups by what a model says of its parameters.
        numbered = [[names[id(parameter)] for parameter in group["params"]] for group in build(whole).param_groups]
        groups = [[parameters.get(name) for name in group] for group in numbered]
        load_whole_optimizer(folder / OPTIMIZER_NAME, optimizer, groups)
        return True

    def _read_shapes(self, model: Any) -> Mapping[str, torch.Size]:
        shapes: Mapping[str, torch.Size] = model.whole_shapes
        return shapes


def load_trained(place: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Read what ``save_trained`` of any layout wrote, into parameters of any layout; every process must call.

    Raises:
        DataError: It holds other weights than those that are trained.
    """
    if (place / MODEL_SHARDS).is_dir():
        load_model_shards(place, parameters)
        load_optimizer_shards(place, parameters, optimizer)
        return
    weights = load_file(f"{place}.safetensors")
    if weights.keys() != parameters.keys():
        found = f"it does not hold the weights that the {place.name} trains"
        raise DataError(Problem(str(place.parent), found, "delete it, or train what it was saved from"))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(weights[name], parameter))
    groups = [group["params"] for group in optimizer.param_groups]
    load_whole_optimizer(Path(f"{place}_optimizer.pt"), optimizer, groups)


def _write_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, file)


def choose_layout(trainer: Trainer) -> ModelLayout:
    """Return the layout of a trainer's model, by what accelerate and the model's loading say of it."""
    if trainer.is_deepspeed_enabled:
        return ModelLayout()
    model: Any = trainer.model
    is_in_stages, is_by_accelerate = hasattr(model, "part"), bool(trainer.is_fsdp_enabled)
    if is_in_stages or is_by_accelerate or has_shards(model):
        return (PipelineLayout if is_in_stages else ShardedLayout)(has_engine_norm=is_by_accelerate)
    return ReplicatedLayout()


def choose_learner_layout(model: nn.Module) -> ReplicatedLayout | ShardedLayout:
    """Return the layout of a model that a loop of our own trains."""
    return ShardedLayout(has_engine_norm=False) if has_shards(model) else ReplicatedLayout()
