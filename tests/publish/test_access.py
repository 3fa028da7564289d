"""Whether a run may publish is known before it trains."""

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

from recipes_lib.errors import ConfigError
from recipes_lib.publish import access


class Repository:
    def __init__(self, private):
        self.private = private


def set_up(monkeypatch, *, token="a token", role="write", repository=None, failure=None):
    class Api:
        def whoami(self):
            if failure:
                raise failure
            return {"name": "me", "auth": {"accessToken": {"role": role}}}

        def model_info(self, name):
            if repository is None:
                raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
            return repository

    monkeypatch.setattr(access, "get_token", lambda: token)
    monkeypatch.setattr(access, "HfApi", Api)


def test_a_new_repository_will_be_private_unless_asked_otherwise(monkeypatch):
    set_up(monkeypatch)
    assert (
        access.verify_write_access({"output_dir": "runs/mine"})
        == "publishes to me/mine, private, which will be created"
    )
    public = access.verify_write_access({"output_dir": "runs/mine", "hub_private_repo": False})
    assert public == "publishes to me/mine, public, which will be created"


def test_the_name_that_was_asked_for_is_used_as_it_stands(monkeypatch):
    set_up(monkeypatch, repository=Repository(private=True))
    assert (
        access.verify_write_access({"output_dir": "x", "hub_model_id": "team/model"})
        == "publishes to team/model, private"
    )


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"token": None}, "no Hub token"),
        ({"role": "read"}, "may only read"),
        ({"repository": Repository(private=False)}, "exists and is public"),
        ({"failure": OfflineModeIsEnabled("offline mode is enabled")}, "did not answer"),
        ({"failure": ConnectionError("no route")}, "no route"),
    ],
)
def test_what_would_fail_or_surprise_after_training_is_refused_before(monkeypatch, state, found):
    set_up(monkeypatch, **state)
    with pytest.raises(ConfigError, match=found) as caught:
        access.verify_write_access({"output_dir": "runs/mine"})
    assert "a token" not in str(caught.value)
