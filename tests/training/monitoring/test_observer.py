"""``Observer`` during uncounted passes; that it does not change training is tested in ``evaluation/test_build.py``."""

from tests.training.trajectories import make_packs, make_trainer


def test_uncounted_pass_replaces_counter_only(tiny_model_dir, tmp_path) -> None:
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(4), hooks=[lambda model, step: {}])
    observer = trainer.observer
    with trainer.uncounted_pass():
        assert trainer.observer.counter is not observer.counter
        assert (trainer.observer.hooks, trainer.observer.progress) == (observer.hooks, observer.progress)
    assert trainer.observer is observer
