"""Without a process group every collective is that of one process; with one, ranks and values are those of all."""

from __future__ import annotations

import pytest

from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training import collectives


def test_one_process_is_rank_0_of_1_and_has_its_own_values() -> None:
    assert not collectives.is_distributed()
    assert (collectives.get_rank(), collectives.get_world_size()) == (0, 1)
    collectives.barrier()
    assert collectives.gather_objects({"a": 1}) == [{"a": 1}]
    assert collectives.broadcast_object("seen") == "seen"
    assert collectives.sum_over_processes([1, 2.5]) == [1, 2.5]


def test_what_the_main_process_computes_or_is_refused_reaches_all(monkeypatch) -> None:
    def refuse() -> float:
        raise ConfigError(Problem("judge", "does not answer"))

    monkeypatch.setattr(collectives, "broadcast_object", lambda value: value)
    assert collectives.compute_on_main(lambda: 2.5) == 2.5
    with pytest.raises(ConfigError, match="does not answer"):
        collectives.compute_on_main(refuse)
    # Another rank computes nothing, and gets what the main one has sent.
    monkeypatch.setattr(collectives, "get_rank", lambda: 1)
    for sent in (2.5, ConfigError(Problem("judge", "does not answer"))):
        monkeypatch.setattr(collectives, "broadcast_object", lambda _, sent=sent: sent)
        if isinstance(sent, float):
            assert collectives.compute_on_main(lambda: pytest.fail("computed twice")) == sent
        else:
            with pytest.raises(ConfigError, match="does not answer"):
                collectives.compute_on_main(lambda: pytest.fail("computed twice"))
