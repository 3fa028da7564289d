"""The view of a trainer is small, and no module of the guards knows more of one."""

from pathlib import Path

import pytest

from recipes_lib.training.guards import step_facts
from recipes_lib.training.guards.step_facts import TrainerView
from recipes_lib.training.trainers.recipe_trainer import RecipeTrainer

MODULES = sorted(Path(step_facts.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_guard_imports_a_trainer(module: Path) -> None:
    assert "recipe_trainer import" not in module.read_text(encoding="utf-8")


def test_what_is_seen_is_there() -> None:
    """Methods; attributes are set when a trainer is built, and the type checker compares them."""
    methods = [name for name, value in vars(TrainerView).items() if callable(value) and not name.startswith("__")]
    assert len(methods) >= 10
    assert [name for name in methods if name != "_no_init_or_replace_init" and not hasattr(RecipeTrainer, name)] == []
