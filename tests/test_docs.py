"""Documentation: links, paths, make targets, commands and configuration files exist; pages follow their template.

Each check is a function from a text to faults; planted faults show that it can fail.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.config.generate import read_common
from tests.forked import ROOT

from recipes_lib.cli import COMMANDS
from recipes_lib.config.command_flags import FLAGS
from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.loader import load_config
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.config.table import TABLES, load_table
from recipes_lib.errors import ConfigError

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
TOP_FOLDERS = ("src", "recipes", "docs", "tests", "accelerate_configs", "benchmarks")
USERS_OWN = re.compile(r"mine|old|chats|RECIPE|\bF\b|[<*{]|\.\.\.|-N")
"""Placeholders and patterns in the place of file names."""

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KNOWN_FLAGS = {
    *("help", "version", "config_file", "pipeline_stages", "pipeline_schedule", "to"),  # Of parsers; added in code.
    *re.findall(r"'(\w+)': \{", str(FLAGS)),
    *(key for recipe in TABLES for key in load_table(recipe).keys),
}
"""Flags of any command, and keys of any recipe."""


def read_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read_commands(text: str) -> Iterator[str]:
    """Yield every command: lines of console blocks, and inline code that begins with a known program."""
    for _, language, body in FENCE.findall(text):
        if language in {"console", "bash", "sh"}:
            yield from (line.strip().removeprefix("$ ") for line in body.splitlines() if line.strip())
    for code in CODE.findall(FENCE.sub("", text)):
        if code.split()[0] in {"make", "recipes", "python", "accelerate", "bash"}:
            yield code


def find_local_links(text: str) -> list[str]:
    links = [link.split("#")[0] for link in LINK.findall(FENCE.sub("", text))]
    return [link for link in links if link and "://" not in link]


def find_dead_links(page: Path, text: str) -> list[str]:
    return [link for link in find_local_links(text) if not (page.parent / link).exists()]


def find_missing_paths(text: str) -> list[str]:
    """Return paths that do not exist; inline code that begins with a folder of the project is a path."""
    codes = [word for code in CODE.findall(FENCE.sub("", text)) for word in code.split()]
    words = [word for command in read_commands(text) for word in command.split()]
    named = {word for word in [*codes, *words] if word.split("/")[0] in TOP_FOLDERS and "/" in word}
    return sorted(path for path in named if not USERS_OWN.search(path) and not (ROOT / path).exists())


def find_wrong_commands(text: str) -> list[str]:
    return [f"{command}: {fault}" for command in read_commands(text) for fault in _find_faults(command)]


def _find_faults(command: str) -> Iterator[str]:
    program, *arguments = shlex.split(command, comments=True)
    if program == "make" and not {word for word in arguments if "=" not in word} <= read_targets():
        yield "no such target"
    if program == "recipes" and arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        yield "no such command"
    for flag, value in itertools.pairwise(arguments):
        if (
            flag == "-m"
            and value.startswith("recipes_lib.")
            and not (ROOT / "src" / f"{value.replace('.', '/')}.py").exists()
        ):
            yield f"no such module as {value}"
        if flag in {"--config", "--config_file"} and not USERS_OWN.search(value) and not (ROOT / value).exists():
            yield f"no such file as {value}"
    if program == "recipes" or "recipes/" in command:
        flags = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
        yield from (f"no such flag as --{flag}" for flag in sorted(flags - KNOWN_FLAGS))


RECIPE_PAGES = {
    "pretraining": "pretrain",
    "evaluation": "eval",
    "synthesize": "synthesize",
    **{name: name for name in ("corpus", "sft", "lora", "reward", "dpo", "ppo", "grpo", "distill")},
}
"""Page -> recipe of its example."""
TEMPLATE = (
    *("When to use", "Run it", "Data", "Keys you will touch"),
    *("A healthy run", "Troubleshooting", "Method", "Internals"),
)
MAX_EXAMPLE_LINES = 12


def find_template_faults(text: str) -> list[str]:
    """Return differences of a recipe page from the template: sections, and the example under "Run it"."""
    parts = re.split(r"^## (.*)$", FENCE.sub(lambda fence: fence[0].replace("\n#", "\n"), text), flags=re.MULTILINE)
    headings, bodies = tuple(parts[1::2]), parts[2::2]
    if headings != TEMPLATE:
        return [f"sections are {headings}, not {TEMPLATE}"]
    faults = [f"section {name!r} is empty" for name, body in zip(headings, bodies, strict=True) if not body.strip()]
    fences = [
        (language, body) for _, language, body in FENCE.findall(dict(zip(headings, bodies, strict=True))["Run it"])
    ]
    if [language for language, _ in fences[:2]] != ["yaml", "console"]:
        return [*faults, "'Run it' does not begin with a YAML block and its commands"]
    if len(fences[0][1].splitlines()) > MAX_EXAMPLE_LINES:
        faults.append(f"example has more than {MAX_EXAMPLE_LINES} lines")
    if "recipes check --config" not in fences[1][1]:
        faults.append("no `recipes check` of the example")
    return faults


def load_example(page: str, text: str, folder: Path) -> object:
    """Parse the example of a recipe page as its recipe does."""
    config = folder / "example.yaml"
    config.write_text(FENCE.search(text)[3])  # type: ignore[index]
    recipe, argv = RECIPE_PAGES[page], ["--config", str(config)]
    commands = {"corpus": CorpusConfig.parse, "eval": EvalConfig.parse, "synthesize": SynthesisConfig.parse}
    return commands[recipe](argv) if recipe in commands else load_config(recipe, argv)


@pytest.mark.parametrize("page", RECIPE_PAGES)
def test_recipe_page_follows_template(page: str) -> None:
    assert find_template_faults((ROOT / "docs" / f"{page}.md").read_text()) == []


@pytest.mark.parametrize("page", RECIPE_PAGES)
def test_example_of_recipe_page_is_valid(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    load_example(page, text, tmp_path)
    with pytest.raises(ConfigError, match="output_dirr"):
        load_example(page, text.replace("output_dir:", "output_dirr:", 1), tmp_path)


@pytest.mark.parametrize("page", RECIPE_PAGES)
def test_keys_of_recipe_page_are_common_keys_of_reference(page: str) -> None:
    section = (ROOT / "docs" / f"{page}.md").read_text().split("## Keys you will touch")[1].split("\n## ")[0]
    named = {key for row in section.splitlines() if row.startswith("| `") for key in CODE.findall(row.split("|")[1])}
    named = {key.split(":")[0] for key in named}
    assert named
    assert sorted(named - set(read_common(RECIPE_PAGES[page]))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## Data", "## Rows"),
        ("## Internals", "## Internals\n\n## Notes"),
        ("## Data", "## Keys you will touch\n\n## Data"),
        ("```yaml", "```text"),
        ("output_dir:", "a: 1\nb: 1\nc: 1\noutput_dir:"),
        ("$ recipes check", "$ recipes plan"),
        ("## Method\n", "## Method\n\n## Internals\n"),
    ],
)
def test_find_template_faults_finds_planted_fault(old: str, new: str) -> None:
    text = (ROOT / "docs" / "sft.md").read_text()
    assert old in text
    assert find_template_faults(text.replace(old, new, 1))


def test_pages_are_found() -> None:
    expected = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md", "docs/design.md", "docs/quickstart.md"}
    assert expected <= set(NAMES)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    assert find_dead_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_exist(page: Path) -> None:
    assert find_missing_paths(page.read_text()) == []


def test_tests_that_docstrings_name_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"``(tests/[\w/]+\.py)``", text)}
    assert len(named) > 100
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page: Path) -> None:
    faults = find_wrong_commands(page.read_text())
    # The changelog also names flags that were removed.
    assert [fault for fault in faults if page.name != "CHANGELOG.md" or "no such flag" not in fault] == []


@pytest.mark.parametrize("config", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.name)
def test_commands_in_config_headers_exist(config: Path) -> None:
    lines = [line.lstrip("# ") for line in config.read_text().splitlines() if line.startswith("#")]
    text = "```console\n" + "\n".join(line for line in lines if line.startswith(("accelerate ", "python "))) + "\n```\n"
    assert find_missing_paths(text) == []
    assert find_wrong_commands(text) == []


def test_index_links_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert sorted(set((ROOT / "docs").rglob("*.md")) - linked - {index}) == []


def test_site_navigation_has_every_page_once() -> None:
    def flatten(nav: list[Any]) -> Iterator[str]:
        for entry in nav:
            yield from [entry] if isinstance(entry, str) else flatten(*entry.values())

    pages = list(flatten(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(pages) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md"))


def test_pages_have_no_mermaid_diagrams() -> None:
    """The site loads nothing from the network, so it cannot draw Mermaid diagrams."""
    languages = {language for page in PAGES for _, language, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
    assert "console" in languages
    assert "mermaid" not in languages


def test_no_list_item_follows_an_indented_paragraph_directly() -> None:
    """Python-Markdown, unlike GitHub, reads the item as text of that paragraph."""
    swallowed = re.compile(r"\n\n {4}(?![-*|` ]|\d+\.)\S.*(?:\n {4}.*)*\n- ")
    assert swallowed.search("- a\n    - b\n\n    text\n    more\n- c\n")
    assert [name for name, page in zip(NAMES, PAGES, strict=True) if swallowed.search(page.read_text())] == []


def test_site_contains_linked_files() -> None:
    carried = re.search(r"^SITE_FILES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert carried
    docs, files = ROOT / "docs", [ROOT / name for name in carried[1].split()]
    linked = {
        (page.parent / link).resolve() for page in docs.rglob("*.md") for link in find_local_links(page.read_text())
    }
    outside = [path for path in linked if not path.is_relative_to(docs)]
    assert outside
    assert [path for path in outside if not any(path.is_relative_to(file) for file in files)] == []


def test_exit_codes_of_readme_match_errors() -> None:
    from recipes_lib import errors

    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    listed = re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {int(code) for code in listed} == codes


def test_design_page_lists_imports_of_every_package() -> None:
    table = (ROOT / "docs" / "design.md").read_text().split("Allowed imports:")[1].split("\n\n")[1]
    rooms = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    folders = {path.parent.name for path in (ROOT / "src" / "recipes_lib").glob("*/__init__.py")}
    assert sorted(folders - rooms) == []


def test_each_tutorial_has_a_picture() -> None:
    tutorials = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    assert tutorials
    assert [page.name for page in tutorials if "](../images/" not in page.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("text", ["[here](missing.md)", "[here](missing.md#part)", "![curve](images/missing.png)"])
def test_find_dead_links_finds_planted_link(text: str) -> None:
    assert len(find_dead_links(ROOT / "README.md", text)) == 1
    assert find_dead_links(ROOT / "README.md", "[a](https://example.org) [b](#part) [c](docs/index.md#part)") == []


@pytest.mark.parametrize(
    "text",
    ["see `src/recipes_lib/absent.py`", "`python recipes/absent.py`", "```console\n$ python recipes/absent.py\n```\n"],
)
def test_find_missing_paths_finds_planted_path(text: str) -> None:
    assert len(find_missing_paths(text)) == 1
    assert find_missing_paths("`recipes/configs/<model>/<recipe>.yaml` and `docs/index.md`") == []


@pytest.mark.parametrize(
    "text",
    [
        "run `make absent`",
        "run `recipes absent --config F`",
        "run `recipes plan --config F --gpuss 8xH100`",
        "run `python recipes/sft.py --config F --learning_rat=1`",
        "```bash\nmake check absent\n```\n",
        "```console\n$ recipes absent\n```\n",
        "```console\n$ recipes check --config recipes/configs/absent.yaml\n```\n",
        "```console\n$ accelerate launch --config_file accelerate_configs/absent.yaml x.py\n```\n",
        "`python -m recipes_lib.absent`",
        "1. Indented:\n\n   ```console\n   $ make absent\n   ```\n",
    ],
)
def test_find_wrong_commands_finds_planted_command(text: str) -> None:
    assert len(find_wrong_commands(text)) == 1
    assert find_wrong_commands("`make check` `recipes check --config F` `recipes --help`") == []


def list_anchors(page: str) -> set[str]:
    """Return the anchors of a page: GitHub's for its headings, and explicit ones."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower()) for heading in headings]
    named = set(re.findall(r'<a id="([\w-]+)"></a>', page))
    return named | {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def find_dead_anchors(path: Path, text: str) -> list[str]:
    """Return links to missing headings; in code, paths of pages are relative to the project."""
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text) if path.suffix == ".md" else []
    places = [((path.parent / name) if name else path, anchor) for name, anchor in links]
    if path.suffix != ".md":
        places = [(ROOT / name, anchor) for name, anchor in re.findall(r"(docs/[\w/]+\.md)#([\w-]+)", text)]
    return [f"{path}: {page.name}#{anchor}" for page, anchor in places if anchor not in list_anchors(page.read_text())]


def test_heading_links_resolve() -> None:
    folders = (ROOT / name for name in ("docs", "src", "recipes"))
    named = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".py", ".yaml")}
    read = {path: path.read_text() for path in sorted(named | set(ROOT.glob("*.md")))}
    assert [dead for path, text in read.items() for dead in find_dead_anchors(path, text)] == []


def test_find_dead_anchors_finds_planted_anchor(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The [`Title`](x.md), in *two* words\n\n```sh\n# no heading\n```\n")
    alive, dead = "[a](#the-title-in-two-words) [b](page.md#the-title-in-two-words)", "[c](page.md#no-heading)"
    assert find_dead_anchors(page, alive) == []
    assert len(find_dead_anchors(page, dead)) == 1
