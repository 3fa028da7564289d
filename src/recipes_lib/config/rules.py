"""Constraints between keys: each rule is a generator of problems, independent of the others."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.paths import check_folders, check_paths, is_local
from recipes_lib.config.schema import AdapterConfig, QuantizationConfig
from recipes_lib.config.table import describe, load_table, read_lists
from recipes_lib.config.values import Settings
from recipes_lib.errors import Problem, suggest

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Import path of a reward function or metric: ``module:name``."""

_TABLES: Final = read_lists(Path(__file__).with_name("rules.yaml"))
_EXCLUSIVE: Final = [
    (first, second, entry["remedy"].format(first=first))
    for entry in _TABLES["exclusive"]
    for first in entry["first"].split()
    for second in entry["second"].split()
]
"""Pairs of mutually exclusive keys, with the remedy; a problem is reported at the second key."""

DECISIONS: Final[Sequence[Mapping[str, Any]]] = _TABLES["decisions"]
"""Keys that have no effect because of another one: ``key``, ``decider``, ``why``, ``becomes``, and conditions."""
SHARE_OR_COUNT: Final = ("warmup_steps", "logging_steps", "eval_steps", "save_steps", "test_split_size", "decay_steps")
"""Keys that are a share of the run or dataset below 1, and an integer count from 1."""
_HAVE_REFERENCE: Final = tuple(
    loss for loss in load_table("dpo").keys["loss_type"].schema["items"]["enum"] if loss not in ("simpo", "orpo", "sft")
)
_ADAPTER_KEYS: Final = [field.name for section in (AdapterConfig, QuantizationConfig) for field in fields(section)]
STOCHASTIC_ADAMW: Final = "adamw_bf16_stochastic"
"""Value of ``optim`` that selects ``StochasticAdamW``."""
_ROUNDING_OPTIMIZERS: Final = ("adamw_torch_4bit", "adamw_torch_8bit")
"""torchao optimizers with the argument ``bf16_stochastic_round``; transformers ignores it for others."""
_ROUNDING = re.compile(r"\bbf16_stochastic_round=(y|yes|t|true|on|1)\b", re.IGNORECASE)
"""That argument in ``optim_args``, with the values that transformers reads as true."""
_NEEDED_OPTIONS: Final = {
    "warmup_stable_decay": {"num_decay_steps"},
    "cosine_with_min_lr": {"min_lr", "min_lr_rate"},
    "cosine_warmup_with_min_lr": {"min_lr", "min_lr_rate"},
}
"""Schedule of transformers -> options of ``lr_scheduler_kwargs``, of which it requires exactly one."""
_TEXT_OPTIONS = frozenset({"mode", "threshold_mode", "warmup_type", "decay_type", "smooth"})
"""Options of ``lr_scheduler_kwargs`` that are no numbers."""
METRICS: Final[Mapping[str, Sequence[str]]] = {kind: names.split() for kind, names in _TABLES["metrics"].items()}
"""``text``, ``pairs`` and ``samples`` -> names of the metrics of an evaluation, without ``eval_``."""
COMMIT = re.compile(r"[0-9a-f]{40}")
Rule = Callable[[Settings], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Dependency:
    """Keys that have an effect only at some values of another key.

    Attributes:
        keys: Names of the keys, separated by spaces.
        decider: Names of the other keys, separated by spaces; one of them is enough. A recipe without any of them
            requires nothing.
        values: Values of ``decider`` at which ``keys`` have an effect; empty: all values except null, false, off and 0.
    """

    keys: str
    decider: str
    values: tuple[Any, ...] = ()

    def is_met(self, settings: Settings) -> bool:
        """Return whether the keys have an effect under ``settings``; also if a decider's value is invalid."""
        deciders = [key for key in self.decider.split() if key in settings.table.keys]
        return not deciders or any(settings.broken(key) or self._allows(settings[key]) for key in deciders)

    def explain(self, key: str, settings: Settings) -> Problem:
        """Return the problem of one of ``keys`` that has no effect."""
        decider, *others = self.decider.split()
        shown = json.dumps(settings[decider], ensure_ascii=False)[:80]
        found = f"`{key}` has no effect: `{'`, `'.join([decider, *others])}` {'are' if others else 'is'} {shown}"
        enabled = "true" if settings[decider] is False else "apply" if settings[decider] == "off" else "..."
        value = " or ".join(map(str, self.values)) or enabled
        remedy = (
            "keep one of the two lines"
            if self.values == (None,)
            else f"write `{decider}: {value}`, or delete this line"
        )
        return settings.problem(key, found, remedy)

    def _allows(self, value: Any) -> bool:
        return _holds_any(value, self.values) if self.values else bool(value) and value != "off"


def _holds_any(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a value, or an item of a list, is one of ``values``; a text of blanks alone is empty."""
    value = "" if isinstance(value, str) and value.isspace() else value
    return value in values or (isinstance(value, list) and any(item in values for item in value))


_DEPENDENCIES: Final = (
    Dependency(" ".join(key for key in _ADAPTER_KEYS if key != "use_peft"), "use_peft"),
    Dependency("ref_model_name_or_path ref_model_revision precompute_ref_log_probs", "loss_type", _HAVE_REFERENCE),
    *(Dependency(row["keys"], row["decider"], tuple(row.get("values", ()))) for row in _TABLES["dependencies"]),
)


def check_exclusive(settings: Settings) -> Iterator[Problem]:
    """Mutually exclusive keys are not both set."""
    for first, second, remedy in _EXCLUSIVE:
        # A default, null, false or 0 does not count: `bf16: false` with `fp16: true` is consistent.
        if settings.changes(first) and settings.changes(second) and settings[first] and settings[second]:
            found = f"`{second}` and `{first}` ({settings.where(first)}) are both set"
            yield settings.problem(second, found, remedy)


def check_conflicts(settings: Settings) -> Iterator[Problem]:
    """No key has a value that values of other keys exclude."""
    for row in _TABLES["conflicts"]:
        if _applies(row, settings):
            yield settings.problem(row["key"], row["found"].format_map(settings), row["remedy"])


def _applies(row: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether the conditions ``recipes``, ``when`` and ``unless`` of a row are met."""
    needed, excluded = row.get("when", {}), row.get("unless", {})
    # The default of a key with an invalid value, which is reported alone.
    if any(map(settings.broken, (*needed, *excluded))):
        return False
    is_met = settings.table.recipe in row.get("recipes", settings.table.recipe).split()
    is_met = is_met and all(_holds_any(settings[key], values) for key, values in needed.items())
    return is_met and not any(_holds_any(settings[key], values) for key, values in excluded.items())


def check_orders(settings: Settings) -> Iterator[Problem]:
    """A warm-up is shorter than the run, and a lower bound below the upper one."""
    for row in _TABLES["orders"]:
        smaller, larger = settings[row["smaller"]], settings[row["larger"]]
        if smaller is not None and larger is not None and 0 < larger <= smaller:
            yield settings.problem(row["smaller"], row["found"].format_map(settings), row["remedy"])


def check_dependencies(settings: Settings) -> Iterator[Problem]:
    """Keys have an effect; a key is reported at its first unmet dependency, and accepted at its default."""
    reported: set[str] = set()
    for dependency in _DEPENDENCIES:
        for key in dependency.keys.split():
            if settings.changes(key) and key not in reported and not dependency.is_met(settings):
                reported.add(key)
                # `--pii off` over a file with `pii_kinds` is a trial of the same corpus.
                if settings[dependency.decider] == "off" and _is_overridden(dependency.decider, key, settings):
                    continue
                yield dependency.explain(key, settings)


def _is_overridden(decider: str, key: str, settings: Settings) -> bool:
    """Return whether ``decider`` is a flag, and ``key`` is not."""
    return decider in settings.given and settings.given[decider].flag and not settings.given[key].flag


def check_rewards(settings: Settings) -> Iterator[Problem]:
    """Reward functions are import paths, each reward has a weight, and there is room for a prompt before the answer."""
    functions, has_model = settings["reward_funcs"] or [], settings.gives("reward_model_name_or_path")
    # The weights are in the order of the functions, then the reward model.
    num_rewards = len(functions) + has_model
    for function in functions:
        if not _FUNCTION.fullmatch(function.partition("(")[0]):
            found = f"a reward function is not an import path: {function[:60]!r}"
            remedy = "write package.module:function: one of recipes_lib.rl.verifiers or trl.rewards, or your own"
            # The parts of `[pkg.mod:f(a=1, b=2)]`: their number is not that of the rewards.
            if is_split := any(one.count("(") > one.count(")") for one in functions):
                remedy = 'a list in brackets is split at commas: quote its items, ["package.module:f(a=1, b=2)"]'
            yield settings.problem("reward_funcs", found, remedy)
            if is_split:
                return
        elif function.startswith("__main__:") and settings["reward_timeout"] is not None:
            found = f"{function} is of a script or notebook, which the process of `reward_timeout` does not import"
            yield settings.problem("reward_funcs", found, "define it in a file of its own, or remove `reward_timeout`")
    weights = settings["reward_weights"]
    if weights is not None and num_rewards and len(weights) != num_rewards:
        found = f"`reward_weights` has {len(weights)} numbers for {num_rewards} rewards"
        remedy = f"write {num_rewards}: the functions in their order, then the reward model"
        yield settings.problem("reward_weights", found, remedy)
    elif weights and not any(weights):
        remedy = "write another number for one of them; a reward of weight 0 is logged but not trained on"
        yield settings.problem("reward_weights", "`reward_weights` are all 0, so that no answer has a reward", remedy)
    length, room = settings["response_length"], settings["max_length"]
    if room is not None and room <= length:
        found = f"`max_length` ({room}) leaves no room for a prompt before `response_length` ({length})"
        yield settings.problem("max_length", found, "raise it: it counts the prompt and the answer")


def check_adapted(settings: Settings) -> Iterator[Problem]:
    """No layer is both adapted and trained in full, for which PEFT raises or leaves out the adapter."""
    both = sorted({*(settings["lora_target_modules"] or ())} & {*(settings["lora_modules_to_save"] or ())})
    if both:
        found = f"{', '.join(both)} would be trained in full and adapted, by `lora_target_modules`"
        yield settings.problem("lora_modules_to_save", found, "name it in one of the two")


def check_cap(settings: Settings) -> Iterator[Problem]:
    """The cap of CISPO is at least 1."""
    highest = settings["epsilon" if settings["epsilon_high"] is None else "epsilon_high"]
    if settings["loss_type"] == "cispo" and highest < 1:
        found = f"`loss_type: cispo` caps the ratio itself, which is 1 for unchanged weights, at {highest}"
        yield settings.problem("loss_type", found, "write `epsilon_high: 5`, as in the ScaleRL paper")


def check_dual_clip(settings: Settings) -> Iterator[Problem]:
    """The dual clip is outside the clip range, inside which it would bound the ratio at positive advantages too."""
    bound, highest = settings["dual_clip"], 1 + settings["cliprange"]
    if bound is not None and bound < highest:
        found = f"`dual_clip` ({bound}) is below 1 + `cliprange` ({highest:g})"
        yield settings.problem("dual_clip", found, "write `dual_clip: 3`, as in the paper")


def check_layers(settings: Settings) -> Iterator[Problem]:
    """Layer indices start at 1 and are distinct."""
    for key in ("feature_layers", "relation_layers"):
        layers = settings[key]
        if layers is not None and (not layers or min(layers) < 1 or len(set(layers)) < len(layers)):
            found = f"`{key}` is {layers}: indices start at 1 and must be distinct"
            yield settings.problem(key, found, "write such as [4, 8], or delete the line for the default")


def check_schedule_options(settings: Settings) -> Iterator[Problem]:
    """Required and allowed options of transformers' schedules."""
    kind, options = settings["lr_scheduler_type"], settings["lr_scheduler_kwargs"] or {}
    needed = _NEEDED_OPTIONS.get(kind, set())
    if needed and len(needed & set(options)) != 1:
        names = " or ".join(f"`{name}`" for name in sorted(needed))
        found = f"`lr_scheduler_type: {kind}` needs {names} in `lr_scheduler_kwargs`"
        yield settings.problem("lr_scheduler_type", found, f"write lr_scheduler_kwargs: {{{min(needed)}: ...}}")
    # Keyword arguments of the schedule: an unknown one is a TypeError only after the model was loaded.
    taken = _TABLES["schedule_options"].get(kind, "").split()
    for name, value in options.items():
        if name in taken and name not in _TEXT_OPTIONS and not _is_amount(value):
            found = f"`lr_scheduler_kwargs` has {name}: {str(value)[:60]!r}"
            yield settings.problem("lr_scheduler_kwargs", found, "write a number, 0 or more")
        if name not in taken and not settings.broken("lr_scheduler_type"):
            found = f"`lr_scheduler_kwargs` has {str(name)[:60]!r}, which `lr_scheduler_type: {kind}` does not take"
            remedy = f"write {' or '.join(taken)}" if taken else "delete it, or choose another schedule"
            yield settings.problem("lr_scheduler_kwargs", found, remedy)


def _is_amount(value: object) -> bool:
    """Return whether an option is a number that is not negative, or is unset."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf)


def check_given(settings: Settings, key: str) -> Iterator[Problem]:
    """Yield a problem if a required key is missing, or its value is a blank text or an empty list."""
    remedy = f"write `{key}: ...` ({describe(settings.table.keys[key].schema)})"
    if key not in settings.given:
        yield Problem(settings.name, f"`{key}` is missing", remedy)
    elif settings.gives(key) and (not settings[key] or str(settings[key]).isspace()):
        # A blank folder would be the working directory.
        yield settings.problem(key, f"`{key}` is empty", remedy)


def check_required(settings: Settings) -> Iterator[Problem]:
    """Required keys are set."""
    for key in settings.table.required:
        yield from check_given(settings, key)


def check_decisions(settings: Settings) -> Iterator[Problem]:
    """No key is set that another key leaves without effect (``DECISIONS``)."""
    for row in DECISIONS:
        key, decider = row["key"], row["decider"]
        if settings.gives(key) and settings[key] != row.get("becomes") and is_overruled(row, settings):
            # `--max_steps 10` over a file with `num_train_epochs` is a short trial of the same recipe.
            if _is_overridden(decider, key, settings):
                continue
            found = f"`{key}` has no effect: {row['why']} ({settings.where(decider)})"
            yield settings.problem(key, found, "keep one of the two")


def is_overruled(row: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether the key of a row of ``DECISIONS`` has no effect."""
    key, decider = row["key"], row["decider"]
    if row.get("replaced") and not (
        COMMIT.fullmatch(str(settings[key]))
        and _is_overridden(decider, key, settings)
        and not settings.given[decider].is_repeated
    ):
        return False
    if "local" not in row:
        return _applies(row, settings)
    place = settings[decider]
    return is_local(place) and not (row["local"] == "file" and Path(place).is_dir())


def check_shares(settings: Settings) -> Iterator[Problem]:
    """Keys that are a share below 1 or a count: counts are integers."""
    for key in SHARE_OR_COUNT:
        value = settings[key]
        if isinstance(value, float) and value >= 1:
            remedy = f"write {int(value)} for a count, or a number below 1 for a share"
            yield settings.problem(key, f"`{key}` is {value}, which is neither a share nor a count", remedy)


def check_mixture(settings: Settings) -> Iterator[Problem]:
    """A mixture uses either ``weight`` or ``repeat``; in fine-tuning, weights sum to 1 or 100."""
    entries, where = settings["dataset_mixture"] or [], settings.where("dataset_mixture")
    weights = [entry["weight"] for entry in entries if "weight" in entry]
    if weights and any("repeat" in entry for entry in entries):
        yield Problem(where, "`dataset_mixture` has both `weight` and `repeat`", "write one of the two in all entries")
    elif weights and settings.table.recipe != "pretrain" and not are_shares(entries):
        found = f"a `weight` is a share of the mixture, and those of its {len(entries)} entries add up to"
        remedy = "write weights that add up to 1 or 100; or `repeat`, the number of passes over an entry's rows"
        yield Problem(where, f"{found} {sum(weights):g}", remedy)


def are_shares(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the weights of a mixture are shares: each entry has one, and they sum to 1 or 100.

    In alignment-handbook, ``weight`` has the meaning of ``repeat``; such files are errors instead of being read as
    shares.
    """
    # A missing weight makes the sum NaN, which is close to no number; the tolerance of 2 % accepts 3 x 0.33.
    total = sum(entry.get("weight", math.nan) for entry in entries)
    return any(math.isclose(total, whole, rel_tol=0.02) for whole in (1, 100))


def check_eval_datasets(settings: Settings) -> Iterator[Problem]:
    """Names of held-out sets are valid in metric names, which have the name before the metric."""
    for name in settings["eval_datasets"] or {}:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
            found = f"`eval_datasets` has the name {name!r}, which becomes part of metric names"
            yield settings.problem("eval_datasets", found, "use letters, digits, dots and hyphens")


def check_start(settings: Settings) -> Iterator[Problem]:
    """A model configuration names its type."""
    if settings.gives("model_config") and "model_type" not in settings["model_config"]:
        yield settings.problem("model_config", "`model_config` has no `model_type`", "write model_type: llama")


def loses_updates(dtype: str, optim: str, optim_args: str | None) -> bool:
    """Return whether updates of master weights are rounded to 16 bits, but not stochastically.

    Args:
        dtype: Name of the dtype of the weights, such as ``bfloat16``.
        optim: Key of the recipe.
        optim_args: Key of the recipe.
    """
    is_requested = _ROUNDING.search((optim_args or "").replace(" ", "")) is not None
    rounds = optim == STOCHASTIC_ADAMW or (optim in _ROUNDING_OPTIMIZERS and is_requested)
    return dtype == "float16" or (dtype == "bfloat16" and not rounds)


def check_precision(settings: Settings) -> Iterator[Problem]:
    """16-bit master weights lose small updates, unless the optimizer rounds stochastically."""
    dtype = settings["dtype"]
    # bfloat16 has 8 significant bits: half a unit in the last place is 2**-9 to 2**-8 of the weight.
    if loses_updates(dtype, settings["optim"], settings["optim_args"]):
        found = f"`dtype: {dtype}` stores the master weights: small updates, in bfloat16 below 1/512, are rounded to 0"
        remedy = "delete the line (`bf16` computes in bfloat16 anyway), or write `optim: adamw_bf16_stochastic`"
        yield settings.problem("dtype", found, remedy)


def check_curriculum(settings: Settings) -> Iterator[Problem]:
    """Phases of a curriculum start at 0, increase, and have a weight for each dataset."""
    phases, where = settings["dataset_curriculum"], settings.where("dataset_curriculum")
    if phases is None or not settings.gives("dataset_mixture"):
        return
    starts = [phase["start_tokens"] for phase in phases]
    if not starts or starts[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(starts)):
        found = f"the phases of `dataset_curriculum` start at {starts} tokens"
        yield Problem(where, found, "start the first at 0, the others in increasing order")
    for index, phase in enumerate(phases):
        count = len(settings["dataset_mixture"])
        # The length first: `min` and `max` raise for an empty list.
        if len(phase["weights"]) != count or min(phase["weights"]) < 0 or max(phase["weights"]) == 0:
            found = f"phase {index} of `dataset_curriculum` has weights {phase['weights']}"
            yield Problem(where, found, f"write {count} weights of 0 or more, not all 0, in the mixture's order")


def check_model(settings: Settings) -> Iterator[Problem]:
    """Code from the Hub is pinned to a commit."""
    for kind in ("model", "tokenizer", "ref_model", "teacher_model"):
        repository, revision = settings[f"{kind}_name_or_path"], f"{kind}_revision"
        if kind == "tokenizer" and settings[revision] is not None:
            repository = repository or settings["model_name_or_path"]
        needs_commit = settings["trust_remote_code"] and repository is not None and not is_local(repository)
        if needs_commit and not COMMIT.fullmatch(settings[revision] or ""):
            found = f"`trust_remote_code` runs code of the repository {repository}, which may change"
            yield settings.problem("trust_remote_code", found, f"write `{revision}:` as a commit of 40 hex digits")


def _has_held_out_data(settings: Settings) -> bool:
    held_out = ("dataset_test_split", "test_split_size", "eval_datasets")
    return any(settings.gives(key) or settings.broken(key) for key in held_out)


def check_evaluation(settings: Settings) -> Iterator[Problem]:
    """What follows the held-out loss has one; metrics and callbacks are import paths."""
    has_data = _has_held_out_data(settings)
    for key in ("save_strategy", "lr_scheduler_type"):
        follows = settings[key] in ("best", "reduce_lr_on_plateau", "greedy")
        if follows and (settings["eval_strategy"] == "no" or not has_data):
            found = f"`{key}: {settings[key]}` follows the held-out loss, and there is none"
            remedy = "write `eval_strategy: steps`, and `dataset_test_split: ...` or `test_split_size: ...`"
            yield settings.problem(key, found, remedy)
    for key in ("metrics", "callbacks"):
        for path in settings[key] or []:
            if not _FUNCTION.fullmatch(path.partition("(")[0]):
                found = f"a {key.removesuffix('s')} is not an import path: {path[:60]!r}"
                yield settings.problem(key, found, "write package.module:Class, or package.module:Class(name=value)")


def check_best_metric(settings: Settings) -> Iterator[Problem]:
    """Evaluations have the metric that selects the best model.

    Names of user metrics and benchmark scores are unknown here; the first evaluation checks these.
    """
    name = (settings["metric_for_best_model"] or "").removeprefix("eval_")
    known: list[str] = []
    if _has_held_out_data(settings):
        known = [*METRICS["pairs" if settings.table.recipe in ("reward", "dpo") else "text"], *METRICS["samples"]]
    elif settings.gives("sample_prompts"):
        known = [*METRICS["samples"]]
    is_unknown = any(settings.gives(key) or settings.broken(key) for key in ("metrics", "eval_tasks"))
    if not name or not known or is_unknown or name in known:
        return
    # Each of several held-out sets has metrics of its own, such as `web_loss`.
    has_sets = settings.gives("eval_datasets") or settings.gives("dataset_mixture")
    if not has_sets or not name.endswith(tuple(f"_{metric}" for metric in known)):
        remedy = suggest(name, known, f"write one of {', '.join(known)}")
        yield settings.problem("metric_for_best_model", f"evaluations have no metric `{name}`", remedy)


def check_best_model(settings: Settings) -> Iterator[Problem]:
    """Saved steps are evaluated steps, so that the best checkpoint is known."""
    if not settings["load_best_model_at_end"] or settings["save_strategy"] == "best":
        return
    where = settings.where("load_best_model_at_end")
    if settings["eval_strategy"] == "no" or settings["save_strategy"] != settings["eval_strategy"]:
        found = "`load_best_model_at_end` needs a checkpoint at every evaluation"
        yield Problem(where, found, "write the same `save_strategy` and `eval_strategy`, or `save_strategy: best`")
    elif settings["eval_strategy"] == "steps":
        save_steps, eval_steps = settings["save_steps"], settings["eval_steps"]
        # 0.5 is no multiple: without `eval_steps`, it is an error. A tolerance, because 0.3 / 0.1 is not exactly 3.
        ratio = save_steps / eval_steps if eval_steps else 0.5
        if (save_steps < 1) != (eval_steps is not None and eval_steps < 1) or abs(ratio - round(ratio)) > 1e-9:
            found = f"`save_steps` ({save_steps}) is not a multiple of `eval_steps` ({eval_steps})"
            yield Problem(where, found, "write both as counts or shares, `save_steps` a multiple of `eval_steps`")


def check_kept(settings: Settings) -> Iterator[Problem]:
    """``save_keep_steps`` is a multiple of ``save_steps``."""
    keep, every = settings["save_keep_steps"], settings["save_steps"]
    if keep is not None and settings["save_strategy"] == "steps" and (every < 1 or keep % every):
        found = f"`save_keep_steps` ({keep}) is not a multiple of `save_steps` ({every})"
        remedy = "write both as counts, `save_keep_steps` a multiple: only saved checkpoints can be kept"
        yield settings.problem("save_keep_steps", found, remedy)


_OF_DIFFERENCES: Final = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"})
"""Losses that support any f-divergence: those of differences of scores, in which its normaliser cancels."""


def check_preference(settings: Settings) -> Iterator[Problem]:
    """Each loss has a weight, one of them another than 0, and supports the options."""
    losses, weights = settings["loss_type"], settings["loss_weights"]
    # The default would be compared with the weights of the invalid losses.
    if settings.broken("loss_type"):
        return
    if weights is not None and len(weights) != len(losses):
        found = f"`loss_weights` has {len(weights)} numbers for {len(losses)} losses"
        yield settings.problem("loss_weights", found, f"write {len(losses)}, in the order of `loss_type`")
    elif not losses or (weights and not any(weights)):
        found = "there is no loss: `loss_type` is empty, or `loss_weights` are all 0"
        yield settings.problem("loss_weights" if losses else "loss_type", found, "write a loss with another weight")
    divergence, normalised = settings["f_divergence_type"], sorted({*losses} - _OF_DIFFERENCES)
    if divergence != "reverse_kl" and normalised:
        found = f"`f_divergence_type: {divergence}` is not defined for {', '.join(normalised)}"
        yield settings.problem("f_divergence_type", found, f"write losses of {', '.join(sorted(_OF_DIFFERENCES))}")


_RULES: Final[tuple[Rule, ...]] = (
    check_required,
    check_exclusive,
    check_conflicts,
    check_orders,
    check_dependencies,
    check_decisions,
    check_shares,
    check_mixture,
    check_eval_datasets,
    check_model,
    check_adapted,
    check_evaluation,
    check_best_metric,
    check_best_model,
    check_kept,
    check_paths,
    check_folders,
)
_FINE_TUNING: Final = (*_RULES, check_schedule_options)
_SAMPLING: Final = (*_FINE_TUNING, check_rewards)
COMMAND_RULES: Final = (check_exclusive, check_conflicts, check_dependencies, check_paths, check_folders)
"""Rules of commands with keys of their own, beside those of ``CommandConfig.find_problems``."""
RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "pretrain": (*_RULES, check_start, check_precision, check_curriculum),
    "sft": _FINE_TUNING,
    "lora": _FINE_TUNING,
    "reward": _FINE_TUNING,
    "dpo": (*_FINE_TUNING, check_preference),
    "ppo": (*_SAMPLING, check_dual_clip),
    "rloo": _SAMPLING,
    "grpo": (*_SAMPLING, check_cap),
    "distill": (*_FINE_TUNING, check_layers),
}
"""Recipe -> its rules."""
