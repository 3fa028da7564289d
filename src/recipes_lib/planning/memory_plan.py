"""Memory plan of a process: layouts, components with their formulas, phases, and whether it fits a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from transformers import PreTrainedConfig

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.table import read_lists
from recipes_lib.losses.projection import choose_chunk_bytes, count_chunk_tokens
from recipes_lib.models.parallel.pipeline_part import PipelinePart
from recipes_lib.models.parallel.tensor_parallel import verify_tensor_parallel
from recipes_lib.models.structure import find_head_dim

SAMPLING_BYTES: Final = 28
"""Bytes per logit while a token is sampled: 4 of the model, 24 of the sampler, which sums in 64 bits."""
CONTEXT_BYTES: Final = 1_000_000_000
"""Estimated bytes of CUDA on an H100: context, loaded kernels, and workspaces of cuBLAS."""
COMMUNICATION_BYTES: Final = 1_500_000_000
"""Estimated bytes of NCCL's channels and process groups, if there are several GPUs."""
_RESERVED: Final = 0.05
"""Memory lost to fragmentation of PyTorch's allocator with expandable segments, as a share of what is allocated."""
MARGIN: Final = 0.1
"""Share of a device to leave free (``auto`` does), because plans have been up to 10 % below measurements."""
KINDS: Final = ("weights", "gradients", "optimizer states")

LOGITS: Final = "logits of the loss"
ENGINE: Final = "vLLM's weights"
ENGINE_CACHE: Final = "vLLM's KV cache"
CONTEXT: Final = "CUDA context and workspaces"
COMMUNICATION: Final = "NCCL buffers"
RESERVE: Final = "fragmentation reserve"
UPDATE: Final = "gradients in the update"
_TABLE: Final = read_lists(Path(__file__).with_name("components.yaml"))
FORMULAS: Final[Mapping[str, str]] = _TABLE["formulas"]
"""Formula of each component by its name, of models by the part after the model."""
PHASES: Final[Mapping[str, Mapping[str, Sequence[str]]]] = _TABLE["phases"]
"""Phases of a step of distillation and of an iteration of PPO (``rl``), each with its temporary components; components
in no phase are held in all of them."""


class Held(NamedTuple):
    """Bytes of a model's weights, gradients and optimizer states; in ``Layout.shards``, processes that shard each."""

    weights: int = 0
    gradients: int = 0
    states: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a run's models over its processes.

    Attributes:
        launch_file: Name of a file in ``accelerate_configs/``, without its suffix.
        num_processes: Data-parallel processes; each is one GPU or a model-parallel group of GPUs.
        shards: Processes that share weights, gradients and optimizer states: 1 if each process holds all, 0 if they are
            offloaded to the host.
        tensor: Ranks of a tensor-parallel group.
        context: Ranks of a context-parallel group.
        gathers_keys: Whether context-parallel ranks gather keys and values; with Ulysses they exchange heads.
        pipeline_stages: Number of pipeline stages.
        in_flight: Micro-batches whose activations the first pipeline stage holds at once.
        is_deepspeed: Whether ZeRO casts the weights to 16 bits and keeps a 32-bit copy with the optimizer states.
    """

    launch_file: str
    num_processes: int = 1
    shards: Held = Held(1, 1, 1)  # noqa: RUF009 - immutable
    tensor: int = 1
    context: int = 1
    gathers_keys: bool = False
    pipeline_stages: int = 1
    in_flight: float = 1
    is_deepspeed: bool = False

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all processes."""
        return self.num_processes * self.tensor * self.context * self.pipeline_stages

    @property
    def replicas(self) -> int:
        """Number of groups of hybrid sharding, each of which holds the whole model."""
        shards = self.shards.weights
        return self.num_gpus // (shards * self.tensor * self.pipeline_stages) if shards > 1 else 1

    def __str__(self) -> str:
        shared = [kind for kind, shards in zip(KINDS, self.shards, strict=True) if shards > 1]
        how = "a copy of everything on each process" if any(self.shards) else "the layers in use on each process"
        if shared:
            what = "" if len(shared) == len(KINDS) else f"{' and '.join(shared)} "
            how = f"{what}shared by {max(self.shards)} processes"
        if on_host := [kind for kind, shards in zip(KINDS, self.shards, strict=True) if not shards]:
            how += f"; on the host {', '.join(on_host)}"
        for name, size in {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline_stages}.items():
            how += f"; {name} parallel over {size}" if size > 1 else ""
        return f"accelerate_configs/{self.launch_file}.yaml: {how}"

    def choose_compilation(self, config: RecipeConfig) -> RecipeConfig:
        """Return the run without compilation if ranks share layers or tokens, as training decides then by default."""
        is_whole = max(self.tensor, self.context, self.pipeline_stages) == 1
        return config if is_whole else config.with_training({"torch_compile": False})

    def narrow(self, model_config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration of the part that one process computes, by tensor and pipeline parallelism.

        Raises:
            ConfigError: Heads or layers of the model are not divisible.
        """
        narrowed = copy.deepcopy(model_config)
        text = narrowed.get_text_config()
        if self.tensor > 1:
            verify_tensor_parallel(model_config, self.tensor)
            text.head_dim = find_head_dim(text)
            for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
                setattr(text, name, getattr(text, name) // self.tensor)
            text.pad_token_id = None  # It may be in another rank's part of the vocabulary.
        if self.pipeline_stages > 1:
            (layers,) = PipelinePart(0, self.pipeline_stages).share_layers(text.num_hidden_layers)
            narrowed = shorten(narrowed, len(layers))
            # The first stage has the embedding, the last one the projection: neither has both.
            narrowed.tie_word_embeddings = True
        return narrowed


def shorten(model_config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """Return the configuration of the same model with fewer layers."""
    shortened = copy.deepcopy(model_config)
    settings = shortened.get_text_config()
    settings.num_hidden_layers = num_layers
    # Some architectures derive them from the number of layers.
    if len(layer_types := getattr(settings, "layer_types", None) or []) > num_layers:
        settings.layer_types = layer_types[:num_layers]
    return shortened


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one process.

    Attributes:
        layout: Layout of the models over the processes.
        about: Which models share a base model, and packages whose kernels are counted, for the report; may be empty.
        components: Bytes of each component by name.
        phases: Names of the temporary components of each phase; all others are held in every phase. Empty if everything
            is held at once.
        num_predicted: Tokens of a micro-batch whose logits are computed.
        vocabulary: Logits per token.
        logit_bytes: Bytes per logit of a chunk.
        chunk_part: Divisor of the bytes of a chunk.
        engine_share: Share of the device for weights and KV cache of a colocated engine; 0 without one.
        engine_row: Bytes of the engine's KV cache for one row.
        host_bytes: Weights, gradients and optimizer states that are offloaded to host memory.
        choices: With ``activation_checkpointing: auto``, the components that depend on it by kind, the fastest first;
            otherwise empty.
        checkpointing: Kind that was chosen for the device; empty without ``choices``.
    """

    layout: Layout
    about: str
    components: Mapping[str, int]
    phases: Mapping[str, Sequence[str]]
    num_predicted: int = 0
    vocabulary: int = 1
    logit_bytes: int = 6
    chunk_part: int = 1
    engine_share: float = 0
    engine_row: int = 0
    host_bytes: int = 0
    choices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    checkpointing: str = ""

    @property
    def peaks(self) -> dict[str, int]:
        """Peak bytes of each phase."""
        temporary = {name for names in self.phases.values() for name in names}
        resident = sum(size for name, size in self.components.items() if name not in temporary)
        return {
            phase: resident + sum(self.components.get(name, 0) for name in names)
            for phase, names in (self.phases or {"": ()}).items()
        }

    @property
    def peak(self) -> int:
        """Peak bytes of the run, those of the largest phase."""
        return max(self.peaks.values())

    @property
    def allocated(self) -> int:
        """Peak bytes that PyTorch allocates: without CUDA context, NCCL buffers and fragmentation."""
        return self.peak - sum(self.components.get(name, 0) for name in (CONTEXT, COMMUNICATION, RESERVE))

    def place(self, device_bytes: float) -> MemoryPlan:
        """Return the plan for a device of this size, which determines logit chunks, engine cache and fragmentation.

        ``auto`` becomes the fastest kind of activation checkpointing that leaves ``MARGIN`` free, or else the last.
        """
        *_, plan = self._try_choices(device_bytes)
        return plan

    def _try_choices(self, device_bytes: float) -> Iterator[MemoryPlan]:
        """Yield the plan with each kind of activation checkpointing, up to the first that leaves ``MARGIN`` free."""
        for name, sizes in (self.choices or {"": {}}).items():
            plan = dataclasses.replace(self, components={**self.components, **sizes}, checkpointing=name)
            plan = plan._place(device_bytes)
            yield plan
            if plan.peak <= (1 - MARGIN) * device_bytes:
                return

    def _place(self, device_bytes: float) -> MemoryPlan:
        chunk_bytes = choose_chunk_bytes(device_bytes) // self.chunk_part
        num_tokens = min(self.num_predicted, count_chunk_tokens(self.vocabulary, chunk_bytes))
        components = {name: size for name, size in self.components.items() if name not in (LOGITS, RESERVE)}
        if num_tokens:
            components[LOGITS] = self.logit_bytes * self.vocabulary * num_tokens
        if self.engine_share:
            rest = round(self.engine_share * device_bytes) - components[ENGINE]
            components[ENGINE_CACHE] = max(rest, self.engine_row)
        plan = dataclasses.replace(self, components=components)
        foreign = sum(components.get(name, 0) for name in (CONTEXT, COMMUNICATION))
        return dataclasses.replace(plan, components={**components, RESERVE: round(_RESERVED * (plan.peak - foreign))})

    def explain_choice(self, device_bytes: float) -> str:
        """Return the memory of each kind of activation checkpointing on a device of this size, up to the chosen one."""
        parts = [f"{one.checkpointing} {one.peak / 1e9:.1f} GB" for one in self._try_choices(device_bytes)]
        return f"{', '.join(parts)}; {(1 - MARGIN) * device_bytes / 1e9:.1f} GB may be planned"

    def fits(self, device_bytes: float) -> bool:
        """Return whether the run fits a device of this size, and a colocated engine its share of it."""
        if self.engine_share * device_bytes < self.components.get(ENGINE, 0) + self.engine_row:
            return False
        return self.place(device_bytes).peak <= device_bytes

    def describe(self, devices: Mapping[str, float], *, explains: bool = False) -> Iterator[str]:
        """Yield the lines of a report: layout, components and phases in units of 10^9 bytes, and devices that fit.

        Args:
            devices: Bytes of each device by name.
            explains: Whether each component is followed by its formula.
        """
        yield str(self.layout)
        if self.about:
            yield f"    {self.about}"
        placed = self.place(max(devices.values()))
        for name, size in placed.components.items():
            formula = FORMULAS.get(name) or FORMULAS[name.rpartition(", ")[2]]
            yield f"{size / 1e9:13.2f} GB  {name}" + (f" = {formula}" if explains else "")
        if self.phases:
            yield "    at once, with weights and optimizer states:"
            yield from (f"{size / 1e9:13.2f} GB  {name}" for name, size in placed.peaks.items())
        if self.host_bytes:
            yield f"    host memory of each process: {self.host_bytes / 1e9:.2f} GB"
        fitting = [name for name, size in devices.items() if self.fits(size)]
        verdict = f"fits {', '.join(fitting)}" if fitting else f"does not fit {', '.join(devices)}"
        if placed.checkpointing:
            yield f"    activation checkpointing: {placed.checkpointing} ({self.explain_choice(max(devices.values()))})"
        yield f"    {placed.peak / 1e9:.1f} GB {'at most' if self.phases else 'with all of it at once'}: {verdict}"
