"""Parses files and command lines of TRL and alignment-handbook: training method, datasets and flags."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from recipes_lib.config.paths import HUB_ID
from recipes_lib.config.table import RECIPE_NAMES, load_table, read_lists
from recipes_lib.config.values import plain_value, read_text
from recipes_lib.errors import ConfigError, Problem

_METHODS: Final = read_lists(Path(__file__).with_name("methods.yaml"))
_RECIPES_OF_KEYS: Final = {key: recipes.split() for keys, recipes in _METHODS["keys"] for key in keys.split()}
"""Key -> recipes that it identifies, the most likely first."""
_ADAPTER_KEYS: Final = ("use_peft", "load_in_4bit", "load_in_8bit", "adapter", "finetuning_type", "tuner_type")
"""Keys that train an adapter at ``true``, ``lora`` or ``qlora``."""
_METHOD_KEYS: Final = ("stage", "rl", "rlhf_type", "trainer_type", "algorithm.adv_estimator")
"""Keys of LLaMA-Factory, axolotl, ms-swift, oumi and verl whose text is the method."""
_NAMES_OF_RUNS: Final = (*_METHOD_KEYS, "adapter", "finetuning_type", "output_dir", "hub_model_id", "run_name")
"""Keys whose text names the method: the method itself, then names of outputs."""

_RECIPE_OF_WORDS: Final = {
    **{recipe: recipe for recipe in RECIPE_NAMES if recipe != "lora"},
    **{word: recipe for recipe, words in _METHODS["words"].items() for word in words.split()},
}
_RECIPE_OF_METHODS: Final = {**_RECIPE_OF_WORDS, "pt": "pretrain"}
"""Recipe of each method of LLaMA-Factory and ms-swift too; ``pt`` in the name of a file may be that of a model."""
_LOSSES: Final = ("orpo", "simpo", "ipo", "kto")
"""Words that name a loss of DPO."""
_PLAIN_SECTIONS, _NAMED_SECTIONS = (frozenset(_METHODS["sections"][kind].split()) for kind in ("plain", "named"))
SECTIONS: Final = _PLAIN_SECTIONS | _NAMED_SECTIONS
"""Mappings in files of other programs, whose keys are moved to the top."""
_UNSUPPORTED: Final = frozenset(_METHODS["unsupported"].split())
"""Words for methods of TRL that no recipe implements."""
_UNSUPPORTED_KEYS: Final = _METHODS["unsupported_keys"].split()

LEGACY_KEYS: Final = ("dataset_mixture", "datasets", "dataset_mixer", "dataset_mixer_list")
COMPANIONS: Final = ("dataset_splits", "dataset_configs")
"""Keys that complement ``dataset_mixer``."""
_FIELDS: Final = {
    "field_messages": "conversations",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field": "text",
    "text_column": "text",
}
"""Names of columns in axolotl's datasets, and ours."""
_DETECTED: Final = ("messages", "conversations", "conversation", "chosen", "rejected", "text")
"""Columns that need no name."""
# Types, roles and names of fields are axolotl's layout of the rows, which is detected here.
_ENTRY_KEYS = {"id", "path", "name", "config", "split", "columns", "weight", "fraction", "type", "roles", *_FIELDS}
_ENTRY_KEYS |= {"message_property_mappings", "message_field_role", "message_field_content"}
_ENTRY_KEYS |= {"field_thinking", "template_thinking_key"}
_COLUMNS_OF_FACTORY: Final = {
    "sharegpt": {"messages": "conversations"},
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
}
"""Layout of ``dataset_info.json`` -> its names of columns, and ours."""
_SHARED_COLUMNS: Final = {name: name for name in ("system", "tools", "chosen", "rejected")}
_KERNELS: Final = re.compile(r"axolotl\.integrations\.(cut_cross_entropy|liger|kernels)\.\w+")
"""Plugins of axolotl that do not change results."""
_SUBCOMMANDS: Final = ("trl", "swift", "megatron")
"""Programs whose first argument is the method; ``megatron`` is that of ms-swift."""
_COMMAND: Final = re.compile(
    rf"(\s|\\\n|#.*\n|\$ |\w+=\S*\s)*(python3?|accelerate launch|torchrun|deepspeed|uv run|{'|'.join(_SUBCOMMANDS)})\s"
)
_SCRIPT: Final = re.compile(r"\.py$|\.(scripts|cli|trainer)\.")
"""A script, or a module of TRL, OpenRLHF or verl."""
_VARIABLE: Final = re.compile(r"\$(\w+)|\$\{(\w+)(?::-([^}]*))?\}")
_QUOTED_OR_COMMENT: Final = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*")|(?:^|(?<=\s))(?:#.*|2>&1)""", re.MULTILINE)
_ARITHMETIC: Final = re.compile(r"\$\(\((.*?)\)\)+")
_OVERRIDE: Final = re.compile(r"\+*([\w.]+)=(.*)", re.DOTALL)
"""An override of Hydra, as verl takes them."""


class Method(NamedTuple):
    """Training method of a file.

    Attributes:
        recipe: Corresponding recipe.
        loss_type: Loss implied by a name, such as ``orpo``; ``None`` if there is none, or the file sets one.
        why: Evidence for the recipe; empty if there is none.
        doubt: Why the file may be for another method than the recipe; empty if it is consistent.
    """

    recipe: str
    loss_type: str | None
    why: str
    doubt: str


def infer_method(names: Sequence[str], values: Mapping[str, Any], recipe: str | None = None) -> Method:
    """Infer the training method of a file from its keys, and from words in names if several recipes are possible.

    Args:
        names: Names of the file and its folder, the most significant first.
        values: Keys of the file with plain values.
        recipe: Recipe chosen by the user; ``None`` to infer it.

    Raises:
        ConfigError: The name or a key is that of a method that no recipe implements, and ``recipe`` is ``None``.
    """
    runs = [str(values[key]).rstrip("/").rpartition("/")[2] for key in _NAMES_OF_RUNS if values.get(key)]
    words = [(name, word) for name in (*names, *runs) for word in re.split("[^a-z]+", name.lower())]
    named = [pair for pair in words if pair[1] in _RECIPE_OF_WORDS or (pair[1] in _UNSUPPORTED and pair[0] in names)]
    unsupported = next((word for name, word in named if name == named[0][0] and word in _UNSUPPORTED), None)
    says = [f"the name {named[0][0]!r} says {unsupported.upper()}"] if unsupported else []
    says += [f"`{key}` is a method" for key in _UNSUPPORTED_KEYS if values.get(key)]
    if says and recipe is None:
        found = f"{says[0]}, which no recipe trains"
        raise ConfigError(Problem("--migrate", found, "write `--recipe` if the file is for another method"))
    keys, possible = _narrow(values)
    # Without a teacher, "distill" is more likely in the name of a model or of data: other words take precedence.
    named.sort(key=lambda pair: _RECIPE_OF_WORDS.get(pair[1]) == "distill")
    name, word = next((pair for pair in named if _RECIPE_OF_WORDS.get(pair[1]) in possible), ("", ""))
    inferred = _RECIPE_OF_WORDS[word] if word else possible[0] if keys else "sft"
    adapters = [key for key in _ADAPTER_KEYS if values.get(key) in (True, "lora", "qlora")]
    if inferred == "sft" and (adapters or {"lora", "qlora"} & {word for _, word in words}):
        inferred = "lora"
    why = [repr(name)] * bool(name) + [f"`{key}`" for key in (keys + adapters)[:3]]
    chosen = recipe or inferred
    loss = word if word in _LOSSES and chosen == "dpo" and not values.get("loss_type") else None
    # A method of axolotl or LLaMA-Factory that no word names, such as `stage: pt`.
    methods = [key for key in _METHOD_KEYS if recipe is None and values.get(key) is not None]
    foreign = next((key for key in methods if _find_recipe(values[key]) is None), None)
    # Such as `finetuning_type: freeze`, which trains some of the layers.
    kinds = [key for key in ("adapter", "finetuning_type") if recipe is None and values.get(key)]
    foreign = foreign or next((key for key in kinds if values[key] not in ("lora", "qlora", "full")), None)
    doubt = f"`{foreign}: {values[foreign]}` names no recipe" if foreign else ""
    return Method(chosen, loss, ", ".join(why), doubt or _doubt(chosen, keys, possible, adapters))


def convert_value(key: str, values: Mapping[str, Any], recipe: str) -> dict[str, Any] | None:
    """Convert a key of another program whose successor follows from several keys, or from parts of its value.

    Args:
        key: Key of the file.
        values: Keys of the file with plain values.
        recipe: Recipe of the file.

    Returns:
        New keys, empty if the line can be deleted; ``None`` if the key is none of these, or has an unknown value.

    Source: axolotl's ``validate_config`` for the number of evaluations; LLaMA-Factory's ``DatasetAttr``.
    """
    value = values[key]
    new: dict[str, Any] | None = None
    if key in _METHOD_KEYS:
        new = {} if _find_recipe(value) in (recipe, "sft" if recipe == "lora" else recipe) else None
    elif key in ("evals_per_epoch", "saves_per_epoch") and isinstance(value, int) and value > 1:
        epochs = values.get("num_epochs") or 1
        new = {f"{key[:4]}_steps": 1 / (value * epochs)} if isinstance(epochs, int | float) else None
    elif key == "special_tokens" and isinstance(value, Mapping) and value.keys() <= {"eos_token", "pad_token"}:
        new = dict(value)
    elif key == "plugins" and isinstance(value, list) and all(_KERNELS.fullmatch(str(name)) for name in value):
        new = {}
    elif key == "reward_model" and value is True:
        new = {} if recipe == "reward" else None
    elif key == "gradient_checkpointing" and value == "offload":
        new = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    elif key in ("dataset", "dataset_dir", "dataset_prompt_column", "pretraining_dataset"):
        new = _convert_data(key, values)
    return new


def _convert_data(key: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
    value, named = values[key], _convert_names(values.get("dataset"), Path(str(values.get("dataset_dir") or "data")))
    if key == "pretraining_dataset":
        entries = value if isinstance(value, list) else [{"path": value}]
        datasets = convert_datasets({"datasets": entries})[0]
        return datasets and datasets | {"dataset_streaming": True}
    if key == "dataset_prompt_column":
        return {"dataset_columns": {"question": value}} if str(value).isidentifier() else None
    if key == "dataset_dir":
        return {} if named else None
    # In programs other than LLaMA-Factory, `dataset` is a Hub id.
    is_id = "/" in str(value) and HUB_ID.fullmatch(str(value))
    return {"dataset_name": value} if named is None and is_id else named


def _convert_names(names: Any, folder: Path) -> dict[str, Any] | None:
    """Return the keys of datasets that LLaMA-Factory's ``dataset_info.json`` describes; ``None`` if one is unknown."""
    text = read_text(folder / "dataset_info.json", [])
    try:
        known = json.loads(text or "")
        return _join([_convert_description(known[name.strip()], folder) for name in str(names).split(",")], {})[0]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _convert_description(described: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    named = _COLUMNS_OF_FACTORY[described.get("formatting", "alpaca")] | _SHARED_COLUMNS
    if described.keys() & {"folder", "num_samples"}:
        raise LookupError
    columns = {ours: described.get("columns", {}).get(theirs, ours) for theirs, ours in named.items()}
    entry = {
        "name": described["hf_hub_url"] if "hf_hub_url" in described else str(folder / described["file_name"]),
        "config": described.get("subset"),
        "split": described.get("split"),
        "columns": {ours: theirs for ours, theirs in columns.items() if theirs != ours},
    }
    return {key: value for key, value in entry.items() if value}


def _find_recipe(method: Any) -> str | None:
    words = re.split("[^a-z]+", str(method).lower())
    return next((_RECIPE_OF_METHODS[word] for word in words if word in _RECIPE_OF_METHODS), None)


def _narrow(values: Mapping[str, Any]) -> tuple[list[str], Sequence[str]]:
    """Return the keys that identify the recipe, and the possible recipes, the most likely first."""
    # What LLaMA-Factory and axolotl train is named by one key: `packing: false` may stand beside `stage: dpo`.
    named = {key: _find_recipe(values.get(key)) for key in _METHOD_KEYS}
    evidence = {key: ["sft", "lora"] if recipe == "sft" else [recipe] for key, recipe in named.items() if recipe}
    evidence |= {key: recipes for key, recipes in _RECIPES_OF_KEYS.items() if values.get(key) is not None}
    if "base_model" in values:  # axolotl's `model_config` changes the configuration of this model.
        evidence.pop("model_config", None)
    if values.get("reward_model") is True:  # In other programs, it is a path.
        evidence["reward_model"] = ["reward"]
    losses = values.get("loss_type")
    for loss in losses if isinstance(losses, list) else [losses]:
        if loss in load_table("dpo").keys["loss_type"].schema["items"]["enum"]:
            evidence["loss_type"] = ["dpo"]
        elif loss in load_table("grpo").keys["loss_type"].schema["enum"]:
            evidence["loss_type"] = ["grpo", "rloo"]
    keys: list[str] = []
    possible: Sequence[str] = RECIPE_NAMES
    # A key that contradicts those before it is ignored.
    for key, recipes in evidence.items():
        both = [recipe for recipe in (possible if keys else recipes) if recipe in recipes]
        if both:
            keys, possible = [*keys, key], both
    return keys, possible


def _doubt(recipe: str, keys: Sequence[str], possible: Sequence[str], adapters: Sequence[str]) -> str:
    if recipe not in possible:
        shown = ", ".join(f"`{key}`" for key in keys[:3])
        return f"{shown} belong to {' or '.join(possible)}, and the recipe is {recipe}: it would be another method"
    if adapters and "use_peft" not in load_table(recipe).keys:
        return f"`{adapters[0]}` trains an adapter, and recipe {recipe} supports none: it would be another method"
    return ""


def convert_datasets(values: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Convert legacy dataset keys; return the new keys and what the user should review.

    Args:
        values: ``LEGACY_KEYS`` and ``COMPANIONS`` of the file, with plain values.

    Returns:
        New keys, and a remark for the user (empty if there is nothing to review); or ``None``, and what has no key here
        (empty if the form is unknown).
    """
    key = next(key for key in LEGACY_KEYS if key in values)
    legacy = values[key]
    if key.startswith("dataset_mixer"):
        return _convert_mixer(legacy, values.get("dataset_splits"), values.get("dataset_configs"))
    extra = {}
    if isinstance(legacy, Mapping):
        extra = {"test_split_size": legacy["test_split_size"]} if legacy.get("test_split_size") else {}
        legacy = legacy.get("datasets")
    if not isinstance(legacy, Sequence) or not all(
        isinstance(item, Mapping) and item.keys() <= _ENTRY_KEYS and not isinstance(item.get("type"), Mapping)
        for item in legacy
    ):
        return None, ""
    new, remark = _join([_convert_entry(item) for item in legacy], extra)
    kinds = [str(item.get("type") or "chat_template") for item in legacy]
    if "completion" in kinds:
        remark = "axolotl splits texts longer than `sequence_len`: write `overlong: split` to keep that"
    if own := next((kind for kind in kinds if not re.search("chat_template|completion|sharegpt", kind)), None):
        remark = f"axolotl's `type: {own}` has a prompt of its own; here, rows are turns of the chat template"
    return new, remark


def _convert_entry(item: Mapping[str, Any]) -> dict[str, Any]:
    name = item.get("id") or item.get("path") or item.get("name")
    # With `path`, TRL's `name` is the configuration of a Hub dataset, as in `datasets.load_dataset`.
    config = item.get("config") or (item.get("name") if "path" in item else None)
    columns = {ours: item.get(theirs) for theirs, ours in _FIELDS.items()}
    entry = {
        "name": name,
        "config": config,
        "split": item.get("split"),
        # alignment-handbook's weight is a fraction of the dataset's own rows, which is `repeat` here; TRL's fraction is
        # a share of the mixture.
        "repeat": item.get("weight"),
        "weight": item.get("fraction"),
        "format": "text" if item.get("type") == "completion" else None,
        "columns": {ours: theirs for ours, theirs in columns.items() if theirs not in (None, *_DETECTED)},
    }
    return {key: value for key, value in entry.items() if value not in (None, {})}


def _convert_mixer(mixer: Any, splits: Any, configs: Any) -> tuple[dict[str, Any] | None, str]:
    pairs = list(mixer.items()) if isinstance(mixer, Mapping) else None
    if isinstance(mixer, list) and len(mixer) % 2 == 0:
        pairs = list(zip(mixer[::2], mixer[1::2], strict=True))
    if not pairs:
        return None, ""
    if any(share != 1 and not (isinstance(share, float) and share < 1) for _, share in pairs):
        # As in open-instruct, whose whole numbers are no shares.
        return None, "it counts rows: write `dataset_mixture` with a share of each set as `repeat`"
    train = [split for split in splits or [] if not str(split).startswith("test")]
    test = [split for split in splits or [] if str(split).startswith("test")]
    if len(train) > 1 or len(test) > 1 or (configs and len(configs) != len(pairs)):
        return None, ""
    split = {"split": train[0]} if train else {}
    named = [{"config": config} for config in configs or []] or [{}] * len(pairs)
    entries = [{"name": pair[0], "repeat": pair[1]} | config | split for pair, config in zip(pairs, named, strict=True)]
    return _join(entries, {"dataset_test_split": test[0]} if test and len(entries) == 1 else {})


def _join(entries: list[dict[str, Any]], extra: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    if len(entries) == 1 and entries[0].get("repeat", 1) == 1:
        spelling = {"split": "train_split"} | {key: key for key in ("name", "config", "format", "columns")}
        return {f"dataset_{spelling[key]}": value for key, value in entries[0].items() if key in spelling} | extra, ""
    if all(entry.get("repeat", 1) == 1 for entry in entries):
        for entry in entries:
            entry.pop("repeat", None)
    remark = "" if extra else "name a held-out split with `dataset_test_split` or `test_split_size`"
    return {"dataset_mixture": entries} | extra, remark


def is_command(text: str) -> bool:
    """Return whether a file contains a shell command instead of keys."""
    return _COMMAND.match(text) is not None


def parse_command_text(text: str, name: str) -> tuple[str, Mapping[str, Any], str]:
    """Parse a text with a single command that trains.

    Args:
        text: The command, with variables that are assigned before it; lines may end with a backslash, comments are
            ignored.
        name: Location, for errors.

    Returns:
        Name of the script without suffix, or the subcommand of ``trl``; keys and values of the script's flags; and the
        words before the script, which are the launcher and its flags.

    Raises:
        ConfigError: The text is a Python script, or not a single command with flags only, or the command also reads a
            YAML file.
    """
    if name.endswith(".py"):
        remedy = "write the arguments of its config, such as SFTConfig, to a YAML file, one `key: value` a line"
        raise ConfigError(Problem(name, "is a Python script", remedy))
    try:
        commands = [(words, start) for words in _split_commands(text) if (start := _find_script(words)) is not None]
    except ValueError as error:
        raise ConfigError(Problem(name, f"is not a shell command: {error}", "close its quotes")) from None
    if len(commands) != 1:
        raise ConfigError(Problem(name, "is not one command of a script", "write one command a file"))
    ((words, start),) = commands
    key, values = "", dict[str, list[str]]()
    for word in words[start + 1 :]:
        # Not a value of the flag before it, such as `--lora_config r=8`.
        if (override := _OVERRIDE.fullmatch(word)) and (not key or "." in override[1]):
            key, values[override[1]] = "", [override[2]]
        elif word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            values[key] = [value] if equals else []
        elif not key:
            raise ConfigError(Problem(name, f"{word[:60]!r} is not a flag", "write `--key value`"))
        else:
            values[key].append(word.rstrip(","))
    if "config" in values:
        found = f"the command also reads a file: {' '.join(values['config'])[:80]}"
        raise ConfigError(Problem(name, found, "migrate that file; pass the flags to `recipes check --config`"))
    script = words[start]
    last = Path(script).stem if script.endswith(".py") else script.rpartition(".")[2]
    read = dict(_read_flag(*flag) for flag in values.items())
    # The default of ms-swift.
    read |= {"rlhf_type": "dpo"} if last == "rlhf" and "rlhf_type" not in read else {}
    return "pretrain" if last == "pt" else last, read, shlex.join(words[:start])


def _split_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, with the values of variables that were assigned before it."""
    plain = _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text).replace("\\\n", " ")
    plain = _ARITHMETIC.sub(_multiply, plain)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    variables = dict[str, str]()

    def expand(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[2], found[3] or found[0])

    for is_end, group in itertools.groupby(lexer, lambda word: word.strip("\n;&|") == ""):
        words = [_VARIABLE.sub(expand, word) for word in group]
        if all(re.match(r"\w+=|export$", word) for word in words):
            variables |= {key: value for key, _, value in (word.partition("=") for word in words)}
        elif not is_end:
            # Without the arguments of the file itself (`$@`, `$*`, `${@:2}`), and without a program that submits the
            # command after `--` as a job, as in open-instruct.
            command = [word for word in words if not re.match(r"\$\{?[@*]", word)]
            yield command[max((at for at, word in enumerate(command, 1) if word == "--"), default=0) :]


def _multiply(found: re.Match[str]) -> str:
    """Return the product of an arithmetic expansion such as ``$((1024 * 8))``; of any other, the text as one word."""
    factors = [factor.strip() for factor in found[1].split("*")]
    is_product = all(factor.isdecimal() for factor in factors)
    return str(math.prod(map(int, factors))) if is_product else re.sub(r"\s", "", found[0])


def _find_script(words: Sequence[str]) -> int | None:
    """Return the index of the script or subcommand of a command that trains."""
    for at, word in enumerate(words):
        is_method = word in {*_RECIPE_OF_METHODS, *_UNSUPPORTED, "rlhf"}
        if _SCRIPT.search(word) or (at > 0 and words[at - 1] in _SUBCOMMANDS and is_method):
            return at
    return None


def flatten_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the keys of other programs' sections at the top, as ``optimizer.lr`` or ``learning_rate``."""
    dotted, flat = dict(_list_dotted(values, "")), dict[str, Any]()
    for key, value in dotted.items():
        section, _, name = key.partition(".")
        is_plain = section in _PLAIN_SECTIONS and name and name not in dotted.keys() | flat.keys()
        flat[name if is_plain else key] = value
    return flat


def _list_dotted(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        # A mapping in a plain section is a value, such as `lr_scheduler_kwargs`.
        if isinstance(value, Mapping) and (key in SECTIONS or prefix.partition(".")[0] in _NAMED_SECTIONS):
            yield from _list_dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_flag(key: str, words: list[str]) -> tuple[str, Any]:
    if not words:
        # HfArgumentParser adds `--no_key` for a boolean that defaults to true.
        return (key.removeprefix("no_"), False) if key.startswith("no_") else (key, True)
    values = [_read_word(word) for word in words]
    return key, values[0] if len(values) == 1 else values


def _read_word(word: str) -> Any:
    if word.startswith(("{", "[")):
        try:
            return yaml.safe_load(word)
        except yaml.YAMLError:
            return word
    # Not a boolean: `no` is a value of `eval_strategy`.
    return word if word.lower() in ("yes", "no", "on", "off") else plain_value(yaml.ScalarNode("", word))
