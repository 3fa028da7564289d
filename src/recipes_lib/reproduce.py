"""``recipes reproduce``: restore configuration and environment of a published run, and say what no longer matches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.loader import check_text
from recipes_lib.config.table import STAGES, load_table
from recipes_lib.environment import read_git_commit, read_versions
from recipes_lib.errors import ConfigError, Problem, UserError

_OF_THE_PLACE: Final = ("output_dir", "prepared_dir", "push_to_hub", "hub_", "run_name", "overwrite_")
"""Where a run put things and whom it told: that is decided anew."""
_FILES: Final = (
    "model_name_or_path",
    "tokenizer_name_or_path",
    "adapter_name_or_path",
    "dataset_name",
    "chat_template_path",
)


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: There is no record of a run, or the configuration is not accepted any more: every problem at once.
    """
    options = _parse(argv)
    record = _read_record(options.source, options.revision)
    stage = record["stage"]
    folder: Path = options.output or Path("reproduced") / Path(options.source).name
    recipe, constraints = folder / f"{stage}.yaml", folder / "constraints.txt"
    keys, lost = restore_keys(record)
    keys["output_dir"] = str(folder / "run")
    text = f"# {options.source}, by `recipes reproduce`.\n{yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)}"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(text, encoding="utf-8")
    constraints.write_text("".join(f"{line}\n" for line in list_constraints(record)), encoding="utf-8")
    sys.stdout.write(f"restored {recipe} ({len(keys)} keys) and {constraints}\n")
    differences = [*lost, *compare(record, keys)]
    sys.stdout.write("".join(f"differs: {line}\n" for line in differences) or "everything that is recorded matches\n")
    problems: Sequence[Problem] = ()
    try:
        check_text(stage, text, recipe)
    except UserError as error:
        problems = error.problems
    if problems:
        raise ConfigError(*problems)
    launcher = "python" if record["num_processes"] == 1 else f"torchrun --nproc_per_node {record['num_processes']}"
    sys.stdout.write(f"same packages:  python -m pip install -c {constraints} -e .\n")
    sys.stdout.write(f"same run:       {launcher} recipes/{stage}.py --config {recipe}\n")


def restore_keys(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what was configured, as today's recipe has to say it, and what it cannot say any more.

    What was left to a default is written where the default is another one now. The commit of a model that was not
    pinned becomes its ``model_revision``.
    """
    table, given, lost = load_table(record["stage"]), {}, []
    for key, value in record["config"].items():
        origin = record["provenance"].get(key, "default")
        if key.startswith(_OF_THE_PLACE) or origin.startswith("derived"):
            continue
        if key not in table.keys:
            lost.append(f"the key {key}, which was {value!r}, is not known any more")
        elif origin != "default" or value != _plain(table.keys[key].default):
            given[key] = value
    commit = record.get("model_commit")
    if commit and not given.get("model_revision"):
        given["model_revision"] = commit
    # Null says what a default says, except where it switches one off.
    return {
        key: value for key, value in given.items() if value is not None or table.keys[key].default is not None
    }, lost


def compare(record: Mapping[str, Any], keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not as it was, or cannot be known to be: packages, code, data, device."""
    now = read_versions()
    for name, version in record["versions"].items():
        if now.get(name) != version:
            yield f"{name} was {version} and is {now.get(name, 'not installed')}"
    commit = read_git_commit()
    if record.get("git_commit") != commit:
        yield f"the working directory was at commit {record.get('git_commit')} and is at {commit}"
    elif commit is None or commit.endswith("-dirty"):
        yield "the code was no commit, so that nobody can tell whether it is the same"
    for key in _FILES:
        name = keys.get(key)
        if name and not Path(name).exists() and name.count("/") != 1:
            yield f"{key}: {name} was a file or folder of the machine that trained; put it here"
    if keys.get("dataset_name", "").count("/") == 1 and not keys.get("dataset_revision"):
        yield f"dataset_name: no revision of {keys['dataset_name']} was named, so that its rows may be others now"
    sources = record.get("data", {}).get("inputs", {}).get("sources", {})
    for split, digest in sources.items():
        yield f"data: the {split} rows had the fingerprint {str(digest)[:16]}; `recipes prepare` records that of yours"
    device = record.get("hardware", {}).get("device")
    yield f"device: it was {record['num_processes']} x {device}; another one rounds differently"


def list_constraints(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a constraints file; builds such as ``+cpu`` are the package index's choice."""
    for name, version in record["versions"].items():
        if name == "python":
            yield f"# Python {version}"
        elif name != "recipes-lib" and version != "not installed":
            yield f"{name}=={version.partition('+')[0]}"


def _read_record(source: str, revision: str | None) -> dict[str, Any]:
    """``run.json`` of a folder, or of a repository.

    Raises:
        ConfigError: There is none, or none of a run that could be made again.
    """
    path = Path(source) / "run.json"
    if not Path(source).is_dir():
        path = _fetch(source, revision)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem(source, "holds no run.json that can be read", "name what a recipe has made")
        ) from error
    missing = {"stage", "config", "provenance", "versions", "num_processes"} - record.keys()
    if missing or record["stage"] not in STAGES:
        found = f"run.json is no record of a run: {', '.join(sorted(missing)) or record['stage']!s}"
        raise ConfigError(Problem(source, found, "name what a recipe has made"))
    return record


def _fetch(repository: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(HfApi().hf_hub_download(repository, "run.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        words = str(error).strip().partition("\n")[0]
        raise ConfigError(
            Problem(repository, f"its run.json cannot be fetched: {words}", "check name and login")
        ) from error


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes reproduce", description=__doc__)
    parser.add_argument("source", help="repository on the Hub, or output directory of a run")
    parser.add_argument("--revision", help="commit, branch or tag of the repository, such as step-500")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write to (default: reproduced/NAME)")
    return parser.parse_args(argv)
