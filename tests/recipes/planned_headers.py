"""Write the kernels and the plan into the headers of configurations: ``python -m tests.recipes.planned_headers``."""

from __future__ import annotations

import re
import sys

from tests.recipes.test_real_models import CONFIGS, PAGE, PLANNED, TRAINED, USED, describe_kernels, describe_plan


def main() -> None:
    """Rewrite the lines ``# On an H100:`` and ``# Planned for H100:``, and the last column of docs/recipes.md."""
    for name, path in TRAINED.items():
        text, line = path.read_text(encoding="utf-8"), f"# On an H100: {describe_kernels(name)}"
        text = (
            USED.sub(line, text) if USED.search(text) else re.sub("^# Expect:", f"{line}\n# Expect:", text, flags=re.M)
        )
        path.write_text(text, encoding="utf-8")
    if "--kernels" in sys.argv:  # Plans take minutes.
        return
    page = PAGE.read_text(encoding="utf-8")
    for name in CONFIGS:
        plan = describe_plan(name)
        text = CONFIGS[name].read_text(encoding="utf-8")
        CONFIGS[name].write_text(PLANNED.sub(f"# Planned for H100: {plan}", text), encoding="utf-8")
        page = re.sub(
            rf"^(\| \[{re.escape(name)}\].*\| )[^|]*\|$", rf"\g<1>{plan.rstrip('.')} |", page, flags=re.MULTILINE
        )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
