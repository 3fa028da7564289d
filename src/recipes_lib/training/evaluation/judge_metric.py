"""``JudgePreference``: win rate of a run's samples over their references, by an LLM judge behind an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluate

from recipes_lib.evaluation.endpoint import Endpoint
from recipes_lib.evaluation.judge_questions import Question
from recipes_lib.evaluation.judges import PROMPTS, PromptedJudge, compute_win_rate
from recipes_lib.training.collectives import compute_on_main
from recipes_lib.training.evaluation.user_metrics import describe_metric
from recipes_lib.training.guards.preemption import agreeing_on_stop


class JudgePreference(evaluate.Metric):  # type: ignore[misc]
    """Metrics ``judge_win_rate`` of predictions over references, ties as half, and ``judge_unparsable``, a fraction.

    In a recipe: ``metrics: ["recipes_lib.training.evaluation.judge_metric:JudgePreference(base_url='URL',
    model='JUDGE')"]``. With ``name='N'`` the metrics are ``N_win_rate`` and ``N_unparsable``. Pairs are judged in both
    orders. Only the main process sends requests.

    Source: ``recipes_lib.evaluation.judges.compute_win_rate``.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        prompt: str | None = None,
        name: str = "judge",
        keep_in_memory: bool = True,
        **options: Any,
    ) -> None:
        """Read the prompt and verify the judge.

        Args:
            base_url: URL of the judge's endpoint.
            model: Name of the judge at the endpoint.
            prompt: File with the pairwise prompt; ``None``: the built-in one.
            name: Prefix of the metrics, which tells several judges apart.
            keep_in_memory: Argument of ``evaluate.Metric``.
            **options: Further attributes of ``Endpoint``.
        """
        pairwise = Path(prompt or PROMPTS / "pairwise.yaml")
        self._judge = PromptedJudge(Endpoint(base_url, model, **options), pairwise=pairwise)
        self._judge.describe()
        self._prefix = name
        super().__init__(keep_in_memory=keep_in_memory)

    def _info(self) -> evaluate.MetricInfo:
        return describe_metric("Win rate by a judge.", "prompts", "predictions", "references")

    def _compute(self, prompts: list[str], predictions: list[str], references: list[str]) -> dict[str, float]:
        figures: dict[str, float] = {}
        with agreeing_on_stop():
            figures |= compute_on_main(lambda: self._judge_all(prompts, predictions, references))
        return figures

    def _judge_all(self, prompts: list[str], predictions: list[str], references: list[str]) -> dict[str, float]:
        questions = [Question(str(at), None, (), [prompt]) for at, prompt in enumerate(prompts)]
        base, other = ([[text] for text in texts] for texts in (references, predictions))
        found = self._judge.compare(questions, base, other, range(len(questions)))
        rate = compute_win_rate([(judgment.winner, judgment.orders) for judgment in found])
        figures = {f"{self._prefix}_unparsable": rate.num_unparsable / len(questions)}
        return figures if rate.win_rate is None else {f"{self._prefix}_win_rate": rate.win_rate, **figures}
