"""What SFT has beyond the trainer that all next-token stages share."""

from __future__ import annotations

import trl
from tests.training.trajectories import make_packs, make_trainer


def test_the_trainer_is_trls_and_reports_to_nobody(tiny_model_dir, tmp_path, monkeypatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *args, **kwargs: sent.append(args))
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path, make_packs(4), max_steps=1)
    trainer.train()
    assert isinstance(trainer, trl.SFTTrainer)
    assert len(recorder.steps) == 1
    assert not sent
