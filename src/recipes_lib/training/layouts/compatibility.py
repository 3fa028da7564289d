"""Incompatible options of recipe and launch file: one table for ``recipes check``, every start and the docs.

The table is ``compatibility.yaml``; its conditions are defined here. ``tests/config/generate.py`` writes the table of
``docs/hardware.md`` from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A combination that would fail late, or silently compute something else; an entry of ``compatibility.yaml``.

    Attributes:
        launch: Description of the launch, in Markdown.
        when: Conditions on the launch, such as ``FSDP, no FSDP2``: all must hold, of those joined by ``or`` one.
        why: Consequence of the combination.
        remedy: What to do instead.
        keys: Keys of the recipe; the problem names the first one that is set, or the launch file if there are none.
        values: Affected values of the first key.
        exempt: Values of the first key that are not affected, its default first.
        condition: Condition on keys and launch. Without it, ``values`` and ``exempt``, one of ``keys`` must be set.
        recipe_text: Description of the recipe, in Markdown; empty: one of ``keys`` is set, or any recipe.
        recipes: Affected recipes; empty: all.
    """

    launch: str
    when: str
    why: str
    remedy: str
    keys: Sequence[str] = ()
    values: Sequence[Any] = ()
    exempt: Sequence[Any] = ()
    condition: str = ""
    recipe_text: str = ""
    recipes: Sequence[str] = ()

    def applies(self, keys: Keys, launch: Launch) -> bool:
        """Return whether this combination applies to a recipe and a launch."""
        holding = _list_conditions(keys, launch)
        if not all(any(holding[name] for name in part.split(" or ")) for part in self.when.split(", ")):
            return False
        if self.condition:
            return bool(holding[self.condition])
        if self.values:
            return keys.get(self.keys[0]) in self.values
        if self.exempt:
            return keys.get(self.keys[0], self.exempt[0]) not in self.exempt
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
        found = f"{subject} and a launch with {self.launch}: {self.why}"
        return Problem(config.locate(key), found, self.remedy)


BITSANDBYTES: Final = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Values of ``optim`` that bitsandbytes implements."""
_NOT_SHARDED: Final = (*BITSANDBYTES, "adafactor", STOCHASTIC_ADAMW, "adamw_torch_4bit")


def _copies_policy(keys: Keys) -> bool:
    """Whether the reference is a frozen copy of the whole policy, as ``prepare_reference`` decides."""
    # A new adapter is the identity, but PiSSA and OLoRA subtract its product from the base weights.
    has_base = (
        keys.get("use_peft")
        and not keys.get("adapter_name_or_path")
        and keys.get("init_lora_weights") not in ("pissa", "olora")
    )
    is_live = keys.get("precompute_ref_log_probs") is False and not keys.get("ref_model_name_or_path")
    return is_live and not has_base


def _list_conditions(keys: Keys, launch: Launch) -> dict[str, object]:
    """Return whether each condition of ``compatibility.yaml`` and its negation, ``no NAME``, hold, by their names."""
    layout, stages, engine = launch.layout, launch.layout.pipeline_stages, launch.engine
    schedule = layout.schedule if stages > 1 else ""
    num_batches = int(keys.get("gradient_accumulation_steps", 1))
    is_all_float32 = launch.precision == "no" and keys.get("bf16") is False and not keys.get("fp16")
    conditions = {
        **{name: launch.precision == name for name in ("bf16", "fp16", "fp8")},
        **{axis: axis in layout.sizes for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")},
        "engine": engine,
        "FSDP": engine == "FSDP",
        "FSDP2": layout.fsdp_version == 2,
        "DeepSpeed": engine == "DEEPSPEED",
        "ZeRO-3": engine == "DEEPSPEED" and layout.zero_stage == 3,
        "CPU": layout.uses_cpu,
        "number of micro-batches": layout.accumulation is not None,
        "gradient clipping": layout.clipping is not None,
        "sharding strategy": layout.has_strategy,
        "gathering save": layout.gathers_on_save,
        "recomputation": layout.recomputes,
        "offloaded weights": layout.offloads_weights,
        "one loading rank": layout.loads_once,
        "offloaded optimizer": layout.offloads_optimizer,
        "mesh": layout.sizes,
        "filled mesh": stages * math.prod(layout.sizes.values()) == launch.world_size,
        "pipeline": stages > 1,
        "uneven pipelines": launch.world_size % stages,
        "1f1b": schedule == "1f1b",
        "interleaved": schedule == "interleaved",
        # accelerate converts 16-bit weights to ``float32`` for mixed precision.
        "trains 16-bit weights": (
            keys.get("dtype") in ("bfloat16", "float16") and not keys.get("use_peft") and not is_all_float32
        ),
        "copies the policy": _copies_policy(keys),
        "optimizer that cannot be sharded": keys.get("optim") in _NOT_SHARDED,
        "another number of micro-batches": layout.accumulation != num_batches,
        "another gradient clipping": layout.clipping != keys.get("max_grad_norm", 1.0),
        "fewer micro-batches than pipeline stages": num_batches < stages,
        "micro-batches not in groups of pipeline stages": num_batches % stages,
    }
    return conditions | {f"no {name}": not holds for name, holds in conditions.items()}


BLOCKED: Final = tuple(
    Blocked(**entry | {name: entry[name].split() for name in ("keys", "recipes") if name in entry})
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
