"""Write what the planner says into recipes and their page: ``python -m tests.recipes.planned_headers``."""

from __future__ import annotations

import re

from tests.recipes.test_real_models import CONFIGS, PAGE, PLANNED, tell_plan


def main() -> None:
    """Rewrite each line that begins with ``# Planned for H100:``, and the last column of the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name in CONFIGS:
        told = tell_plan(name)
        text = CONFIGS[name].read_text(encoding="utf-8")
        CONFIGS[name].write_text(PLANNED.sub(f"# Planned for H100: {told}", text), encoding="utf-8")
        page = re.sub(
            rf"^(\| \[{re.escape(name)}\].*\| )[^|]*\|$", rf"\g<1>{told.rstrip('.')} |", page, flags=re.MULTILINE
        )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
