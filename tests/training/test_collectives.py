"""Collectives without a process group, and errors and long computations of the main process on every rank."""

from __future__ import annotations

import itertools
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from tests.forked import run_forked
from torch import distributed

from recipes_lib.errors import ConfigError, LostPeerError, Problem
from recipes_lib.processes import read_rank
from recipes_lib.stopping import StopPendingError
from recipes_lib.training import collectives


def test_collectives_return_own_value_without_process_group() -> None:
    assert not collectives.is_distributed()
    assert (collectives.get_rank(), collectives.get_world_size()) == (0, 1)
    assert collectives.gather_objects({"a": 1}) == [{"a": 1}]
    assert collectives.broadcast_object("seen") == "seen"
    assert collectives.sum_over_processes([1, 2.5]) == [1, 2.5]
    assert (collectives.is_any(True), collectives.is_any(False)) == (True, False)


def test_compute_on_main_returns_or_raises_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collectives.compute_on_main(lambda: 7) == 7
    with pytest.raises(ConfigError, match="no key"):
        collectives.compute_on_main(lambda: refuse())
    # Another rank computes nothing: it returns or raises what rank 0 has sent.
    monkeypatch.setattr(collectives, "get_rank", lambda: 1)
    for sent in (7, ConfigError(Problem("judge", "no key")), StopPendingError()):
        monkeypatch.setattr(collectives, "broadcast_object", lambda value, _, sent=sent: (sent, value)[0])
        with nullcontext() if sent == 7 else pytest.raises(type(sent)):
            assert collectives.compute_on_main(lambda: refuse()) == 7


def test_lost_main_process_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(url: str) -> None:
        raise distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(collectives, "rendezvous", reset)
    with pytest.raises(LostPeerError, match="another process ended: see its output"):
        collectives.is_true_on_main(False)


def test_values_of_main_process_are_those_of_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    found = []
    # Rank 0 is ahead of rank 1 by a call.
    for rank in range(2):
        monkeypatch.setattr(collectives, "_CALLS", itertools.count())
        monkeypatch.setattr(collectives, "rendezvous", lambda _, rank=rank: iter([(store, rank, 2)]))
        found.append([collectives.is_true_on_main(value) for value in (True, False)])
    assert found == [[True, False]] * 2


def refuse() -> int:
    raise ConfigError(Problem("judge", "no key"))


@pytest.mark.multiprocess
def test_main_may_compute_for_longer_than_the_timeout(tmp_path: Path) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # As the launcher's.
    run_forked(__name__, tmp_path, store.port)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [f"7, 8, True, {2**54 + 1}, True"] * 2


def main() -> None:
    """Compute for twice the timeout of the default group on rank 0, twice; share values without and with it."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=sys.argv[2])
    shared = [collectives.is_true_on_main(not read_rank())]
    distributed.init_process_group("gloo")
    shared += collectives.sum_over_processes([2**53 + distributed.get_rank()])  # No float64 has this sum.
    shared.append(collectives.is_true_on_main(not read_rank()))
    # From here on: on a busy machine, ranks may come to the collectives above more than a second apart.
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))

    def compute(number: int) -> int:
        time.sleep(2)
        return number

    found = [collectives.compute_on_main(lambda number=number: compute(number)) for number in (7, 8)]
    (Path(sys.argv[1]) / str(distributed.get_rank())).write_text(", ".join(map(str, [*found, *shared])))


if __name__ == "__main__":
    main()
