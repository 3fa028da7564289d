from __future__ import annotations

from recipes_lib.config.migration.retired import Retired, dropped, dropped_at, renamed, undecided


def test_a_retired_key_is_rewritten_as_declared() -> None:
    assert renamed("new", "1.0").rewrite([1]) == {"new": [1]}
    assert dropped("is gone").rewrite({"any": 1}) == {}
    assert dropped_at((False, None), "is gone", "stop").rewrite(False) == {}
    assert dropped_at((False, None), "is gone", "stop").rewrite(True) is None
    assert undecided("is gone", "decide").rewrite("x") is None
    assert Retired("f", "r", "a", {True: {"a": "b"}}).rewrite(True) == {"a": "b"}
    assert Retired("f", "r", "a", {True: {"a": "b"}}).rewrite({"not": "hashable"}) is None
