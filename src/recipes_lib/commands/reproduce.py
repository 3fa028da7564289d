"""``recipes reproduce``: restore configuration and package versions of a published run, and report differences."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from packaging.version import VERSION_PATTERN, Version

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.loader import check_text
from recipes_lib.config.paths import RECIPES, REFERENCES, find_shipped
from recipes_lib.config.table import RECIPE_NAMES, load_table
from recipes_lib.environment import explain_refusal_of_hub, read_git_commit, read_versions
from recipes_lib.errors import ConfigError, DataError, Problem, UserError, escape_controls
from recipes_lib.files import Fields, explain_write_errors, read_record

_OF_THE_PLACE: Final = ("output_dir", "prepared_dir", "push_to_hub", "hub_", "run_name", "overwrite_")
"""Prefixes of keys about paths and publishing, which are not restored."""
_IMPORTED: Final = ("callbacks", "metrics", "reward_funcs", "trust_remote_code")
"""Keys whose values import code, directly or from the repository of a model."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: There is no record of a run, or its configuration is no longer valid; all problems at once.
    """
    options = CommandParser("reproduce").parse_args(argv)
    record = _read_record(options.source, options.revision)
    recipe = record["stage"]
    # Resolved, because `..` has no name of its own.
    folder: Path = options.output or Path("reproduced") / Path(options.source).resolve().name
    config_file, constraints = folder / f"{recipe}.yaml", folder / "constraints.txt"
    keys, lost = restore_keys(record)
    keys["output_dir"] = str(folder / "run")
    head = [f"{escape_controls(options.source)}, by `recipes reproduce`."]
    if code := {key: keys.pop(key) for key in list(keys) if runs_code(key, keys[key])}:
        head += ["These keys run code: read it, and remove the # of those that you trust."]
        head += [f"{key}: {json.dumps(value)}" for key, value in code.items()]
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    with explain_write_errors(folder, "name another --output"):
        folder.mkdir(parents=True, exist_ok=True)
        config_file.write_text(text, encoding="utf-8")
        constraints.write_text("".join(f"{line}\n" for line in list_constraints(record)), encoding="utf-8")
    sys.stdout.write(f"restored {config_file} ({len(keys)} keys) and {constraints}\n")
    lost += [
        f"the key {key}, which was {value!r}, runs code: {config_file} has it as a comment"
        for key, value in code.items()
    ]
    sys.stdout.writelines(f"differs: {escape_controls(line)}\n" for line in (*lost, *compare(record, keys)))
    try:
        training = check_text(recipe, text, config_file).training
    except UserError as error:
        raise ConfigError(*error.problems) from None
    from recipes_lib.training.checkpoints.resume import count_rows_per_step  # Imports torch.

    before, rows = record.get("rows_per_step"), count_rows_per_step(training, record["num_processes"])
    if before not in (None, rows):
        found = f"a step had {before:,} rows, and has {rows:,} in data parallelism alone"
        sys.stdout.write(f"differs: {found}: start it by `recipes launch`, with the launch file of the run\n")
    launcher = "python" if record["num_processes"] == 1 else f"torchrun --nproc_per_node {record['num_processes']}"
    script = find_shipped(RECIPES / f"{recipe}.py")
    # Outside of a clone, the recipe is that of the installed package.
    package = "recipes-lib" if script.is_absolute() else "-e ."
    sys.stdout.write(f"same packages:  python -m pip install -c {shlex.quote(str(constraints))} {package}\n")
    sys.stdout.write(f"same run:       {launcher} {shlex.join([str(script), '--config', str(config_file)])}\n")


def runs_code(key: str, value: Any) -> bool:
    """Return whether a key with this value imports or downloads code; a record, which is untrusted, may not."""
    # An attention implementation with a slash is a kernel repository on the Hub.
    return (key in _IMPORTED and bool(value)) or (key == "attn_implementation" and "/" in str(value))


def restore_keys(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that reproduce a run, and a message for each key that no longer exists.

    Defaults are included if they have changed since. If the model was not pinned, ``model_revision`` becomes the commit
    that the run has used.
    """
    table, given, lost = load_table(record["stage"]), {}, []
    for key, value in record["config"].items():
        origin = record["provenance"].get(key, "default")
        if key.startswith(_OF_THE_PLACE) or origin.startswith("derived"):
            continue
        if key not in table.keys:
            lost.append(f"the key {key}, which was {value!r}, no longer exists")
        elif origin != "default" or value != table.keys[key].default:
            given[key] = value
    # The recipe may have named no revision.
    commit = record.get("model_commit")
    if commit and not given.get("model_revision"):
        given["model_revision"] = commit
    # `null` is only written where it disables a default.
    return {
        key: value for key, value in given.items() if value is not None or table.keys[key].default is not None
    }, lost


def compare(record: Mapping[str, Any], keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield known and possible differences between the run and this machine: packages, code, data, device."""
    now = read_versions()
    for name, version in record["versions"].items():
        if now.get(name) != version:
            yield f"{name} was {version} and is {now.get(name, 'not installed')}"
    commit = read_git_commit()
    if record.get("git_commit") != commit:
        yield f"the working directory was at commit {record.get('git_commit')} and is at {commit}"
    elif commit is None or commit.endswith("-dirty"):
        yield "the code had uncommitted changes or no commit, so that it may not be the same"
    datasets = _list_datasets(keys)
    models_and_files = {key: {"name": keys.get(key)} for key in (*REFERENCES, "replay_from", "chat_template_path")}
    for key, entry in (models_and_files | datasets).items():
        name = str(entry.get("name") or "")
        # One slash: probably a Hub id.
        is_on_hub = name.count("/") == 1
        if name and not is_on_hub and not find_shipped(Path(name)).exists():
            yield f"{key}: {name} was a file or folder of the machine that trained; put it here"
        elif is_on_hub and key in datasets and not entry.get("revision"):
            yield f"{key}: {name} was not pinned by a revision; its rows may have changed"
    inputs = (record.get("data") or {}).get("inputs")
    sources = inputs.get("sources") if isinstance(inputs, dict) else None
    for split, digest in sources.items() if isinstance(sources, dict) else ():
        yield f"data: the {split} rows had the fingerprint {str(digest)[:16]}; `recipes prepare` records yours"
    device = (record.get("hardware") or {}).get("device")
    yield f"device: it was {record['num_processes']} x {device}; other devices round differently"


def _list_datasets(keys: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the datasets of a configuration that is not validated yet, as entries of a mixture."""
    entries: dict[str, Mapping[str, Any]] = {
        "dataset_name": {"name": keys.get("dataset_name"), "revision": keys.get("dataset_revision")},
        "replay_dataset": {"name": keys.get("replay_dataset")},
    }
    for key in ("dataset_mixture", "eval_datasets"):
        parts = dict(enumerate(keys[key])) if isinstance(keys.get(key), list) else keys.get(key)
        for name, part in parts.items() if isinstance(parts, dict) else ():
            entries |= {f"{key}[{name}]": part} if isinstance(part, dict) else {}
    return entries


def list_constraints(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a constraints file, without local versions such as ``+cpu``, which PyPI does not have."""
    for name, version in record["versions"].items():
        if name == "python":
            yield f"# Python {escape_controls(version)}"
        elif name != "recipes-lib" and version != "not installed":
            yield f"{name}=={Version(version).public}"


def _read_record(source: str, revision: str | None) -> dict[str, Any]:
    """Read ``run.json`` of a folder or a Hub repository.

    Raises:
        ConfigError: There is no ``run.json``, or it is not the record of a run.
    """
    path = Path(source) / "run.json" if Path(source).is_dir() else _fetch(source, revision)
    remedy = "name the output directory of a run"
    try:
        record = read_record(path, _FIELDS)
    except DataError as error:
        (problem,) = error.problems
        raise ConfigError(Problem(source, f"holds no record of a run: run.json {problem.found}", remedy)) from error
    # The record is untrusted input, and parts of it become commands and files.
    valid = {
        "stage": record["stage"] in RECIPE_NAMES,
        "provenance": all(isinstance(origin, str) for origin in record["provenance"].values()),
        "versions": all(_is_version(*pair) for pair in record["versions"].items()),
        "num_processes": record["num_processes"] > 0,
        "model_commit": re.fullmatch("[0-9a-f]{7,64}|None", str(record.get("model_commit"))),
    }
    if wrong := [name for name, is_valid in valid.items() if not is_valid]:
        raise ConfigError(Problem(source, f"run.json is not a run record: {', '.join(wrong)}", remedy))
    return record


_PACKAGE: Final = re.compile("[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION: Final = re.compile(rf"not\ installed|{VERSION_PATTERN}", re.VERBOSE | re.IGNORECASE)
_FIELDS: Final[Fields] = {
    **{"stage": str, "config": dict, "provenance": dict, "versions": dict, "num_processes": int},
    **dict.fromkeys(("git_commit", "model_commit"), str | None),
    **dict.fromkeys(("hardware", "data"), dict | None),
    "rows_per_step": int | None,
}


def _is_version(name: str, version: Any) -> bool:
    # That of Python is only printed; versions such as "3.14.0a1+" do not match the pattern.
    is_pin = isinstance(version, str) and _PACKAGE.fullmatch(name) and _VERSION.fullmatch(version)
    return bool(is_pin) or (name == "python" and isinstance(version, str))


def _fetch(repository: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from recipes_lib.publish.access import NO_ANSWER

    try:
        return Path(HfApi().hf_hub_download(repository, "run.json", revision=revision))
    except (NO_ANSWER, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        otherwise = str(error).strip().partition("\n")[0], "check name, network and login"
        found, remedy = explain_refusal_of_hub(error) or otherwise
        raise ConfigError(Problem(repository, f"its run.json cannot be fetched: {found}", remedy)) from error
