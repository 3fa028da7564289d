"""Reachability of the Hugging Face Hub, tested once before anything is fetched from it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SECONDS_TO_ANSWER: Final = 3.0


def go_offline_unless_reachable(name: str) -> None:
    """Take this process offline if the Hub does not answer, so that it reads the cache and waits for nothing.

    huggingface_hub makes each request six times over 22 seconds, and a model takes several. What fails once the Hub has
    answered is still made again.

    Args:
        name: Hub id, or a path, for which nothing is asked.
    """
    if Path(name).exists():
        return
    # Here, because paths need none of it.
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    # Of the HTTP library under huggingface_hub, which is another one in another version.
    no_answer: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except (no_answer, OSError):
        constants.HF_HUB_OFFLINE = True
