"""The one place that knows how "not trained on" is spelled."""

from __future__ import annotations

from typing import Final

IGNORE_INDEX: Final = -100
"""Label of a position that is not a target; what torch's and transformers' cross-entropies skip."""
