"""Reference of configuration keys in ``docs/configs/``: one page per recipe, and one of the keys that recipes share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2

from recipes_lib.config.recipes import read_common, read_refused
from recipes_lib.config.table import RECIPE_NAMES, TABLES, Key, Retired, describe, load_table

SHARED: Final = "shared"
"""Name of the page of keys that several recipes share."""


def build_reference() -> dict[str, str]:
    """Return the pages, as path below ``docs/`` -> Markdown."""
    shared = find_shared_keys()
    refused = find_shared_refusals()
    pages = {"configs.md": render("configs.md.jinja", keys=_index_keys(shared), tables=TABLES)}
    pages[f"configs/{SHARED}.md"] = render(
        "configs_page.md.jinja",
        title="Keys that recipes share",
        recipe=None,
        touched=[],
        groups=_group(shared.values()),
        about=_describe_groups(),
        defaults=[key for key in shared.values() if key.reason],
        recipes={name: _name_recipes(name) for name in shared},
        required={name for name in shared if all(name in load_table(recipe).required for recipe in _having(name))},
        linked={},
        refused=refused,
    )
    return pages | {f"configs/{recipe}.md": _render_recipe(recipe, shared, refused) for recipe in TABLES}


def find_shared_keys() -> dict[str, Key]:
    """Return the keys whose values, group and meaning are the same in two recipes or more, in the usual variant."""
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
    """Return the keys that every recipe refuses, by cause and remedy."""
    every = [dict(read_refused(recipe)) for recipe in RECIPE_NAMES]
    return _group_refused({name: key for name, key in every[0].items() if all(key == e.get(name) for e in every)})


def _render_recipe(recipe: str, shared: Mapping[str, Key], everywhere: Mapping[tuple[str, str], list[str]]) -> str:
    table = load_table(recipe)
    is_recipe = recipe in RECIPE_NAMES
    own = {
        name: key
        for name, key in table.keys.items()
        if not (is_recipe and name in shared and _identify(shared[name]) == _identify(key))
    }
    refused = dict(read_refused(recipe)) if is_recipe else {}
    named = {name for names in everywhere.values() for name in names}
    return render(
        "configs_page.md.jinja",
        title=f"Keys of `{recipe}`",
        recipe=recipe,
        touched=[(table.keys[name], "" if name in own else f"{SHARED}.md") for name in read_common(recipe)],
        groups=_group(own.values()),
        about=table.groups,
        defaults=[key for name, key in table.keys.items() if key.reason and not _has_shared_default(key, shared)],
        recipes={},
        required=set(table.required),
        linked=_group(key for name, key in table.keys.items() if name not in own),
        refused=_group_refused({name: key for name, key in refused.items() if name not in named}),
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


def _describe_groups() -> dict[str, str]:
    return {group: about for recipe in RECIPE_NAMES for group, about in load_table(recipe).groups.items()}


def _group(keys: Iterable[Key]) -> dict[str, list[Key]]:
    groups: dict[str, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.group, []).append(key)
    return groups


def _group_refused(refused: Mapping[str, Retired]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, key in sorted(refused.items()):
        groups.setdefault((key.found, key.remedy), []).append(name)
    return groups


def _index_keys(shared: Mapping[str, Key]) -> dict[str, list[str]]:
    """Return the pages that describe each key: the shared page, and the recipes whose variant differs."""
    pages: dict[str, list[str]] = {}
    for recipe in TABLES:
        for name, key in load_table(recipe).keys.items():
            is_shared = recipe in RECIPE_NAMES and name in shared and _identify(shared[name]) == _identify(key)
            entry = pages.setdefault(name, [])
            entry += [page for page in [SHARED if is_shared else recipe] if page not in entry]
    return dict(sorted(pages.items()))


def render(template: str, **values: Any) -> str:
    """Return a template of this package as Markdown."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # Markdown, not HTML: nothing is escaped but what would end a cell of a table.
    pages = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    pages.filters |= {
        "json": _show,
        "describe": describe,
        "cell": lambda text: text.replace("|", "\\|").replace("\n", " "),
    }
    return pages.get_template(template).render(values)


def _show(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
