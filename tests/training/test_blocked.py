"""A row of the table of combinations: what it is about where nothing else is said."""

from __future__ import annotations

from recipes_lib.training.blocked import Blocked
from recipes_lib.training.launch import Launch


def test_a_row_is_about_every_recipe_and_the_launch_unless_it_says_more() -> None:
    row = Blocked(launch="a thing", why="it fails", remedy="another", applies=lambda keys, launch: bool(keys))
    assert (row.recipe, row.stages, row.keys) == ("", (), ())
    launch = Launch(rank=0, local_rank=0, world_size=1, engine="")
    assert row.applies({"optim": "muon"}, launch)
    assert not row.applies({}, launch)
