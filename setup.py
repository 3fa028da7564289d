"""Builds the package with recipes, their configurations and launch files in it; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies what a user names by its path into the package, where ``recipes_lib.config.paths`` finds it."""

    def run(self) -> None:
        """Build, then copy; an editable installation reads the checkout."""
        super().run()
        if self.editable_mode:
            return
        for folder in ("recipes", "accelerate_configs"):
            target = Path(self.build_lib) / "recipes_lib" / "share" / folder
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithRecipes})
