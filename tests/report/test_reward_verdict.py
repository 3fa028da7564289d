"""Score statistics stored with a reward model, and `reward.json`."""

import json
import re

import numpy as np
import pytest
from tests.forked import ROOT

from recipes_lib.errors import DataError
from recipes_lib.report import reward_report
from recipes_lib.report.page import build_report
from recipes_lib.report.reward_report import (
    REWARD_FILE,
    read_reward_report,
    store_score_statistics,
    write_reward_report,
)


def make_pairs(num_pairs, seed=0):
    generator = np.random.default_rng(seed)
    return [
        {
            name: np.append(generator.integers(4, 500, generator.integers(2, 9)), 0).astype(np.uint32)
            for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        for _ in range(num_pairs)
    ]


@pytest.fixture
def failed(reward_model, tmp_path):
    """Gates that a model with a random head fails; the run has ended, and its report is in ``tmp_path``."""
    store_score_statistics(reward_model, make_pairs(12))
    (tmp_path / "run.json").write_text(json.dumps({"stage": "reward", "status": "done"}))
    return write_reward_report(reward_model, make_pairs(12), tmp_path)


def test_score_statistics_use_first_chosen_answers(reward_model, monkeypatch):
    monkeypatch.setattr(reward_report, "MAX_REFERENCE_ANSWERS", 3)
    store_score_statistics(reward_model, make_pairs(3) + make_pairs(9, seed=1))
    rows = [np.concatenate([pair["prompt_ids"], pair["chosen_ids"]]).tolist() for pair in make_pairs(3)]
    scores, config = reward_model.compute_raw_scores(rows), reward_model.model.config
    assert (config.reward_mean, config.reward_std) == pytest.approx((np.mean(scores), np.std(scores)))


def test_constant_scores_are_refused(reward_model):
    reward_model.model.score.weight.data.zero_()
    with pytest.raises(DataError, match="have the score 0"):
        store_score_statistics(reward_model, make_pairs(4))


def test_reward_report_round_trips_and_is_shown(reward_model, failed, tmp_path):
    verdict = read_reward_report(tmp_path)
    assert failed
    assert verdict["failed_gates"] == failed
    assert verdict["may_serve_ppo"] is False
    assert verdict["num_pairs"] == 12
    assert verdict["scale"]["mean"] == reward_model.model.config.reward_mean
    page = build_report(tmp_path).read_text()
    assert "Ready for RL" in page
    assert "Before it may serve PPO: accuracy" in page
    assert (tmp_path / "report" / "reliability.png").exists()


@pytest.mark.usefixtures("figures", "failed")
def test_page_has_every_figure_of_the_documentation(tmp_path):
    page = build_report(tmp_path).read_text()
    section = (ROOT / "docs" / "reward.md").read_text().partition("### The report")[2].partition("### The gates")[0]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert len(names) > 12
    assert [name for name in names if f'<th scope="row">{name}' not in page] == []
    assert '<th scope="row">probes.eos_dropped.share_lower' in page
    assert '<th scope="row">by_length_difference.from ' in page


def test_no_reward_report_without_held_out_pairs(reward_model, tmp_path):
    assert write_reward_report(reward_model, None, tmp_path) is None
    assert read_reward_report(tmp_path) == {}


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("changes", [{"ece": None}, {"length": []}, {"reliability": [{}]}, {"histogram": {"edges": 3}}])
def test_page_renders_reward_report_with_invalid_fields(failed, tmp_path, changes):
    verdict = json.loads((tmp_path / REWARD_FILE).read_text()) | changes
    (tmp_path / REWARD_FILE).write_text(json.dumps(verdict))
    assert failed
    assert "Before it may serve PPO: accuracy" in build_report(tmp_path).read_text()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_invalid_reward_report_is_none(tmp_path, content):
    (tmp_path / REWARD_FILE).write_text(content)
    assert read_reward_report(tmp_path) == {}
