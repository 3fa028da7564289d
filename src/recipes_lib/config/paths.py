"""Paths of the user and the package, and Hub ids.

A path must exist, and anything else must have the form of a Hub id. Recipes, configurations, pipelines and launch files
are located in the working directory, else in the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.values import Settings
from recipes_lib.errors import ConfigError, MissingPath, Problem, suggest

LAUNCH_FILES: Final = Path("accelerate_configs")
RECIPES: Final = Path("recipes")
_IN_WHEEL: Final = Path(__file__).parents[1] / "share"
"""Copy of both folders in a wheel (see setup.py); an editable installation uses the checkout instead."""
_ROOT: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[3]
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""Form of the name of a model or dataset of the Hub."""
_FILE_SUFFIXES = (
    *(".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst"),
    *(".bz2", ".xz", ".jinja", ".safetensors", ".arrow"),
)
REFERENCES: Final = (
    *("model_name_or_path", "tokenizer_name_or_path", "adapter_name_or_path", "ref_model_name_or_path"),
    *("reward_model_name_or_path", "critic_model_name_or_path", "teacher_model_name_or_path", "dataset_name"),
    *("replay_dataset", "ewc_reference"),
)
"""Keys whose value is a path or a Hub id."""
_EXISTING: Final = (
    *("replay_from", "chat_template_path", "expected_curve", "refusals_path", "judge_prompt"),
    *("language_model_path", "classifier_path", "toxicity_classifier_path", "perplexity_model_path"),
)
"""Keys whose value is a path that must exist."""
VARIABLE: Final = re.compile(r"\$[\w{]")
NO_VARIABLES = "variables are not expanded in a file: write the value, or pass it as a flag, which the shell expands"
_OUTPUTS = ("output_dir", "prepared_dir")
PATH_KEYS: Final = (*REFERENCES, *_EXISTING, "dataset_test_split", *_OUTPUTS)
"""Keys whose value may be a path, in which ``~/`` is expanded to the home folder."""


def find_shipped(path: Path) -> Path:
    """Return ``path`` if it exists, else the package's file of that name, else ``path``.

    Args:
        path: Path from the user, such as ``recipes/configs/llama3-8b/sft.yaml``.
    """
    is_ours = path.parts[:1] in ((RECIPES.name,), (LAUNCH_FILES.name,))
    return _ROOT / path if is_ours and not path.exists() and (_ROOT / path).exists() else path


def find_recipe(recipe: str) -> Path:
    """Return the absolute path of a recipe's script."""
    return find_shipped(RECIPES / f"{recipe}.py").resolve()


def find_launch_file(name: str) -> Path:
    """Return the path of a launch file.

    Args:
        name: A path that ends with ``.yaml``, ``.yml`` or ``.json``, or the stem of a file in ``accelerate_configs/``.

    Raises:
        ConfigError: The file does not exist; the message lists the available ones.
    """
    path = find_shipped(Path(name) if name.endswith((".yaml", ".yml", ".json")) else LAUNCH_FILES / f"{name}.yaml")
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in find_shipped(LAUNCH_FILES).glob("*.yaml")))
        raise ConfigError(Problem("--hardware", f"there is no launch file {path}", f"write one of {names}, or a path"))
    return path


def is_local(reference: Any) -> bool:
    """Return whether a model or dataset reference is an existing file or folder."""
    if not isinstance(reference, str) or not reference:
        return False
    try:
        return Path(reference).exists()
    except (OSError, ValueError):  # A name that is too long, or has a null byte (ValueError on Python 3.11).
        return False


def expand_home(text: str) -> str:
    """Replace a leading ``~/`` by the home folder; ``~name`` is not expanded.

    Raises:
        ConfigError: The user has no home folder.
    """
    if not text.startswith("~/"):
        return text
    try:
        return str(Path.home()) + text[1:]
    except RuntimeError:
        found = "this user has no home folder"
        raise ConfigError(Problem(text, found, "set the variable HOME, or write an absolute path")) from None


def find_cache(name: str) -> Path:
    """Return a cache folder of this library, in that of the Hugging Face libraries (``HF_HOME``).

    Raises:
        ConfigError: As ``expand_home``.
    """
    from huggingface_hub import constants  # Not needed by `--help`.

    return Path(expand_home(constants.HF_HOME), "recipes_lib", name)


def names_path(dataset_test_split: str) -> bool:
    """Return whether held-out data are given as a path; a bare word is the name of a split."""
    return "/" in dataset_test_split or looks_local(dataset_test_split)


def check_paths(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each path that does not exist, and for each reference that is neither path nor Hub id."""
    for key in REFERENCES:
        # `gives` is false for an invalid value, which has a problem already. An endpoint has names of its own.
        if settings.gives(key) and not (key == "model_name_or_path" and settings["base_url"]):
            yield from check_reference(settings.where(key), key, settings[key])
    for index, entry in enumerate(settings["dataset_mixture"] or []):
        where = _locate_entry(settings, index)
        yield from check_reference(where, f"dataset_mixture[{index}].name", entry["name"])
    for name, entry in (settings["eval_datasets"] or {}).items():
        yield from check_reference(settings.where("eval_datasets"), f"eval_datasets.{name}", entry["name"])
    for key in (*_EXISTING, "dataset_test_split"):
        if settings.gives(key) and (key != "dataset_test_split" or names_path(settings[key])):
            yield from check_exists(settings.where(key), key, settings[key])
    for key in _OUTPUTS:
        if settings.gives(key):
            yield from _check_output(key, settings)


def _check_output(key: str, settings: Settings) -> Iterator[Problem]:
    path = settings[key]
    if is_local(path) and not Path(path).is_dir():
        yield settings.problem(key, f"`{key}` is an existing file", "name a folder")
    if path.startswith("~"):
        found = f"`{key}` begins with `{path.partition('/')[0]}`, and only `~/` is expanded"
        yield settings.problem(key, found, f"write `~/...`, or `./{path}` if that is its name")
    if VARIABLE.search(path):
        yield settings.problem(key, f"`{key}` is {path[:120]!r}", NO_VARIABLES)


def _locate_entry(settings: Settings, index: int) -> str:
    entry = settings.given["dataset_mixture"]
    # A mixture of one dataset may be its name alone.
    node = entry.node.value[index] if isinstance(entry.node, yaml.SequenceNode) else entry.node
    if isinstance(node, yaml.MappingNode):
        # The line of the name, in an entry of several lines.
        node = next(value for key, value in node.value if key.value == "name")
    return entry.locate(node)


def looks_local(text: str) -> bool:
    """Return whether a text can only be a path: it begins like one, or ends with a file suffix."""
    return text.startswith((".", "/", "~")) or text.endswith(_FILE_SUFFIXES) or "\\" in text


def check_reference(where: str, key: str, text: str) -> Iterator[Problem]:
    """Yield a problem if a text is neither an existing path nor has the form of a Hub id."""
    if looks_local(text):
        yield from check_exists(where, key, text)
    # `owner/name` that exists as a local folder is the folder, as in `from_pretrained`.
    elif not is_local(text) and not HUB_ID.fullmatch(text):
        remedy = suggest_sibling(text) or "write `owner/name`, or the path of a file or folder"
        kind = MissingPath if "/" in text else Problem
        yield kind(where, f"`{key}` is neither an existing path nor a Hub id: {text[:80]!r}", remedy)


def check_exists(where: str, key: str, text: str) -> Iterator[Problem]:
    """Yield a problem if a path does not exist."""
    # `find_shipped`: the package's own templates (`recipes/configs/chat_templates/...`) need no checkout.
    if not is_local(str(find_shipped(Path(text)))):
        remedy = suggest_sibling(text) or "correct the path; it is relative to the working directory"
        if key == "chat_template_path" and HUB_ID.fullmatch(text) and "/" in text:
            remedy += f", or download it: hf download {text} chat_template.jinja --local-dir ."
        yield MissingPath(where, f"`{key}` does not exist: {text[:120]!r}", remedy)


def check_folders(settings: Settings) -> Iterator[Problem]:
    """Folders of task files exist."""
    for key in ("eval_tasks_include_path", "include_path"):
        for folder in settings[key] or ():
            if not (is_local(folder) and Path(folder).is_dir()):
                yield MissingPath(settings.where(key), f"there is no folder {folder[:120]!r}", "correct the path")


def suggest_sibling(text: str) -> str:
    """Return the remedy for a path that does not exist, such as the nearest file beside it, or an empty text."""
    path = Path(text)
    if "://" in text:
        return "URLs are not read: download the files; a dataset or model of the Hub is `owner/name`"
    if "*" in text:
        return "patterns are not expanded: name the folder, or list the files"
    if VARIABLE.search(text):
        return NO_VARIABLES
    try:
        if path.is_symlink():
            return f"it is a symbolic link to {path.readlink()}, which does not exist"
        return suggest(path.name, [sibling.name for sibling in path.parent.iterdir()], "", f"{path.parent / '{}'}")
    except (OSError, ValueError):
        return ""
