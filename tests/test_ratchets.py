"""Structural rules: sizes, names, one owner for every concern, a test file for every module.

Each rule is a function from sources to violations; planted violations show that it can fail.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
import trl
from tests.forked import ROOT
from transformers import Trainer

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_FOLDER_MODULES = 15
MODULES_WITHOUT_A_TEST: frozenset[str] = frozenset()
"""Modules without a test file. May only shrink."""

MIN_SHARED_LINES = 100
FRAGMENTS: frozenset[str] = frozenset()
"""Short modules with a single importer, in their own folder. May only shrink."""

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
SHADOWED_BY_A_RECIPE = {"evaluate", "datasets", "tokenize", "profile", "trl", "peft", "accelerate", "torch", "types"}
"""Modules that a recipe of this name would shadow: a script's folder is first on ``sys.path``."""

LIBRARY, CODE = ("src/", "recipes/"), ("src/", "recipes/", "benchmarks/")
TEXT_RULES: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "the ignore index has one owner": (r"(?<![\w.)\]])-100\b(?!\.)", CODE, ("data/packed/collators.py",)),
    # In Python: tests/test_security.py.
    "remote code is disabled by default": (r"^\s*trust_remote_code:\s*[Tt]rue", CODE, ()),
    "the environment is read in one place": (
        r"\bos\.(environ|getenv|putenv)\b|from os import .*\b(environ|getenv)\b",
        LIBRARY,
        # Rank and world size, needed before other modules are imported; the demo starts commands as a user does.
        ("training/layouts/launch_environment.py", "processes.py", "demo/walkthrough.py"),
    ),
    # A new layer is created on the device of its neighbours.
    "the device of a model has one owner": (r"parameters\(\)\)\.device", ("src/",), ("models/adapters/roles.py",)),
    "the default of a training key has one owner": (
        r"""\btraining\.get\(["'\w]+, """,
        LIBRARY,
        ("config/schema.py",),
    ),
    "Python objects pass between ranks in one place": (
        r"distributed\.is_initialized\(|\b(all_gather_object|broadcast_object_list|gather_object)\(",
        LIBRARY,
        ("training/collectives.py",),
    ),
    "files are locked and hashed in one place": (
        r"\bfcntl\.|\bfile_digest\(|sha256\([^)]*read_bytes",
        LIBRARY,
        ("files.py",),
    ),
    "JSON files are read in one place": (
        r"\bjson\.load\(|\bjson\.loads\((line\b|.*\bread_(text|bytes)\()",
        LIBRARY,
        # The package's own table, which is trusted; `config` may not import `files`.
        ("files.py", "config/table.py"),
    ),
    "files are replaced in one place": (
        r"\bos\.(replace|rename)\(|\bpartial\.(replace|rename)\(",
        LIBRARY,
        # Folders of prepared sets; NumPy shards of a teacher's log-probabilities.
        ("files.py", "data/store.py", "distillation/teacher_store.py"),
    ),
    "the launch is read by entry points only": (
        r"\bread_launch\(\)",
        ("src/",),
        (
            "training/layouts/launch_environment.py",
            # A trainer is constructed with transformers' arguments only.
            "training/checkpoints/checkpointing.py",
            # Entry points of recipes and of commands that compute like a recipe.
            *("training/forgetting/fisher_command.py", "publish/final_model.py", "commands/sampling.py"),
            *("commands/score.py", "commands/generated/synthesize.py", "commands/generated/distill_store.py"),
        ),
    ),
    "no TODO comments": (r"\b(TODO|FIXME|XXX)\b", ("",), ("tests/test_ratchets.py",)),
    "no absolute paths of a machine": (r"(?<![\w.~}])/(home|root|Users|work)/\w", ("",), ("tests/test_ratchets.py",)),
}
"""Rule -> (forbidden regular expression, path prefixes to search, exempt files, those of the library below it)."""

TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".jinja", ".txt", ".cfg", ""}
NUM_PRIVATE_OVERRIDES = 16
"""Number of private methods of transformers' and TRL's trainers that are overridden. May only shrink."""
_UPSTREAM_VERSION = re.compile(r"#.*\b(transformers|trl|accelerate|peft) \d")

LEFT_OUT = {
    *(".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
    *("build", "dist", "demo", "outputs"),
}


@functools.cache
def read_project() -> Mapping[str, str]:
    """Return the text of every file of the project by its relative path."""
    ours = [
        place for place in sorted(ROOT.iterdir()) if place.name not in LEFT_OUT and not place.name.startswith(".venv")
    ]
    paths = [path for place in ours for path in ([place] if place.is_file() else sorted(place.rglob("*")))]
    named = {
        path.relative_to(ROOT).as_posix(): path for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file()
    }
    return {name: path.read_text(encoding="utf-8") for name, path in named.items() if ".egg-info/" not in name}


def read_python(*prefixes: str) -> dict[str, str]:
    return {path: text for path, text in read_project().items() if path.endswith(".py") and path.startswith(prefixes)}


@functools.cache
def parse(source: str) -> ast.Module:
    """Parse a module; the trees are shared, so they must not be changed."""
    return ast.parse(source)


def find_forbidden_text(rule: str, path: str, text: str) -> list[str]:
    pattern, prefixes, exceptions = TEXT_RULES[rule]
    if not path.startswith(prefixes) or path.removeprefix("src/recipes_lib/") in exceptions:
        return []
    if not re.search(pattern, text, re.MULTILINE):  # Much faster than line by line.
        return []
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{number}: {rule}: {line.strip()}" for number, line in lines if re.search(pattern, line)]


def find_long_file(path: str, text: str) -> list[str]:
    length = len(text.splitlines())
    return [f"{path}: {length} lines, at most {MAX_FILE_LINES}"] if length > MAX_FILE_LINES else []


def find_long_functions(path: str, source: str) -> list[str]:
    """Count lines of code: without docstring, blank lines and comments."""
    functions = [node for node in ast.walk(parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # Tokenising is slow, so only for candidates.
    spans = [(node, range(node.lineno, (node.end_lineno or 0) + 1)) for node in functions]
    spans = [(node, lines) for node, lines in spans if len(lines) > MAX_FUNCTION_LINES]
    if not spans:
        return []
    code = {line for token in _code_tokens(source) for line in range(token.start[0], token.end[0] + 1)}
    faults = []
    for node, lines in spans:
        docstring = node.body[0] if ast.get_docstring(node) is not None else None
        skipped = range(docstring.lineno, (docstring.end_lineno or 0) + 1) if docstring else ()
        if (count := len(code.intersection(lines).difference(skipped))) > MAX_FUNCTION_LINES:
            faults.append(f"{path}:{node.lineno}: {node.name} has {count} lines, at most {MAX_FUNCTION_LINES}")
    return faults


def _code_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    return (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped)


def find_private_overrides(path: str, source: str, upstream: Collection[str]) -> dict[str, bool]:
    """Return overridden private methods of ``upstream`` -> whether a comment names the upstream version.

    The comment is directly above or inside the method.
    """
    found, lines = {}, source.splitlines()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Trainer") for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in upstream:
                    own = lines[method.lineno - 2 : method.end_lineno]
                    found[f"{path}: {node.name}.{method.name}"] = any(map(_UPSTREAM_VERSION.search, own))
    return found


def find_problems_without_remedy(path: str, source: str) -> list[str]:
    """Return the lines of problems without a remedy, except those of documents, which are counted and left out."""
    calls = (node for node in ast.walk(parse(source)) if isinstance(node, ast.Call) and "/corpus/" not in path)
    bare = (call for call in calls if ast.unparse(call.func) == "Problem" and len(call.args) == 2 and not call.keywords)
    return [f"{path}:{call.lineno}" for call in bare if not isinstance(call.args[1], ast.Starred)]


def find_bad_name(path: str) -> list[str]:
    parts = Path(path)
    vague = VAGUE_NAMES & {part.removesuffix(".py") for part in parts.parts}
    if vague:
        return [f"{path}: {vague.pop()!r} is not a specific name"]
    if parts.parent.as_posix() == "recipes" and parts.stem in SHADOWED_BY_A_RECIPE:
        return [f"{path}: hides the module {parts.stem!r} from every recipe"]
    return []


def find_untested_modules(paths: Collection[str]) -> list[str]:
    """Return modules without a test file: that of ``data/windows.py`` is ``tests/data/test_windows.py``."""
    tests = {path for path in paths if path.startswith("tests/")}
    untested = []
    for path in paths:
        module = Path(path)
        if not path.startswith("src/recipes_lib/") or module.name == "__init__.py":
            continue
        room = module.relative_to("src/recipes_lib").parent
        if (Path("tests") / room / f"test_{module.name}").as_posix() not in tests:
            untested.append(path)
    return sorted(untested)


def find_full_folders(paths: Collection[str]) -> list[str]:
    """Return folders with more than ``MAX_FOLDER_MODULES`` modules, not counting ``__init__``."""
    sizes = Counter(Path(path).parent.as_posix() for path in paths if Path(path).name != "__init__.py")
    return [
        f"{folder}: {size} modules, at most {MAX_FOLDER_MODULES}"
        for folder, size in sizes.items()
        if size > MAX_FOLDER_MODULES
    ]


def find_shared_names(paths: Collection[str]) -> list[str]:
    """Return module names that occur in several folders, which makes tracebacks ambiguous."""
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        if Path(path).name != "__init__.py":
            folders.setdefault(Path(path).stem, []).append(Path(path).parent.as_posix())
    return [f"{name}: {', '.join(places)}" for name, places in folders.items() if len(places) > 1]


def find_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return import cycles, including imports inside functions, without those for type checking.

    Args:
        sources: Path below ``src/`` -> text.
    """
    graph = _build_graph(sources)
    reached: dict[str, set[str]] = {}
    for name in graph:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            fresh = graph[waiting.pop()] - found
            found |= fresh
            waiting += fresh
        reached[name] = found
    cycles = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(cycle) for cycle in cycles if cycle)


def find_fragments(sources: Mapping[str, str]) -> list[str]:
    """Return modules below ``MIN_SHARED_LINES`` whose only importer is in the same folder: merge them into it.

    Args:
        sources: Path below ``src/`` -> text.
    """
    graph, fragments = _build_graph(sources), []
    for path, text in sources.items():
        name = path.removesuffix(".py").replace("/", ".")
        importers = [other for other, imported in graph.items() if name in imported]
        is_within = [other.rpartition(".")[0] for other in importers] == [name.rpartition(".")[0]]
        if is_within and len(text.splitlines()) < MIN_SHARED_LINES:
            fragments.append(path)
    return sorted(fragments)


def _build_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return module -> imported modules, both among the given ones."""
    names = {".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    return {name: _imported(sources[path]) & (names.keys() - {name}) for name, path in names.items()}


@functools.cache
def _imported(source: str) -> set[str]:
    """Return imported modules, and imported names, which may be modules too."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_project_files_are_found() -> None:
    assert {"README.md", "Makefile", "pyproject.toml", "src/recipes_lib/errors.py", "tests/conftest.py"} <= set(
        read_project()
    )


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_project_has_no_forbidden_text(rule: str) -> None:
    assert [fault for path, text in read_project().items() for fault in find_forbidden_text(rule, path, text)] == []


@pytest.mark.parametrize("rule", [find_long_file, find_long_functions, find_problems_without_remedy])
def test_library_keeps_rules_of_modules(rule) -> None:
    sources = read_python("src/", "recipes/", "benchmarks/")
    assert [fault for path, source in sources.items() for fault in rule(path, source)] == []


def test_tests_keep_file_size_limit() -> None:
    assert [fault for path, source in read_python("tests/").items() for fault in find_long_file(path, source)] == []


def test_private_overrides_are_explained_and_do_not_grow() -> None:
    upstream = {name for kind in (Trainer, trl.GRPOTrainer, trl.RLOOTrainer) for name in dir(kind)}
    private = {name for name in upstream if name.startswith("_") and not name.startswith("__")}
    found: dict[str, bool] = {}
    for path, source in read_python("src/").items():
        found |= find_private_overrides(path, source, private)
    assert [name for name, is_explained in found.items() if not is_explained] == []
    assert len(found) == NUM_PRIVATE_OVERRIDES, sorted(found)
    assert f"override {NUM_PRIVATE_OVERRIDES} private methods" in (ROOT / "docs" / "design.md").read_text()


def test_find_private_overrides_finds_unexplained_one() -> None:
    planted = "class A(Trainer):\n    def _save(self): ...\n    # trl 1.16 pickles.\n    def _load(self): ...\n"
    assert find_private_overrides("a.py", planted, {"_save", "_load"}) == {
        "a.py: A._save": False,
        "a.py: A._load": True,
    }
    assert find_private_overrides("a.py", planted.replace("Trainer", "Callback"), {"_save"}) == {}


def test_module_names_are_specific() -> None:
    assert [fault for path in read_python("") for fault in find_bad_name(path)] == []


def test_folders_keep_size_limit() -> None:
    assert find_full_folders(list(read_python("src/"))) == []


def test_module_names_are_unique() -> None:
    assert find_shared_names(list(read_python("src/"))) == []


def test_find_shared_names_finds_planted_name() -> None:
    planted = ["pkg/a.py", "web/a.py", "web/b.py", "pkg/__init__.py", "web/__init__.py"]
    assert find_shared_names(planted) == ["a: pkg, web"]


def test_library_has_no_import_cycles() -> None:
    sources = {path.removeprefix("src/"): text for path, text in read_python("src/").items()}
    assert find_cycles(sources) == []


def test_library_has_no_fragments() -> None:
    sources = {path.removeprefix("src/"): text for path, text in read_python("src/").items()}
    assert find_fragments(sources) == sorted(FRAGMENTS)


@pytest.mark.parametrize(
    ("sources", "is_fragment"),
    [
        ({"pkg/b.py": "from pkg.a import f"}, True),
        ({"pkg/b.py": "def g():\n    from pkg import a"}, True),
        ({"pkg/b.py": "from pkg.a import f", "pkg/c.py": "from pkg.a import f"}, False),
        ({"pkg/b.py": "from pkg.a import f", "web/c.py": "from pkg.a import f"}, False),
        ({"web/b.py": "from pkg.a import f"}, False),
        ({"pkg/b.py": "import os"}, False),
    ],
)
def test_find_fragments_finds_planted_fragment(sources: dict[str, str], is_fragment: bool) -> None:
    planted = {"pkg/__init__.py": "", "pkg/a.py": "x = 1\n" * 99, **sources}
    assert find_fragments(planted) == (["pkg/a.py"] if is_fragment else [])
    assert find_fragments(planted | {"pkg/a.py": "x = 1\n" * 100}) == []


def test_every_module_has_test_file() -> None:
    assert find_untested_modules(read_python("")) == sorted(MODULES_WITHOUT_A_TEST)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("the ignore index has one owner", "labels[labels == 0] = -100"),
        ("the ignore index has one owner", "F.cross_entropy(x, y, ignore_index=-100)"),
        ("remote code is disabled by default", "trust_remote_code: true"),
        ("the environment is read in one place", "rank = os.environ['RANK']"),
        ("the environment is read in one place", "rank = os.getenv('RANK')"),
        ("the environment is read in one place", "from os import environ"),
        ("the device of a model has one owner", "device = next(model.parameters()).device"),
        ("the default of a training key has one owner", 'size = config.training.get("per_device_train_batch_size", 8)'),
        ("Python objects pass between ranks in one place", "rank = get_rank() if distributed.is_initialized() else 0"),
        ("Python objects pass between ranks in one place", "distributed.all_gather_object(found, own)"),
        ("files are locked and hashed in one place", "fcntl.flock(file, fcntl.LOCK_EX)"),
        ("files are locked and hashed in one place", "hashlib.file_digest(file, 'sha256')"),
        ("JSON files are read in one place", 'record = json.loads((folder / "run.json").read_text())'),
        ("JSON files are read in one place", "rows = [json.loads(line) for line in file]"),
        ("JSON files are read in one place", "record = json.load(file)"),
        ("files are replaced in one place", "os.replace(staging, target)"),
        ("files are replaced in one place", "partial.replace(path)"),
        ("the launch is read by entry points only", "size = read_launch().data_size"),
        ("no TODO comments", "# TODO: later"),
        ("no absolute paths of a machine", "data = '/home/ada/data'"),
    ],
)
def test_find_forbidden_text_finds_planted_line(rule: str, line: str) -> None:
    assert len(find_forbidden_text(rule, "src/recipes_lib/data/planted.py", f"\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("the ignore index has one owner", "rates at 0-25-50-75-100 %, in [-1000, n-100]"),
        ("the environment is read in one place", "environment = template.environ"),
        ("the default of a training key has one owner", 'is_asked = config.training.get("push_to_hub")'),
        ("Python objects pass between ranks in one place", "used = torch.cuda.is_initialized()"),
        ("JSON files are read in one place", "plain = json.loads(json.dumps(given, default=str))"),
        ("files are replaced in one place", "text = text.replace(old, new)"),
        ("remote code is disabled by default", "'read it, then set trust_remote_code: true and model_revision'"),
        ("no absolute paths of a machine", "~/.cache/x, https://example.org/work/x"),
    ],
)
def test_find_forbidden_text_accepts_similar_line(rule: str, line: str) -> None:
    assert find_forbidden_text(rule, "src/recipes_lib/data/planted.py", line) == []


def test_find_forbidden_text_accepts_owner() -> None:
    owner = "src/recipes_lib/data/packed/collators.py"
    assert find_forbidden_text("the ignore index has one owner", owner, "= -100") == []


def test_find_long_file_finds_planted_file() -> None:
    assert find_long_file("a.py", "x\n" * 600) == []
    assert len(find_long_file("a.py", "x\n" * 601)) == 1


def test_find_problems_without_remedy_finds_planted_one() -> None:
    planted = "Problem('a', 'is b', 'write c')\nProblem('a', *found)\nProblem('a', 'is b')\n"
    assert find_problems_without_remedy("a.py", planted) == ["a.py:3"]


def test_find_long_functions_counts_lines_of_code() -> None:
    padding = '    """One.\n\n    Two.\n    """\n' + "    # why\n\n" * 30
    assert find_long_functions("a.py", "def f():\n" + padding + "    x = 1\n" * 59) == []
    assert len(find_long_functions("a.py", "def f():\n" + padding + "    x = 1\n" * 60)) == 1
    assert len(find_long_functions("a.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * 60)) == 1
    assert len(find_long_functions("a.py", 'def f():\n    x = """\n' + "text\n" * 60 + '"""\n')) == 1


@pytest.mark.parametrize(
    "path",
    ["src/recipes_lib/data/utils.py", "src/recipes_lib/common/a.py", "recipes/evaluate.py", "recipes/datasets.py"],
)
def test_find_bad_name_finds_planted_name(path: str) -> None:
    assert len(find_bad_name(path)) == 1
    assert find_bad_name("src/recipes_lib/training/hooks/evaluate.py") == []


def test_find_untested_modules_finds_planted_module() -> None:
    paths = ["src/recipes_lib/data/chat/encoder.py", "src/recipes_lib/data/__init__.py", "src/recipes_lib/errors.py"]
    assert find_untested_modules([*paths, "tests/test_chat.py", "tests/test_errors.py"]) == [paths[0]]
    assert find_untested_modules([*paths, "tests/data/chat/test_encoder.py", "tests/test_errors.py"]) == []


def test_find_full_folders_finds_planted_folder() -> None:
    paths = ["src/a/__init__.py", *(f"src/a/m{number}.py" for number in range(15))]
    assert find_full_folders(paths) == []
    assert len(find_full_folders([*paths, "src/a/more.py"])) == 1


@pytest.mark.parametrize(
    ("back", "is_cycle"),
    [
        ("from pkg.a import f", True),
        ("import pkg.a", True),
        ("from pkg import a", True),
        ("def g():\n    from pkg.a import f", True),
        ("if TYPE_CHECKING:\n    from pkg.a import f", False),
        ("from pkg.other import f", False),
    ],
)
def test_find_cycles_finds_planted_cycle(back: str, is_cycle: bool) -> None:
    sources = {
        "pkg/__init__.py": "",
        "pkg/a.py": "from pkg.b import g",
        "pkg/b.py": "from pkg.c import h",
        "pkg/c.py": back,
        "pkg/other.py": "import pkg.a",
    }
    if back == "from pkg.other import f":
        sources["pkg/other.py"] = ""
    assert find_cycles(sources) == ([["pkg.a", "pkg.b", "pkg.c"]] if is_cycle else [])
