"""Incompatible options of recipe and launch file: one table for ``recipes check``, every start and the docs.

The table is ``compatibility.yaml``; its conditions are defined here.

``python -m recipes_lib.training.layouts.compatibility`` prints the table of ``docs/hardware.md``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.rules import STOCHASTIC_ADAMW
from recipes_lib.config.schema import RecipeConfig, flatten_config
from recipes_lib.config.table import read_lists
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.layouts.launch_environment import Launch

Keys = Mapping[str, Any]
"""Keys of a recipe that are in effect; an absent key has upstream's default."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A combination that would fail late, or silently compute something else.

    Attributes:
        launch: Description of the launch, in Markdown.
        is_launched: Predicate of affected launches.
        why: Consequence of the combination.
        remedy: What to do instead.
        keys: Keys of the recipe; the problem names the first one that is set, or the launch file if there are none.
        recipe_text: Description of the recipe, in Markdown; empty: one of ``keys`` is set, or any recipe.
        recipes: Affected recipes; empty: all.
        affects: Predicate of affected keys; ``None``: one of ``keys`` is set, or always without ``keys``.
    """

    launch: str
    is_launched: Callable[[Launch], object]
    why: str
    remedy: str
    keys: tuple[str, ...] = ()
    recipe_text: str = ""
    recipes: tuple[str, ...] = ()
    affects: Callable[[Keys, Launch], object] | None = None

    def applies(self, keys: Keys, launch: Launch) -> bool:
        """Return whether this combination applies to a recipe and a launch."""
        if not self.is_launched(launch):
            return False
        if self.affects is not None:
            return bool(self.affects(keys, launch))
        return not self.keys or any(keys.get(key) for key in self.keys)

    def build_problem(self, keys: Keys, config: RecipeConfig, file: str) -> Problem:
        """Return the problem of an affected recipe: key, reason, and remedy.

        Args:
            keys: Keys of the recipe that are in effect.
            config: The recipe.
            file: Name of the launch file in the problem.
        """
        if not self.keys:
            subject = f"recipes/{config.recipe}.py and a launch with {self.launch}" if self.recipes else self.launch
            return Problem(file, f"{subject}: {self.why}", self.remedy)
        key = next((key for key in self.keys if keys.get(key)), self.keys[0])
        subject = f"`{key}: {keys[key]}`" if key in keys else f"`{key}`, which is not given,"
        where = config.provenance.get(key, "default")
        found = f"{subject} and a launch with {self.launch}: {self.why}"
        return Problem(key if where == "default" else where, found, self.remedy)


BITSANDBYTES: Final = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Values of ``optim`` that bitsandbytes implements."""
_NOT_SHARDED: Final = (*BITSANDBYTES, "adafactor", STOCHASTIC_ADAMW, "adamw_torch_4bit")


def _uses_zero3(launch: Launch) -> bool:
    return launch.engine == "DEEPSPEED" and launch.layout.zero_stage == 3


def _has_pipeline(launch: Launch) -> bool:
    return launch.layout.pipeline_stages > 1


def _count_batches(keys: Keys) -> int:
    return int(keys.get("gradient_accumulation_steps", 1))


def _trains_few_bits(keys: Keys, launch: Launch) -> bool:
    """Whether 16-bit weights are trained with mixed precision, for which accelerate converts them to ``float32``."""
    is_all_float32 = launch.precision == "no" and keys.get("bf16") is False and not keys.get("fp16")
    return keys.get("dtype") in ("bfloat16", "float16") and not keys.get("use_peft") and not is_all_float32


def _copies_policy(keys: Keys, _: Launch) -> bool:
    """Whether the reference is a frozen copy of the whole policy, as ``prepare_reference`` decides."""
    # A new adapter is the identity, but PiSSA and OLoRA subtract its product from the base weights.
    has_base = (
        keys.get("use_peft")
        and not keys.get("adapter_name_or_path")
        and keys.get("init_lora_weights") not in ("pissa", "olora")
    )
    is_live = keys.get("precompute_ref_log_probs") is False and not keys.get("ref_model_name_or_path")
    return is_live and not has_base


def _has_precision(name: str) -> Callable[[Launch], object]:
    return lambda launch: launch.precision == name


def _has_axis(*axes: str) -> Callable[[Launch], object]:
    """Return the condition that the device mesh has one of these axes."""
    return lambda launch: set(axes) & set(launch.layout.sizes)


_LAUNCHES: Final[Mapping[str, Callable[[Launch], object]]] = {
    **{name: _has_precision(name) for name in ("bf16", "fp16", "fp8")},
    "scaled precision": lambda launch: launch.precision in ("fp16", "fp8"),
    "engine": lambda launch: launch.engine,
    "FSDP": lambda launch: launch.engine == "FSDP",
    "DeepSpeed": lambda launch: launch.engine == "DEEPSPEED",
    "ZeRO-3": _uses_zero3,
    "no FSDP": lambda launch: launch.engine != "FSDP",
    "no FSDP2": lambda launch: launch.layout.fsdp_version != 2,
    "no ZeRO-3": lambda launch: not _uses_zero3(launch),
    "CPU": lambda launch: launch.layout.uses_cpu,
    "number of micro-batches": lambda launch: launch.layout.accumulation is not None,
    "gradient clipping": lambda launch: launch.layout.clipping is not None,
    "sharding strategy": lambda launch: launch.layout.has_strategy,
    "sharded save": lambda launch: not launch.layout.gathers_on_save,
    "recomputation": lambda launch: launch.layout.recomputes,
    "offload or recomputation": lambda launch: launch.layout.offloads_weights or launch.layout.recomputes,
    "offloaded optimizer": lambda launch: launch.layout.offloads_optimizer,
    "mesh": lambda launch: launch.layout.sizes,
    "unfilled mesh": lambda launch: (
        launch.layout.sizes
        and launch.layout.pipeline_stages * math.prod(launch.layout.sizes.values()) != launch.world_size
    ),
    "nothing to shard over": lambda launch: not {"dp_shard", "tp", "cp"} & set(launch.layout.sizes),
    "dp_replicate": _has_axis("dp_replicate"),
    "tp or dp_replicate": _has_axis("tp", "dp_replicate"),
    "cp": _has_axis("cp"),
    "sp": lambda launch: launch.shares_by_heads,
    "tensor parallelism": lambda launch: launch.tensor_size > 1,
    "context parallelism": lambda launch: launch.context_size > 1,
    "pipeline parallelism": _has_pipeline,
    "uneven pipelines": lambda launch: launch.world_size % launch.layout.pipeline_stages,
    "1f1b": lambda launch: _has_pipeline(launch) and launch.layout.schedule == "1f1b",
    "interleaved": lambda launch: _has_pipeline(launch) and launch.layout.schedule == "interleaved",
    "DeepSpeed or dp_replicate or context": lambda launch: (
        launch.engine == "DEEPSPEED" or {"dp_replicate", "cp", "sp"} & set(launch.layout.sizes)
    ),
    "DeepSpeed or parallel tensors or context": lambda launch: (
        launch.engine == "DEEPSPEED" or launch.tensor_size > 1 or launch.context_size > 1
    ),
    "engine or parallel context or pipeline": lambda launch: (
        launch.engine or launch.context_size > 1 or _has_pipeline(launch)
    ),
}
"""Conditions on a launch by their names in ``compatibility.yaml``."""
_CONDITIONS: Final[Mapping[str, Callable[[Keys, Launch], object]]] = {
    "trains 16-bit weights": _trains_few_bits,
    "copies the policy": _copies_policy,
    "optimizer that cannot be sharded": lambda keys, _: keys.get("optim") in _NOT_SHARDED,
    "another number of micro-batches": lambda keys, launch: launch.layout.accumulation != _count_batches(keys),
    "another gradient clipping": lambda keys, launch: launch.layout.clipping != keys.get("max_grad_norm", 1.0),
    "fewer micro-batches than pipeline stages": lambda keys, launch: (
        _count_batches(keys) < launch.layout.pipeline_stages
    ),
    "micro-batches not in groups of pipeline stages": lambda keys, launch: (
        _count_batches(keys) % launch.layout.pipeline_stages
    ),
}
"""Conditions on keys and launch by their names in ``compatibility.yaml``."""


def _build_condition(entry: Mapping[str, Any], named: Sequence[str]) -> Callable[[Keys, Launch], object] | None:
    if "values" in entry:
        return lambda keys, _: keys.get(named[0]) in entry["values"]
    if "except" in entry:
        return lambda keys, _: keys.get(named[0], entry["except"][0]) not in entry["except"]
    return _CONDITIONS[entry["condition"]] if "condition" in entry else None


def _build(entry: Mapping[str, Any]) -> Blocked:
    """Build an entry of ``compatibility.yaml``, whose first comment describes the fields."""
    keys = tuple(entry.get("keys", "").split())
    conditions = [_LAUNCHES[name] for name in entry["if"].split(", ")]
    return Blocked(
        entry["launch"],
        lambda launch: all(holds(launch) for holds in conditions),
        entry["why"],
        entry["remedy"],
        keys,
        entry.get("recipe_text", ""),
        tuple(entry.get("recipes", "").split()),
        _build_condition(entry, keys),
    )


BLOCKED: Final = tuple(
    _build(entry)
    for entries in read_lists(Path(__file__).with_name("compatibility.yaml")).values()
    for entry in entries
)
"""All incompatible combinations."""


def verify_combination(config: RecipeConfig, launch: Launch, file: str = "launch file") -> None:
    """Raise for incompatible options of a recipe and a launch file.

    Args:
        config: The recipe.
        launch: The launch.
        file: Name of the launch file in the error.

    Raises:
        ConfigError: At least one row of ``BLOCKED`` applies; the error lists all.

    Source: ``tests/training/layouts/test_compatibility.py``.
    """
    keys = flatten_config(config)
    rows = [row for row in BLOCKED if not row.recipes or config.recipe in row.recipes]
    if problems := [row.build_problem(keys, config, file) for row in rows if row.applies(keys, launch)]:
        raise ConfigError(*problems)


def format_table() -> str:
    """Return the table of ``docs/hardware.md``, in Markdown."""
    rows = [
        f"| {row.recipe_text or ', '.join(f'`{key}`' for key in row.keys) or 'any'} "
        f"| {row.launch} | {row.why} | {row.remedy} |\n"
        for row in BLOCKED
    ]
    return "".join(("| recipe | launch file | why not | instead |\n", "|---|---|---|---|\n", *rows))


if __name__ == "__main__":
    sys.stdout.write(format_table())
