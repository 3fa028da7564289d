"""Generates the key tables, the JSON schemas for editors, and the reference of keys in ``docs/``.

Run ``python -m tests.config.generate`` after a change of ``schema.py``, ``recipes.yaml``, ``renames.yaml`` or
``migration/``, or of the installed transformers and TRL, whose dataclasses it reads, and of ``compatibility.yaml``.
``tests/config/test_generate.py`` verifies that the committed files are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from recipes_lib.config import corpus_keys, evaluation, synthesis_keys
from recipes_lib.config import schema as our_schema
from recipes_lib.config.migration.legacy_files import COMPANIONS, LEGACY_KEYS
from recipes_lib.config.recipes import read_refused, read_renames
from recipes_lib.config.table import RECIPE_NAMES, TABLES, Key, Retired, describe, load_table, read_lists, table_path
from recipes_lib.config.values import is_secret_key
from recipes_lib.training.layouts.compatibility import BLOCKED

Item = typing.TypeVar("Item")
Group = typing.TypeVar("Group", bound=Hashable)
SHARED: Final = "shared"
"""Name of the page with the keys that several recipes share."""
_ROOT = Path(__file__).parents[2]
_CONFIG = Path(our_schema.__file__).parent
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", type(None): "null"}
_REQUIRED = dict.fromkeys(RECIPE_NAMES, ("model_name_or_path", "output_dir")) | {
    "pretrain": ("max_length", "output_dir"),
    "distill": ("model_name_or_path", "teacher_model_name_or_path", "output_dir"),
    "corpus": ("sources", "output_dir"),
    "eval": ("model_name_or_path", "tasks"),
    "synthesize": ("model_name_or_path", "dataset_name", "output_dir"),
}
SECTIONS = dict.fromkeys(RECIPE_NAMES, our_schema.SECTIONS) | {
    "corpus": {
        "input": corpus_keys.InputKeys,
        "text": corpus_keys.TextKeys,
        "privacy": corpus_keys.PrivacyKeys,
        "duplicates": corpus_keys.DuplicateKeys,
        "mixture": corpus_keys.MixtureKeys,
    },
    "eval": {
        "model": evaluation.EvaluatedModelKeys,
        "tasks": evaluation.TaskKeys,
        "output": evaluation.EvaluationOutputKeys,
    },
    "synthesize": {
        "model": synthesis_keys.WriterKeys,
        "requests": synthesis_keys.RequestKeys,
        "method": synthesis_keys.MethodKeys,
        "quality": synthesis_keys.QualityKeys,
        "output": synthesis_keys.SynthesisOutputKeys,
    },
}
"""Recipe or command -> heading in ``--help`` -> the keys below it."""


def main() -> None:
    """Write all generated files."""
    for build in (build_tables, build_documents):
        # The documents are built from the tables that were just written.
        load_table.cache_clear()
        for path, text in build().items():
            path.write_text(text, encoding="utf-8")


def build_tables() -> dict[Path, str]:
    """Return path -> content of the key tables."""
    return {table_path(recipe): _to_json(_build_table(recipe)) for recipe in TABLES}


def build_documents() -> dict[Path, str]:
    """Return path -> content of the JSON schemas and generated pages."""
    documents = {
        table_path(recipe).with_suffix("").with_suffix(".schema.json"): _build_schema(recipe) for recipe in TABLES
    }
    documents |= {_ROOT / "docs" / page: text for page, text in build_reference().items()}
    documents[_ROOT / "docs" / "migration.md"] = format_migration()
    hardware = _ROOT / "docs" / "hardware.md"
    documents[hardware] = re.sub(
        r"\| recipe \| launch file \|.*?\n(?!\|)",
        lambda _: format_blocked(),
        hardware.read_text("utf-8"),
        flags=re.DOTALL,
    )
    return documents


def format_blocked() -> str:
    """Return the table of incompatible options of ``docs/hardware.md``, in Markdown."""
    rows = [
        f"| {row.recipe_text or ', '.join(f'`{key}`' for key in row.keys) or 'any'} "
        f"| {row.launch} | {row.why} | {row.remedy} |\n"
        for row in BLOCKED
    ]
    return "".join(("| recipe | launch file | why not | instead |\n", "|---|---|---|---|\n", *rows))


def read_defaults(recipe: str) -> Mapping[str, tuple[Any, str]]:
    """Return the defaults of a recipe that differ from upstream's: key -> (value, reason)."""
    return {key: tuple(default) for key, default in _gather("defaults", recipe).items()}


def read_choices(recipe: str) -> Mapping[str, list[str | bool]]:
    """Return key -> supported values, for keys whose upstream values are only partly supported."""
    return _gather("choices", recipe)


def read_added_choices(recipe: str) -> Mapping[str, list[str]]:
    """Return key -> values that upstream does not have."""
    return _gather("added_choices", recipe)


def read_common(recipe: str) -> list[str]:
    """Return the keys that most users of a recipe or command set, its own keys first."""
    return [
        key for recipes, keys in _read_recipes()["common"].items() if recipe in recipes.split() for key in keys.split()
    ]


def read_helps() -> Mapping[str, str]:
    """Return key -> help text in place of upstream's."""
    helps: Mapping[str, str] = _read_recipes()["helps"]
    return helps


def read_notes(recipe: str) -> Mapping[str, str]:
    """Return key -> addition to upstream's help text, for a recipe."""
    return _gather("notes", recipe)


def read_bounds() -> Mapping[str, Mapping[str, float]]:
    """Return key -> range of its number, in the keywords of JSON schema."""
    return {
        key: {bound: value for bound, value in entry.items() if bound != "keys"}
        for entry in _read_recipes()["bounds"]
        for key in entry["keys"].split()
    }


def _gather(part: str, recipe: str) -> dict[str, Any]:
    """Return the entries of a section of the file for a recipe: those for all recipes, then its own."""
    return {
        key: value
        for names, keys in _read_recipes()[part].items()
        if recipe in RECIPE_NAMES and {"all", recipe} & set(names.split())
        for key, value in keys.items()
    }


@functools.cache
def _read_recipes() -> Mapping[str, Any]:
    return read_lists(_CONFIG / "recipes.yaml")


def _build_table(recipe: str) -> dict[str, Any]:
    groups: dict[str, str] = {}
    keys: dict[str, Any] = {}
    refused = read_refused(recipe)
    for group, section in SECTIONS[recipe].items():
        fields = {name: key for name, key in _read_section(section, recipe).items() if name not in refused}
        if fields:
            groups[group] = (section.__doc__ or "").split("\n")[0]
            keys |= {name: {"group": group} | key for name, key in fields.items()}
    for name, key in (_read_upstream(recipe) if recipe in RECIPE_NAMES else {}).items():
        if name not in keys and name not in refused and not is_secret_key(name):
            keys[name] = key
            groups.setdefault(key["group"], "")
    # A required key must not be null.
    for name in _REQUIRED[recipe]:
        keys[name]["schema"]["type"] = [kind for kind in keys[name]["schema"]["type"] if kind != "null"]
        keys[name]["help"] = keys[name]["help"].split(" Unset: ")[0]
    return {"stage": recipe, "groups": groups, "required": list(_REQUIRED[recipe]), "keys": keys}


def _read_section(section: type, recipe: str) -> dict[str, dict[str, Any]]:
    hints = typing.get_type_hints(section)
    helps = _read_field_strings(section)
    return {
        field.name: {
            "schema": _describe_key(field.name, hints[field.name], field.metadata.get("items")),
            "help": helps[field.name],
            **_choose_default(field.name, None if field.default is dataclasses.MISSING else field.default, recipe),
        }
        for field in dataclasses.fields(section)
    }


def _choose_default(name: str, general: Any, recipe: str) -> dict[str, Any]:
    """Return the default of a key, and if the recipe overrides it, the general default and the reason."""
    if name not in (defaults := read_defaults(recipe)):
        return {"default": general}
    ours, reason = defaults[name]
    return {"default": ours, "upstream_default": general, "reason": reason}


def _read_field_strings(section: type) -> dict[str, str]:
    """Return field name -> the string literal under the field, parsed from the source of the class."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(section)).body[0]).body
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _read_upstream(recipe: str) -> dict[str, dict[str, Any]]:
    import trl
    from transformers import TrainingArguments
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    configs = {"reward": trl.RewardConfig, "dpo": trl.DPOConfig, "rloo": trl.RLOOConfig, "grpo": trl.GRPOConfig}
    config = TrainingArguments if recipe in ("pretrain", "ppo") else configs.get(recipe, trl.SFTConfig)
    refused = read_refused(recipe)
    hints = typing.get_type_hints(config)
    headings = _read_headings(inspect.getdoc(TrainingArguments) or "")
    choices = {"report_to": ("none", "all", *sorted(INTEGRATION_TO_CALLBACK)), **read_choices(recipe)}
    keys = {}
    for field in dataclasses.fields(config):
        name = field.name
        if name in refused:
            continue
        allowed = choices.get(name) or field.metadata.get("choices")
        keys[name] = {
            "group": headings.get(name, "Model"),
            "schema": _describe_key(name, hints[name], None, allowed),
            "help": read_helps().get(name)
            or " ".join([field.metadata.get("help", "").replace("%%", "%"), read_notes(recipe).get(name, "")]).strip(),
            **_choose_default(name, _read_default(field), recipe),
        }
        if added := read_added_choices(recipe).get(name):
            keys[name]["schema"] = _add_choices(keys[name]["schema"], added)
    return keys


def _add_choices(schema: Mapping[str, Any], added: Sequence[str]) -> dict[str, Any]:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], *added]}
    return {"type": ["boolean", "string", "null"], "enum": [True, False, *added, None]}


def _read_headings(documentation: str) -> dict[str, str]:
    """Return parameter -> its heading (``> Optimizer``) in the docstring of ``TrainingArguments``."""
    headings: dict[str, str] = {}
    heading = "Output"
    for line in documentation.splitlines():
        if match := re.match(r"\s+> ([A-Z][^.]*)$", line):
            heading = match[1].strip()
        elif match := re.match(r"\s+(\w+) ?\(`", line):
            headings[match[1]] = heading
    return headings


def _read_default(field: dataclasses.Field[Any]) -> Any:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return default.value if isinstance(default, enum.Enum) else default


def _describe_key(name: str, hint: Any, items: Any, choices: Any = None) -> dict[str, Any]:
    schema = _describe_type(hint)
    if choices:
        # Some upstream keys are annotated `str` although they accept booleans.
        schema["type"] += ["boolean"] * any(isinstance(choice, bool) for choice in choices)
        target = schema if "array" not in schema["type"] else schema["items"]
        target["enum"] = list(choices)
        if "string" in schema["type"]:
            schema["enum"] = list(choices)
    # An enum without null would reject the default.
    if "enum" in schema and "null" in schema["type"]:
        schema["enum"].append(None)
    if items is not None:
        schema.setdefault("items" if "array" in schema["type"] else "additionalProperties", {}).update(
            _describe_entry(items)
        )
    return {**schema, **read_bounds().get(name, {})}


def _describe_entry(entry: type) -> dict[str, Any]:
    properties, required = {}, []
    for key, hint in typing.get_type_hints(entry, include_extras=True).items():
        if typing.get_origin(hint) is typing.Required:
            required.append(key)
            (hint,) = typing.get_args(hint)
        properties[key] = _describe_key(key, hint, None)
    schema = {"properties": properties, "required": required, "additionalProperties": False}
    # An entry whose only required key is its name may be a string.
    return {"type": ["object", "string"], **schema} if required == ["name"] else schema


def _describe_type(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type annotation; ``dict | str``, for JSON text, is an object only."""
    schema: dict[str, Any] = {"type": []}
    for kind in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        origin = typing.get_origin(kind)
        if origin is list:
            schema["type"].append("array")
            schema["items"] = _describe_type(typing.get_args(kind)[0])
        elif origin is typing.Literal:
            literals = typing.get_args(kind)
            schema["type"] += [_JSON_TYPES[type(value)] for value in literals[:1]]
            if isinstance(literals[0], str):
                schema["enum"] = list(literals)
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            schema["type"].append("string")
            schema["enum"] = [member.value for member in kind]
        else:
            schema["type"].append(_JSON_TYPES[origin or kind])
    names = set(schema["type"])
    # JSON's number includes integers.
    names -= {"integer"} if "number" in names else set()
    names -= {"string"} if "object" in names else set()
    # A fixed order, in which types are tried when a value is parsed.
    schema["type"] = [name for name in ("boolean", "integer", "number", "string", "array", "object") if name in names]
    schema["type"] += ["null"] if "null" in names else []
    return schema


def _build_schema(recipe: str) -> str:
    table = load_table(recipe)
    properties = {
        name: {**key.schema, "description": key.help, "default": key.default} for name, key in table.keys.items()
    }
    return _to_json(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": f"{recipe} recipe",
            "type": "object",
            "properties": properties,
            "required": list(table.required),
            "additionalProperties": False,
        }
    )


def _to_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def format_migration() -> str:
    """Return the migration page in Markdown."""
    renames = read_renames()
    return render(
        "migration.md.jinja",
        meanings=renames.meanings,
        tables={"Keys that were renamed or removed": renames.retired, "Keys that belong elsewhere": renames.elsewhere},
        share_rows=_share_rows,
        retired_values=renames.values,
        mixture_renamed=renames.mixture,
    )


def _share_rows(table: Mapping[str, Retired]) -> dict[tuple[str, str], list[str]]:
    """Return (migration's action, reason and remedy) -> keys."""
    return _group(
        sorted(table), lambda key: (describe_fate(key, table[key]), f"{table[key].found}; {table[key].remedy}")
    )


def describe_fate(key: str, retired: Retired) -> str:
    """Return what migration does with a key, for the migration page; see ``Retired.rewrite``."""
    if key in LEGACY_KEYS:
        return "becomes `dataset_name` or `dataset_mixture`; you decide if its form is unknown"
    if key in COMPANIONS:
        return "is merged into the datasets of the same file; you decide if there are none"
    if retired.values is None:
        return f"becomes `{retired.new}`" if retired.new else "is deleted"
    if not retired.values:
        return f"you decide; see `{retired.new}`" if retired.new else "you decide"
    fates = {_show_plain(value): new for value, new in retired.values.items()}
    deleted = [value for value, new in fates.items() if not new]
    actions = [
        f"`{value}` becomes `{', '.join(f'{key}: {_show_plain(given)}' for key, given in new.items())}`"
        for value, new in fates.items()
        if new
    ]
    actions += [f"{', '.join(f'`{value}`' for value in deleted)} is deleted"] if deleted else []
    return f"{'; '.join(actions)}; you decide at other values"


def _show_plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def build_reference() -> dict[str, str]:
    """Return the pages of keys, as path below ``docs/`` -> Markdown."""
    shared = find_shared_keys()
    refused = find_shared_refusals()
    pages = {"configs.md": render("configs.md.jinja", keys=_index_keys(shared), tables=TABLES)}
    pages[f"configs/{SHARED}.md"] = render(
        "configs_page.md.jinja",
        title="Keys that recipes share",
        recipe=None,
        touched=[],
        groups=_group(shared.values(), lambda key: key.group),
        about={group: about for recipe in RECIPE_NAMES for group, about in load_table(recipe).groups.items()},
        defaults=[key for key in shared.values() if key.reason],
        recipes={name: _name_recipes(name) for name in shared},
        others={name: _name_other_defaults(key) for name, key in shared.items()},
        required={name for name in shared if all(name in load_table(recipe).required for recipe in _having(name))},
        linked={},
        refused=refused,
    )
    return pages | {f"configs/{recipe}.md": _render_recipe(recipe, shared, refused) for recipe in TABLES}


def find_shared_keys() -> dict[str, Key]:
    """Return the keys with the same schema, help and group in at least two recipes, in the most common variant."""
    shared = {}
    for name in dict.fromkeys(name for recipe in RECIPE_NAMES for name in load_table(recipe).keys):
        variants = [load_table(recipe).keys[name] for recipe in _having(name)]
        usual, count = Counter(map(_identify, variants)).most_common(1)[0]
        if count > 1:
            alike = [key for key in variants if _identify(key) == usual]
            (default, reason), _ = Counter((_show(key.default), key.reason) for key in alike).most_common(1)[0]
            shared[name] = next(key for key in alike if (_show(key.default), key.reason) == (default, reason))
    return shared


def find_shared_refusals() -> dict[tuple[str, str], list[str]]:
    """Return (cause, remedy) -> the keys that every recipe rejects."""
    first, *others = (read_refused(recipe) for recipe in RECIPE_NAMES)
    return _group_refused({name: key for name, key in first.items() if all(key == other.get(name) for other in others)})


def _render_recipe(recipe: str, shared: Mapping[str, Key], everywhere: Mapping[tuple[str, str], list[str]]) -> str:
    table = load_table(recipe)
    is_recipe = recipe in RECIPE_NAMES
    own = {
        name: key
        for name, key in table.keys.items()
        if not (is_recipe and name in shared and _identify(shared[name]) == _identify(key))
    }
    named = {name for names in everywhere.values() for name in names}
    return render(
        "configs_page.md.jinja",
        title=f"Keys of `{recipe}`",
        recipe=recipe,
        # Keys of this recipe before shared ones; sorting is stable.
        touched=sorted(
            ((table.keys[name], "" if name in own else f"{SHARED}.md") for name in read_common(recipe)),
            key=lambda pair: pair[1],
        ),
        groups=_group(own.values(), lambda key: key.group),
        about=table.groups,
        defaults=[key for name, key in table.keys.items() if key.reason and not _has_shared_default(key, shared)],
        recipes={},
        others={},
        required=set(table.required),
        linked=_group((key for name, key in table.keys.items() if name not in own), lambda key: key.group),
        refused=_group_refused({name: key for name, key in read_refused(recipe).items() if name not in named}),
    )


def _has_shared_default(key: Key, shared: Mapping[str, Key]) -> bool:
    return key.name in shared and (shared[key.name].default, shared[key.name].reason) == (key.default, key.reason)


def _identify(key: Key) -> Hashable:
    return _show(key.schema), key.help, key.group


def _having(name: str) -> list[str]:
    return [recipe for recipe in RECIPE_NAMES if name in load_table(recipe).keys]


def _name_recipes(name: str) -> str:
    having = _having(name)
    missing = [recipe for recipe in RECIPE_NAMES if recipe not in having]
    if not missing:
        return "all"
    return ", ".join(having) if len(having) <= len(missing) else f"all but {', '.join(missing)}"


def _name_other_defaults(shared: Key) -> str:
    """Return the defaults of recipes that differ from a shared key's, as "; sft `2e-05`"."""
    having = {recipe: load_table(recipe).keys[shared.name] for recipe in _having(shared.name)}
    same = {recipe: _show(key.default) for recipe, key in having.items() if _identify(key) == _identify(shared)}
    others = _group((recipe for recipe in same if same[recipe] != _show(shared.default)), same.__getitem__)
    return "".join(f"; {', '.join(recipes)} `{default}`" for default, recipes in others.items())


def _group(items: Iterable[Item], describe_group: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    groups: dict[Group, list[Item]] = {}
    for item in items:
        groups.setdefault(describe_group(item), []).append(item)
    return groups


def _group_refused(refused: Mapping[str, Retired]) -> dict[tuple[str, str], list[str]]:
    return _group(sorted(refused), lambda name: (refused[name].found, refused[name].remedy))


def _index_keys(shared: Mapping[str, Key]) -> dict[str, list[str]]:
    """Return key -> pages that describe it: the shared page, and the recipes whose variant differs."""
    pages: dict[str, list[str]] = {}
    for recipe in TABLES:
        for name, key in load_table(recipe).keys.items():
            is_shared = recipe in RECIPE_NAMES and name in shared and _identify(shared[name]) == _identify(key)
            entry = pages.setdefault(name, [])
            entry += [page for page in [SHARED if is_shared else recipe] if page not in entry]
    return dict(sorted(pages.items()))


def render(template: str, **values: Any) -> str:
    """Render a Jinja template of this folder as Markdown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # Markdown needs no HTML escaping; `cell` escapes what would end a table cell.
    pages = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    pages.filters |= {
        "json": _show,
        "describe": describe,
        "cell": lambda text: text.replace("|", "\\|").replace("\n", " "),
    }
    return pages.get_template(template).render(values)


def _show(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
