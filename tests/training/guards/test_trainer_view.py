"""``TrainerView``: guards depend on this protocol only, and the trainer implements it."""

from pathlib import Path

import pytest

from recipes_lib.training.guards import step_facts
from recipes_lib.training.guards.step_facts import TrainerView
from recipes_lib.training.trainers.recipe_trainer import RecipeTrainer

MODULES = sorted(Path(step_facts.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_guards_do_not_import_trainers(module: Path) -> None:
    assert "recipe_trainer import" not in module.read_text(encoding="utf-8")


def test_trainer_has_all_methods_of_view() -> None:
    """Methods only: attributes are set in the constructor, and mypy compares them."""
    methods = [name for name, value in vars(TrainerView).items() if callable(value) and not name.startswith("__")]
    assert len(methods) >= 10
    assert [name for name in methods if name != "_no_init_or_replace_init" and not hasattr(RecipeTrainer, name)] == []
