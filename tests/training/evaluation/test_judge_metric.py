"""``JudgePreference``: a judge as a metric of a recipe, against the references, in both orders."""

from __future__ import annotations

from typing import Any

import pytest
from tests.evaluation.chat_endpoint import ChatEndpoint

from recipes_lib.errors import ConfigError, PreemptedError
from recipes_lib.stopping import STOP
from recipes_lib.training.evaluation.user_metrics import compute_metrics, load_metrics

PATH = "recipes_lib.training.evaluation.judge_metric:JudgePreference(base_url='{}', model='j', num_attempts=1)"


def prefer_longer(body: dict[str, Any]) -> str:
    text = body["messages"][-1]["content"]
    assert "What?" in text
    one, two = (text.partition(f"[Answer of assistant {name}]\n")[2].partition("\n[End of")[0] for name in "AB")
    return "no verdict" if "odd" in one + two else "[[C]]" if len(one) == len(two) else "[[AB]]".replace(
        "B" if len(one) > len(two) else "A", ""
    )  # fmt: skip


def test_win_rate_against_references() -> None:
    url = ChatEndpoint(prefer_longer).url
    metrics = load_metrics([PATH.format(url)])
    scored = [("What?", "longer", "short"), ("What?", "s", "longer"), ("What?", "same", "size"), ("What?", "odd", "a")]
    assert compute_metrics(metrics, scored) == {"judge_win_rate": 0.5, "judge_unparsable": 0.25}
    assert compute_metrics(metrics, scored[-1:]) == {"judge_unparsable": 1.0}
    metrics += load_metrics([PATH.format(url).replace("num_attempts", "name='second', num_attempts")])
    assert compute_metrics(metrics, scored[-1:]) == {"judge_unparsable": 1.0, "second_unparsable": 1.0}


def test_unreachable_judge_is_an_error() -> None:
    metrics = load_metrics([PATH.format("http://127.0.0.1:9/v1")])
    with pytest.raises(ConfigError, match="had no answer after 1 attempts"):
        compute_metrics(metrics, [("What?", "a", "b")])


def test_stop_request_ends_pause_that_judge_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be longer than the grace time of a scheduler."""

    def refuse(_: Any) -> tuple[int, dict[str, str], str]:
        STOP.request("SIGTERM")
        return 429, {"Retry-After": "30"}, "busy"

    monkeypatch.setattr(STOP, "reason", None)
    metrics = load_metrics([PATH.format(ChatEndpoint(refuse).url).replace("attempts=1", "attempts=2")])
    with pytest.raises(PreemptedError, match=r"^SIGTERM$"), STOP.deferred():
        compute_metrics(metrics, [("What?", "a", "b")])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("", "base_url"), ("base_url=1+1", "1"), ("base_url='http://a/v1', model='j', prompt='gone.yaml'", "gone.yaml")],
)
def test_judge_needs_base_url_and_prompt_file(arguments: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(cannot be built|failed): .*{words}"):
        load_metrics([f"{PATH.partition('(')[0]}({arguments})"])
