"""Model layouts: how weights and optimizer states are distributed over ranks, saved, loaded, gathered and verified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME

from recipes_lib.errors import DataError, Problem
from recipes_lib.models.adapters.lora import read_adapter_state
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.models.model_files import INDEX, MODEL_SHARDS, WEIGHTS
from recipes_lib.models.parallel.pipeline_parallel import build_whole_on_meta
from recipes_lib.models.saved_weights import read_shapes, verify_weights
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
    OPTIMIZER_SHARDS,
    Trained,
    compare_own_shards,
    copy_model_shards,
    copy_optimizer_shards,
    gather_trained_state,
    load_optimizer_shards,
    load_tensors,
    load_whole_optimizer,
    read_trained_state,
    shard_like,
    verify_shards,
)
from recipes_lib.training.collectives import get_rank
from recipes_lib.training.layouts.fsdp import has_shards, reshard

_STATES: Final = (OPTIMIZER_NAME, "scheduler.pt", "scaler.pt", "rng_state*.pth")
Build = Callable[[Any], torch.optim.Optimizer]
"""Function that builds the optimizer of a model."""


class ModelLayout:
    """DeepSpeed's layout, which upstream saves, loads and clips; base class of the layouts that we save ourselves.

    A new layout is a new subclass, chosen in ``choose_layout``.

    Attributes:
        engine: Name of the sharding engine in ``COMPLETE.json``.
        is_shared: Whether every process writes a part of a checkpoint.
        writes_copies: Whether checkpoints are written asynchronously from host copies; otherwise training waits.

    Source: ``tests/training/checkpoints/test_model_layout.py``, ``tests/distributed/``.
    """

    engine: ClassVar[str] = "DEEPSPEED"
    is_shared: ClassVar[bool] = True
    writes_copies: ClassVar[bool] = False

    def save_model(self, folder: Path, model: Any, tokenizer: Any, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Save the model into a checkpoint; every process must call.

        Args:
            folder: Checkpoint folder.
            model: Trained model without wrapper.
            tokenizer: Tokenizer or processor, saved with the model.
            saver: Saver that copies tensors to host memory.

        Returns:
            Tasks that write the remaining files; ``None``: upstream must save the model.
        """
        if saver.is_main:
            _save_generation_config(folder, model)
        return None

    def save_optimizer(self, folder: Path, trained: Trained, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Save the optimizer states; arguments and result as for ``save_model``."""
        return None

    def load_model(self, folder: Path, model: nn.Module) -> bool:
        """Load the weights of a checkpoint; return ``False`` if upstream must load them; every process must call."""
        is_sharded = (folder / MODEL_SHARDS).is_dir()
        if is_sharded:
            load_tensors(folder / MODEL_SHARDS, read_trained_state(model))
        return is_sharded

    def load_optimizer(self, folder: Path, model: Any, trained: Trained, build: Build) -> bool:
        """Load the optimizer states of a checkpoint; result as for ``load_model``.

        Args:
            folder: Checkpoint folder.
            model: Trained model without wrapper.
            trained: Parameters, and an optimizer with the groups of the saved one; it may have no states yet.
            build: Builder of the whole model's optimizer, for ranks that hold some of its parameters only.
        """
        is_sharded = (folder / OPTIMIZER_SHARDS).is_dir()
        if is_sharded:
            load_optimizer_shards(folder, trained)
        return is_sharded

    def gather(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the whole model's weights on the main process; ``None``: upstream saves them; every process must call.

        Other ranks get an empty dict.
        """
        return None

    def drop_copies(self, model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gathered weights without the copies of tied tensors, which ZeRO-1 and 2 store under each name."""
        tied = getattr(model, "all_tied_weights_keys", {})
        return {name: tensor for name, tensor in state.items() if name not in tied}

    def build_verification(self, model: Any) -> Callable[[Path], None]:
        """Return a function that reopens a checkpoint of this model and raises ``BrokenSaveError`` on a fault."""
        if get_rank() != 0:
            return lambda _: None
        if is_adapter(model):
            shapes, file = {name: tensor.shape for name, tensor in read_adapter_state(model).items()}, ADAPTER_WEIGHTS
        else:
            shapes, file = read_shapes(model), WEIGHTS

        def verify(folder: Path) -> None:
            # DeepSpeed may write its own format only, without safetensors.
            if not self.is_shared or any((folder / name).exists() for name in (file, INDEX)):
                verify_weights(folder, shapes, file)

        return verify

    def compare(self, folder: Path, model: Any, trained: Trained) -> None:
        """Compare the files that this process wrote with the live tensors, bit for bit; raises ``BrokenSaveError``."""


class ReplicatedLayout(ModelLayout):
    """One device or DDP: every process holds all weights and states, and the main process saves them."""

    engine = ""
    is_shared = False
    writes_copies = True
    _tokenizer: Any = None  # Copied for the first checkpoint.

    def save_model(self, folder: Path, model: Any, tokenizer: Any, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Copy the trainable weights; frozen ones are written from the model itself."""
        if not saver.is_main:
            return ()
        folder.mkdir(parents=True, exist_ok=True)  # Another rank may already have written its random state there.
        if self._tokenizer is None:
            # Saving a fast tokenizer while another thread pads with it raises "Already borrowed".
            self._tokenizer = copy.deepcopy(tokenizer)
        if is_adapter(model):
            # Without the base: a state dict of 4-bit layers holds further tensors, which would be copied each time.
            named = model.named_parameters(remove_duplicate=False)
            whole = {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
        else:
            whole = model.state_dict()
        state = saver.take(whole, unchanging=list_frozen(model))
        return [partial(self._write_model, folder, model, state)]

    def save_optimizer(self, folder: Path, trained: Trained, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Copy the optimizer states."""
        if not saver.is_main:
            return ()
        # torch.save writes attributes of tensors. bitsandbytes would take a state that resuming has loaded onto a GPU
        # for paged memory, and end the process.
        states = trained.optimizer.state_dict()
        state = tree_map_only(Tensor, lambda value: value.detach() if hasattr(value, "is_paged") else value, states)
        return [partial(write_state, saver.take(state), folder / OPTIMIZER_NAME)]

    def compare(self, folder: Path, model: Any, trained: Trained) -> None:
        """Compare weights and optimizer states bit for bit, and load every state file as resuming does."""
        live = read_adapter_state(model) if is_adapter(model) else model.state_dict()
        for file in sorted(folder.glob("*.safetensors")):
            compare_weights(file, live)
        for file in sorted(file for pattern in _STATES for file in folder.glob(pattern)):
            compare_state(file, trained.optimizer.state_dict() if file.name == OPTIMIZER_NAME else None)

    def save_trained(self, place: Path, trained: Trained, saver: CheckpointSaver) -> Sequence[Task]:
        """Save one of several trained models in a checkpoint, and its optimizer states; every process must call.

        Args:
            place: Path prefix of the files, such as ``checkpoint-5/critic``.
            trained: Parameters and optimizer, after a step.
            saver: Saver that copies tensors to host memory.

        Returns:
            Tasks that write the files.
        """
        if not saver.is_main:
            return ()
        copies = saver.take({"weights": dict(trained.parameters), "states": trained.optimizer.state_dict()})
        weights = {name: value.detach().contiguous() for name, value in copies["weights"].items()}
        return [
            partial(save_file, weights, Path(f"{place}.safetensors")),
            partial(write_state, copies["states"], Path(f"{place}_optimizer.pt")),
        ]

    def verify_trained(self, place: Path, shapes: Mapping[str, torch.Size]) -> None:
        """Reopen the weights that ``save_trained`` wrote; raises ``BrokenSaveError`` on a fault."""
        if get_rank() == 0:
            verify_weights(place.parent, shapes, f"{place.name}.safetensors")

    def compare_trained(self, place: Path, trained: Trained) -> None:
        """Compare the files of ``save_trained`` with the live tensors, bit for bit; raises ``BrokenSaveError``."""
        if get_rank() == 0:
            compare_weights(Path(f"{place}.safetensors"), trained.parameters)
            compare_state(Path(f"{place}_optimizer.pt"), trained.optimizer.state_dict())

    def _write_model(self, folder: Path, model: Any, state: Mapping[str, Any]) -> None:
        # ``save_original_format=False``: transformers 5.23 loads a checkpoint by the model's own parameter names, and
        # silently skips experts under their published names. ``save_embedding_layers=False``: otherwise PEFT asks the
        # Hub for the base configuration, to see whether embeddings were resized.
        options: Any = {"save_embedding_layers": False} if is_adapter(model) else {"save_original_format": False}
        model.save_pretrained(folder, state_dict=dict(state), **options)
        _save_generation_config(folder, model)
        self._tokenizer.save_pretrained(folder)


class ShardedLayout(ModelLayout):
    """FSDP2 or tensor parallelism: tensors are ``DTensor``, and every process writes its own shards."""

    engine = "FSDP"
    writes_copies = True

    def save_model(self, folder: Path, model: Any, tokenizer: Any, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Copy the trainable shards; the main process writes configurations and tokenizer."""
        if saver.is_main:
            save_description(folder, model, tokenizer)
        return [copy_model_shards(folder, read_trained_state(model), saver, list_frozen(model))]

    def save_optimizer(self, folder: Path, trained: Trained, saver: CheckpointSaver) -> Sequence[Task] | None:
        """Copy the shards of the optimizer states."""
        return [copy_optimizer_shards(folder, trained, saver)]

    def load_model(self, folder: Path, model: nn.Module) -> bool:
        """Load sharded weights of any world size, or unsharded ones."""
        if not super().load_model(folder, model):
            reshard(model)
            load_tensors(folder, read_adapter_state(model) if is_adapter(model) else read_trained_state(model))
        return True

    def load_optimizer(self, folder: Path, model: Any, trained: Trained, build: Build) -> bool:
        """Load sharded optimizer states of any world size, or unsharded ones."""
        if not super().load_optimizer(folder, model, trained, build):
            groups = [group["params"] for group in trained.optimizer.param_groups]
            load_whole_optimizer(folder / OPTIMIZER_NAME, trained.optimizer, groups)
        return True

    def gather(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Gather tensor by tensor, from all pipeline stages."""
        return gather_trained_state(model)

    def build_verification(self, model: Any) -> Callable[[Path], None]:
        """Return a function with which each process reopens the shards that it wrote."""
        return partial(verify_shards, shapes=self._read_shapes(model))

    def compare(self, folder: Path, model: Any, trained: Trained) -> None:
        """Compare this process's shards with the live ones, bit for bit."""
        compare_own_shards(folder, read_trained_state(model), trained)

    def save_trained(self, place: Path, trained: Trained, saver: CheckpointSaver) -> Sequence[Task]:
        """As ``ReplicatedLayout.save_trained``; each process writes its shards."""
        return [
            copy_model_shards(place, trained.parameters, saver),
            copy_optimizer_shards(place, trained, saver),
        ]

    def verify_trained(self, place: Path, shapes: Mapping[str, torch.Size]) -> None:
        """As ``ReplicatedLayout.verify_trained``."""
        verify_shards(place, shapes)

    def compare_trained(self, place: Path, trained: Trained) -> None:
        """As ``ReplicatedLayout.compare_trained``."""
        compare_own_shards(place, trained.parameters, trained)

    def _read_shapes(self, model: Any) -> Mapping[str, torch.Size]:
        # ``DTensor.shape`` is the shape of the unsharded tensor.
        return {name: tensor.shape for name, tensor in read_trained_state(model).items()}


class PipelineLayout(ShardedLayout):
    """Pipeline parallelism: a process holds the layers of its stage, replicated or sharded within the stage's ranks."""

    def load_optimizer(self, folder: Path, model: Any, trained: Trained, build: Build) -> bool:
        """Load the states of this stage's parameters."""
        if (folder / OPTIMIZER_SHARDS).is_dir():
            load_optimizer_shards(folder, trained, is_part=True)
            return True
        whole = build_whole_on_meta(model)
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        # An unsharded file numbers the parameters of the whole model in the order of its groups. A whole model on the
        # meta device has the same groups, from which names and so this stage's parameters follow.
        numbered = [[names[id(parameter)] for parameter in group["params"]] for group in build(whole).param_groups]
        groups = [[trained.parameters.get(name) for name in group] for group in numbered]
        load_whole_optimizer(folder / OPTIMIZER_NAME, trained.optimizer, groups)
        return True

    def _read_shapes(self, model: Any) -> Mapping[str, torch.Size]:
        shapes: Mapping[str, torch.Size] = model.whole_shapes
        return shapes


def save_description(folder: Path, model: Any, tokenizer: Any) -> None:
    """Save configurations and tokenizer of a model or of its active adapter, without weights."""
    base = unwrap_adapter(model)
    config = model.peft_config[model.active_adapter] if is_adapter(model) else model.config
    # As in ``save_pretrained``. ``fully_shard`` replaces the class by a subclass named ``FSDP<class>``.
    base.config.architectures = [type(base).__name__.removeprefix("FSDP")]
    generation = [base.generation_config] if base.can_generate() else []
    for part in (config, *generation, tokenizer):
        part.save_pretrained(folder)


def _save_generation_config(folder: Path, model: Any) -> None:
    """Save that of an adapter, unlike PEFT: when evaluated or merged, it must stop at the tokens of training."""
    if is_adapter(model) and (base := unwrap_adapter(model)).can_generate():
        base.generation_config.save_pretrained(folder)


def load_trained(place: Path, trained: Trained) -> None:
    """Load files of ``save_trained`` from any layout into parameters of any layout; every process must call.

    Args:
        place: Path prefix of the files, as for ``save_trained``.
        trained: Parameters and optimizer, filled in place.

    Raises:
        DataError: The names of the saved weights differ from those of ``trained``.
    """
    parameters, optimizer = trained.parameters, trained.optimizer
    if (place / MODEL_SHARDS).is_dir():
        load_tensors(place / MODEL_SHARDS, parameters)
        load_optimizer_shards(place, trained)
        return
    weights = load_file(f"{place}.safetensors")
    if weights.keys() != parameters.keys():
        found = f"its {place.name} has other parameters than the {place.name} of this run"
        raise DataError(Problem(str(place.parent), found, "delete it, or train the model that it was saved from"))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(weights[name], parameter))
    groups = [group["params"] for group in optimizer.param_groups]
    load_whole_optimizer(Path(f"{place}_optimizer.pt"), optimizer, groups)


def choose_layout(trainer: Trainer) -> ModelLayout:
    """Return the layout of a trainer's model, from accelerate's plugin and the model's tensors."""
    if trainer.is_deepspeed_enabled:
        return ModelLayout()
    model: Any = trainer.model
    if hasattr(model, "part"):
        return PipelineLayout()
    # accelerate shards the model later.
    return ShardedLayout() if trainer.is_fsdp_enabled or has_shards(model) else ReplicatedLayout()


def choose_learner_layout(model: nn.Module) -> ReplicatedLayout | ShardedLayout:
    """Return the layout of a model that is trained by a custom loop instead of a trainer."""
    return ShardedLayout() if has_shards(model) else ReplicatedLayout()
