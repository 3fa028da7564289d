"""The demo's texts: read from sources of any kind without running them, and never on both sides."""

import zipfile

import pytest

from recipes_lib.demo import corpus
from recipes_lib.demo.corpus import load_modules, parse_module, split_texts, standard_library
from recipes_lib.errors import DataError

SOURCE = '''"""A module."""


class Box:
    """Hold things."""

    @property
    def size(self, *, scale=1, **options):
        """Return the number of things."""
        def inner():
            return 1
        print(inner)

    async def fill(self, things, times=2):
        """Put things in."""
        yield things


def undocumented():
    return 1
'''


def test_a_module_is_taken_apart_without_being_run():
    module = parse_module("boxes", (SOURCE + "raise SystemExit('must not run')\n").encode())
    assert module is not None
    assert module.docstring == "A module."
    by_name = {definition.name: definition for definition in module.definitions}
    assert set(by_name) == {"Box", "size", "fill"}
    assert by_name["size"].signature == "def size(self, *, scale=1, **options)"
    assert (by_name["size"].num_parameters, by_name["size"].num_required) == (2, 0)
    assert by_name["fill"].signature == "async def fill(self, things, times=2)"
    assert (by_name["fill"].num_parameters, by_name["fill"].num_required) == (2, 1)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe\x00", b"def broken(:\n", b"x = " + b"(" * 5000 + b")" * 5000, b"# coding: nonsense\n", b"\x00"],
)
def test_what_this_python_cannot_read_is_left_out(data):
    assert parse_module("hostile", data) is None


def test_a_lone_surrogate_in_a_docstring_can_still_be_written(tmp_path):
    module = parse_module("odd", b'"""A lone \\ud800 half."""\n')
    assert module is not None
    (tmp_path / "text").write_text(module.docstring, encoding="utf-8")


def many_modules(tmp_path):
    for number in range(40):
        text = "".join(
            f'def f{number}_{i}(a):\n    """Return number {number} {i}."""\n    return a\n\n' for i in range(40)
        )
        (tmp_path / f"m{number}.py").write_text(f'"""Module {number}."""\n{text}')
    (tmp_path / "copy.py").write_text((tmp_path / "m0.py").read_text())
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text('"""A test."""\n')
    (tmp_path / "broken.py").write_bytes(b"def (")


def test_no_document_is_on_both_sides_whatever_module_it_was_copied_to(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MIN_CHARACTERS", 1)
    many_modules(tmp_path)
    (tmp_path / "heapq.py").write_text(SOURCE)  # trained on
    (tmp_path / "collections.py").write_text(SOURCE)  # held out
    modules = load_modules([tmp_path])
    assert {module.held_out for module in modules if module.docstring == "A module."} == {True, False}
    texts = split_texts(modules, seed=0)
    assert "test.skipped" not in {module.name for module in modules}
    assert texts.held_out
    bodies = [{text.split("\n", 1)[1] for text in side} for side in (texts.train, texts.held_out)]
    assert not bodies[0] & bodies[1]
    assert split_texts(load_modules([tmp_path]), seed=0) == texts


def test_a_zipped_library_reads_the_same_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MIN_CHARACTERS", 1)
    folder = tmp_path / "folder"
    folder.mkdir()
    many_modules(folder)
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder).as_posix())
    assert load_modules([tmp_path / "library.zip"]) == load_modules([folder])


def test_a_library_without_sources_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match="run the demo with a Python that came with its sources"):
        load_modules([tmp_path])


def test_this_pythons_own_library_is_enough():
    modules = load_modules(standard_library())
    assert len(modules) > 200
    assert any(module.held_out for module in modules)


def test_a_definition_is_cut_where_python_ends_its_lines_and_after_a_few_of_its_body():
    body = "".join(f"        step_{number}()\n" for number in range(20))
    source = f'x = "\x0c \x1c \u2028"\nclass C:\n    def f(self):\n        """Do it."""\n{body}'
    (definition,) = parse_module("odd", source.encode()).definitions
    assert definition.source.startswith('def f(self):\n    """Do it."""\n    step_0()\n')
    assert definition.source.endswith("step_5()")


def test_folders_and_broken_links_that_look_like_modules_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MIN_CHARACTERS", 1)
    (tmp_path / "package.py").mkdir()
    (tmp_path / "package.py" / "inner.py").write_text('"""Inner."""\n')
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "latin.py").write_bytes(b'# -*- coding: latin-1 -*-\n"""\xe9t\xe9."""\n')
    modules = load_modules([tmp_path])
    assert [(module.name, module.docstring) for module in modules] == [
        ("latin", "été."),
        ("package.py.inner", "Inner."),
    ]


def test_the_split_depends_on_the_name_alone():
    names = ["heapq", "collections", "json", "shutil"]
    held_out = [parse_module(name, b"").held_out for name in names]
    assert held_out == [parse_module(name, SOURCE.encode()).held_out for name in names]
    assert set(held_out) == {True, False}
