"""The other laws of the house: sizes, names, one owner for every rule, a test for every module.

Each law is a function from sources to violations, so that a planted violation can show that it is able to fail.
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
"""Modules that have no test file yet. This list may only shrink."""

MIN_SHARED_LINES = 100
FRAGMENTS: frozenset[str] = frozenset()
"""Short modules with one importer in their own folder that are not merged into it yet. This list may only shrink."""

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
SHADOWED_BY_A_RECIPE = {"evaluate", "datasets", "tokenize", "profile", "trl", "peft", "accelerate", "torch", "types"}
"""A script's folder is first on ``sys.path``: a recipe of this name would hide the module."""

TEXT_LAWS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "the ignore index has one owner": (
        r"(?<![\w.)\]])-100\b(?!\.)",
        ("src/", "recipes/", "benchmarks/"),
        ("src/recipes_lib/data/masking.py",),
    ),
    "checkpoints hold no pickles": (
        r"weights_only\s*=\s*False|\bpickle\.loads?\b",
        ("src/", "recipes/", "benchmarks/"),
        (),
    ),
    "no code from the Hub runs unasked": (
        r"trust_remote_code\s*=\s*True|^\s*trust_remote_code:\s*[Tt]rue",
        ("src/", "recipes/", "benchmarks/"),
        (),
    ),
    "the environment is read in one place": (
        r"\bos\.(environ|getenv|putenv)\b|from os import .*\b(environ|getenv)\b",
        ("src/", "recipes/"),
        # What a process must know of the others before any room is opened; the demo is the user's shell.
        (
            "src/recipes_lib/training/layouts/launch_environment.py",
            "src/recipes_lib/processes.py",
            "src/recipes_lib/demo/walkthrough.py",
        ),
    ),
    "where a model computes has one owner": (
        r"parameters\(\)\)\.device",
        ("src/",),
        # A layer that is put beside others lies where they do.
        ("src/recipes_lib/models/adapters/roles.py",),
    ),
    "the default of a training key has one owner": (
        r"""\btraining\.get\(["'\w]+, """,
        ("src/", "recipes/"),
        ("src/recipes_lib/config/schema.py",),
    ),
    "Python objects pass between ranks in one place": (
        r"distributed\.is_initialized\(|\b(all_gather_object|broadcast_object_list|gather_object)\(",
        ("src/", "recipes/"),
        ("src/recipes_lib/training/collectives.py",),
    ),
    "files are locked and hashed in one place": (
        r"\bfcntl\.|\bfile_digest\(|sha256\([^)]*read_bytes",
        ("src/", "recipes/"),
        ("src/recipes_lib/files.py",),
    ),
    "JSON files are read in one place": (
        r"\bjson\.load\(|\bjson\.loads\((line\b|.*\bread_(text|bytes)\()",
        ("src/", "recipes/"),
        # The package's own table, which nobody else writes; `config` knows no files.
        ("src/recipes_lib/files.py", "src/recipes_lib/config/table.py"),
    ),
    "files are replaced in one place": (
        r"\bos\.(replace|rename)\(|\bpartial\.(replace|rename)\(",
        ("src/", "recipes/"),
        # A folder becomes a prepared set; a shard of a teacher's answers is an array of numpy's.
        (
            "src/recipes_lib/files.py",
            "src/recipes_lib/data/store.py",
            "src/recipes_lib/distillation/teacher_store.py",
        ),
    ),
    "the launch is read where a command begins": (
        r"\bread_launch\(\)",
        ("src/",),
        (
            "src/recipes_lib/training/layouts/launch_environment.py",
            # A trainer is built by upstream's arguments alone.
            "src/recipes_lib/training/checkpoints/checkpointing.py",
            # Here recipes begin, and commands that compute as a recipe does.
            "src/recipes_lib/training/forgetting/fisher_command.py",
            "src/recipes_lib/publish/final_model.py",
            "src/recipes_lib/commands/sampling.py",
            "src/recipes_lib/commands/score.py",
            "src/recipes_lib/commands/generated/synthesize.py",
            "src/recipes_lib/commands/generated/distill_store.py",
        ),
    ),
    "nothing is left to do": (r"\b(TODO|FIXME|XXX)\b", ("",), ("tests/test_ratchets.py",)),
    "no path of anyone's machine": (r"(?<![\w.~}])/(home|root|Users|work)/\w", ("",), ("tests/test_ratchets.py",)),
}
"""Law -> (what must not stand anywhere, in files under these prefixes, except in these)."""

TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".jinja", ".txt", ".cfg", ""}
NUM_PRIVATE_OVERRIDES = 15
"""Private methods of upstream's trainers that ours override, each class counted. This number may only shrink."""
_UPSTREAM_VERSION = re.compile(r"#.*\b(transformers|trl|accelerate|peft) \d")

LEFT_OUT = {
    *(".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
    *("build", "dist", "demo", "outputs"),
}


@functools.cache
def read_project() -> Mapping[str, str]:
    """Return every text file of the project by its path."""
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


def find_forbidden_text(law: str, path: str, text: str) -> list[str]:
    pattern, prefixes, exceptions = TEXT_LAWS[law]
    if not path.startswith(prefixes) or path in exceptions:
        return []
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{number}: {law}: {line.strip()}" for number, line in lines if re.search(pattern, line)]


def find_long_file(path: str, text: str) -> list[str]:
    length = len(text.splitlines())
    return [f"{path}: {length} lines, at most {MAX_FILE_LINES}"] if length > MAX_FILE_LINES else []


def find_long_functions(path: str, source: str) -> list[str]:
    """Lines of code: without the docstring, blank lines and comments."""
    code_lines = {token.start[0] for token in _code_tokens(source)} | {
        line
        for token in _code_tokens(source)
        if token.type == tokenize.STRING
        for line in range(token.start[0], token.end[0] + 1)
    }
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = set(range(node.lineno, node.end_lineno + 1)) & code_lines
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                assert docstring.end_lineno is not None
                lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
            if len(lines) > MAX_FUNCTION_LINES:
                faults.append(f"{path}:{node.lineno}: {node.name} has {len(lines)} lines, at most {MAX_FUNCTION_LINES}")
    return faults


def _code_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    return (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped)


def find_private_overrides(path: str, source: str, upstream: Collection[str]) -> dict[str, bool]:
    """Private methods of ``upstream`` that a trainer overrides -> whether a comment says why, and since which version.

    The comment stands right above the method or inside.
    """
    found, lines = {}, source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Trainer") for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in upstream:
                    own = lines[method.lineno - 2 : method.end_lineno]
                    found[f"{path}: {node.name}.{method.name}"] = any(map(_UPSTREAM_VERSION.search, own))
    return found


def find_bad_name(path: str) -> list[str]:
    parts = Path(path)
    vague = VAGUE_NAMES & {part.removesuffix(".py") for part in parts.parts}
    if vague:
        return [f"{path}: {vague.pop()!r} says nothing about what stands there"]
    if parts.parent.as_posix() == "recipes" and parts.stem in SHADOWED_BY_A_RECIPE:
        return [f"{path}: hides the module {parts.stem!r} from every recipe"]
    return []


def find_untested_modules(paths: Collection[str]) -> list[str]:
    """``src/recipes_lib/data/masking.py`` is tested by ``tests/data/test_masking.py``; an ``__init__`` by nobody."""
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
    """Folders of the library with more modules than a reader keeps in mind; an ``__init__`` is none."""
    sizes = Counter(Path(path).parent.as_posix() for path in paths if Path(path).name != "__init__.py")
    return [
        f"{folder}: {size} modules, at most {MAX_FOLDER_MODULES}"
        for folder, size in sizes.items()
        if size > MAX_FOLDER_MODULES
    ]


def find_shared_names(paths: Collection[str]) -> list[str]:
    """Modules of the library that have one name in several folders: an import or a traceback does not say which."""
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        if Path(path).name != "__init__.py":
            folders.setdefault(Path(path).stem, []).append(Path(path).parent.as_posix())
    return [f"{name}: {', '.join(places)}" for name, places in folders.items() if len(places) > 1]


def find_circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Modules that import each other, directly or through others, at the top or inside functions; not types alone.

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
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(circle) for circle in circles if circle)


def find_fragments(sources: Mapping[str, str]) -> list[str]:
    """Modules of less than ``MIN_SHARED_LINES`` that one other imports, in the same folder: they are a part of it.

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
    """Module -> modules that it imports, of those given."""
    names = {".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    return {name: _imported(ast.parse(sources[path])) & (names.keys() - {name}) for name, path in names.items()}


def _imported(tree: ast.Module) -> set[str]:
    """Modules that a module imports, and names in them that may be modules too."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
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


def test_the_project_is_read() -> None:
    assert {"README.md", "Makefile", "pyproject.toml", "src/recipes_lib/errors.py", "tests/conftest.py"} <= set(
        read_project()
    )


@pytest.mark.parametrize("law", TEXT_LAWS)
def test_forbidden_text_stands_nowhere(law: str) -> None:
    assert [fault for path, text in read_project().items() for fault in find_forbidden_text(law, path, text)] == []


@pytest.mark.parametrize("law", [find_long_file, find_long_functions])
def test_sizes_are_kept(law) -> None:
    sources = read_python("src/", "recipes/", "benchmarks/")
    assert [fault for path, source in sources.items() for fault in law(path, source)] == []


def test_test_files_are_kept_short() -> None:
    assert [fault for path, source in read_python("tests/").items() for fault in find_long_file(path, source)] == []


def test_overrides_of_upstreams_private_methods_are_explained_and_do_not_grow() -> None:
    upstream = {name for kind in (Trainer, trl.GRPOTrainer, trl.RLOOTrainer) for name in dir(kind)}
    private = {name for name in upstream if name.startswith("_") and not name.startswith("__")}
    found: dict[str, bool] = {}
    for path, source in read_python("src/").items():
        found |= find_private_overrides(path, source, private)
    assert [name for name, is_explained in found.items() if not is_explained] == []
    assert len(found) == NUM_PRIVATE_OVERRIDES, sorted(found)
    assert f"override {NUM_PRIVATE_OVERRIDES} private methods" in (ROOT / "docs" / "design.md").read_text()


def test_an_unexplained_override_is_found() -> None:
    planted = "class A(Trainer):\n    def _save(self): ...\n    # trl 1.16 pickles.\n    def _load(self): ...\n"
    assert find_private_overrides("a.py", planted, {"_save", "_load"}) == {
        "a.py: A._save": False,
        "a.py: A._load": True,
    }
    assert find_private_overrides("a.py", planted.replace("Trainer", "Callback"), {"_save"}) == {}


def test_names_say_something() -> None:
    assert [fault for path in read_python("") for fault in find_bad_name(path)] == []


def test_folders_are_kept_small() -> None:
    assert find_full_folders(list(read_python("src/"))) == []


def test_modules_of_different_folders_have_different_names() -> None:
    assert find_shared_names(list(read_python("src/"))) == []


def test_a_shared_name_is_found() -> None:
    planted = ["house/a.py", "yard/a.py", "yard/b.py", "house/__init__.py", "yard/__init__.py"]
    assert find_shared_names(planted) == ["a: house, yard"]


def test_no_modules_import_each_other() -> None:
    sources = {path.removeprefix("src/"): text for path, text in read_python("src/").items()}
    assert find_circles(sources) == []


def test_no_module_is_a_fragment_of_its_only_importer() -> None:
    sources = {path.removeprefix("src/"): text for path, text in read_python("src/").items()}
    assert find_fragments(sources) == sorted(FRAGMENTS)


@pytest.mark.parametrize(
    ("sources", "is_fragment"),
    [
        ({"house/b.py": "from house.a import f"}, True),
        ({"house/b.py": "def g():\n    from house import a"}, True),
        ({"house/b.py": "from house.a import f", "house/c.py": "from house.a import f"}, False),
        ({"house/b.py": "from house.a import f", "yard/c.py": "from house.a import f"}, False),
        ({"yard/b.py": "from house.a import f"}, False),
        ({"house/b.py": "import os"}, False),
    ],
)
def test_a_fragment_is_found(sources: dict[str, str], is_fragment: bool) -> None:
    planted = {"house/__init__.py": "", "house/a.py": "x = 1\n" * 99, **sources}
    assert find_fragments(planted) == (["house/a.py"] if is_fragment else [])
    assert find_fragments(planted | {"house/a.py": "x = 1\n" * 100}) == []


def test_every_module_has_its_test_file() -> None:
    assert find_untested_modules(read_python("")) == sorted(MODULES_WITHOUT_A_TEST)


@pytest.mark.parametrize(
    ("law", "line"),
    [
        ("the ignore index has one owner", "labels[labels == 0] = -100"),
        ("the ignore index has one owner", "F.cross_entropy(x, y, ignore_index=-100)"),
        ("checkpoints hold no pickles", "torch.load(path, weights_only=False)"),
        ("checkpoints hold no pickles", "state = pickle.load(file)"),
        ("no code from the Hub runs unasked", "AutoModel.from_pretrained(name, trust_remote_code=True)"),
        ("no code from the Hub runs unasked", "trust_remote_code: true"),
        ("the environment is read in one place", "rank = os.environ['RANK']"),
        ("the environment is read in one place", "rank = os.getenv('RANK')"),
        ("the environment is read in one place", "from os import environ"),
        ("where a model computes has one owner", "device = next(model.parameters()).device"),
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
        ("the launch is read where a command begins", "size = read_launch().data_size"),
        ("nothing is left to do", "# TODO: later"),
        ("no path of anyone's machine", "data = '/home/ada/data'"),
    ],
)
def test_planted_text_is_found(law: str, line: str) -> None:
    assert len(find_forbidden_text(law, "src/recipes_lib/data/planted.py", f"\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("law", "line"),
    [
        ("the ignore index has one owner", "rates at 0-25-50-75-100 %, in [-1000, n-100]"),
        ("the environment is read in one place", "environment = template.environ"),
        ("the default of a training key has one owner", 'is_asked = config.training.get("push_to_hub")'),
        ("Python objects pass between ranks in one place", "used = torch.cuda.is_initialized()"),
        ("JSON files are read in one place", "plain = json.loads(json.dumps(given, default=str))"),
        ("files are replaced in one place", "text = text.replace(old, new)"),
        ("no code from the Hub runs unasked", "'read it, then set trust_remote_code: true and model_revision'"),
        ("no path of anyone's machine", "~/.cache/x, https://example.org/work/x"),
    ],
)
def test_innocent_text_is_not(law: str, line: str) -> None:
    assert find_forbidden_text(law, "src/recipes_lib/data/planted.py", line) == []


def test_an_owner_may_spell_what_it_owns() -> None:
    assert find_forbidden_text("the ignore index has one owner", "src/recipes_lib/data/masking.py", "= -100") == []


def test_a_long_file_is_found() -> None:
    assert find_long_file("a.py", "x\n" * 600) == []
    assert len(find_long_file("a.py", "x\n" * 601)) == 1


def test_a_long_function_is_found_by_its_lines_of_code() -> None:
    padding = '    """One.\n\n    Two.\n    """\n' + "    # why\n\n" * 30
    assert find_long_functions("a.py", "def f():\n" + padding + "    x = 1\n" * 59) == []
    assert len(find_long_functions("a.py", "def f():\n" + padding + "    x = 1\n" * 60)) == 1
    assert len(find_long_functions("a.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * 60)) == 1
    assert len(find_long_functions("a.py", 'def f():\n    x = """\n' + "text\n" * 60 + '"""\n')) == 1


@pytest.mark.parametrize(
    "path",
    ["src/recipes_lib/data/utils.py", "src/recipes_lib/common/a.py", "recipes/evaluate.py", "recipes/datasets.py"],
)
def test_a_bad_name_is_found(path: str) -> None:
    assert len(find_bad_name(path)) == 1
    assert find_bad_name("src/recipes_lib/training/hooks/evaluate.py") == []


def test_a_module_without_a_test_is_found() -> None:
    paths = ["src/recipes_lib/data/chat/encoder.py", "src/recipes_lib/data/__init__.py", "src/recipes_lib/errors.py"]
    assert find_untested_modules([*paths, "tests/test_chat.py", "tests/test_errors.py"]) == [paths[0]]
    assert find_untested_modules([*paths, "tests/data/chat/test_encoder.py", "tests/test_errors.py"]) == []


def test_a_full_folder_is_found() -> None:
    paths = ["src/a/__init__.py", *(f"src/a/m{number}.py" for number in range(15))]
    assert find_full_folders(paths) == []
    assert len(find_full_folders([*paths, "src/a/more.py"])) == 1


@pytest.mark.parametrize(
    ("back", "is_circle"),
    [
        ("from house.a import f", True),
        ("import house.a", True),
        ("from house import a", True),
        ("def g():\n    from house.a import f", True),
        ("if TYPE_CHECKING:\n    from house.a import f", False),
        ("from house.other import f", False),
    ],
)
def test_a_circle_is_found_wherever_the_import_stands(back: str, is_circle: bool) -> None:
    sources = {
        "house/__init__.py": "",
        "house/a.py": "from house.b import g",
        "house/b.py": "from house.c import h",
        "house/c.py": back,
        "house/other.py": "import house.a",
    }
    if back == "from house.other import f":
        sources["house/other.py"] = ""
    assert find_circles(sources) == ([["house.a", "house.b", "house.c"]] if is_circle else [])
