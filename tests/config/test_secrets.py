"""Refusal of secrets in keys, values and arguments, without repeating them."""

from __future__ import annotations

import pytest

from recipes_lib.config.values import has_secret_shape

CANARY = "hf_" + "aBcD1234" * 4


@pytest.mark.parametrize("key", ["hub_token", "push_to_hub_token", "wandb_api_key", "hf_token", "token", "password"])
@pytest.mark.parametrize("as_flag", [True, False])
def test_secret_key_is_refused_without_repeating_its_value(problems_of, key: str, as_flag: bool) -> None:
    problems = problems_of(flags=[f"--{key}", CANARY]) if as_flag else problems_of(f"{key}: {CANARY}\n")
    assert [problem.where for problem in problems] == [f"--{key}" if as_flag else "recipe.yaml:5"]
    assert "secret" in problems[0].found
    assert CANARY not in str(problems[0])


@pytest.mark.parametrize(
    "value",
    [
        CANARY,
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1_" * 10,
        "sk-" + "x" * 40,
        "sk-ant-api03-" + "x-9" * 10,
        "sk_live_" + "a1" * 12,
        "AKIA" + "ABCD2345" * 2,
        "ASIA" + "ABCD2345" * 2,
        "AIza" + "b2-_" * 9,
        "ya29." + "b2-_" * 9,
        "xoxb-123456789012-abc",
        "nvapi-" + "b2-_" * 9,
        "wandb_v1_" + "b2" * 12,
        "c0ffee1234" * 4,
        "aws_secret_access_key=" + "aB3/" * 10,
        "my_W&B_token = " + "aB3/" * 10,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "'-----BEGIN RSA PRIVATE KEY-----'",
        "https://user:pass@host/x",
        "https://host/x.parquet?download=1&token=abcd1234",
        "https://bucket/x?X-Amz-Signature=0f0f0f0f&y",
        f"[ok, {CANARY}]",
    ],
)
def test_token_shaped_value_is_refused_without_repeating_it(problems_of, value: str) -> None:
    key = "sample_prompts" if value.startswith("[") else "run_name"
    (problem,) = problems_of(f"{key}: {value}\n")
    assert problem.where == "recipe.yaml:5"
    assert "access token" in problem.found
    assert value not in str(problem)
    assert CANARY not in str(problem)


def test_secret_in_invalid_line_is_not_repeated(problems_of) -> None:
    for text in (f"lerning_rate: {CANARY}\n", f"learning_rate: 1\nseed: {CANARY}\n", f"run_name: {CANARY}: x\n"):
        assert CANARY not in " ".join(str(problem) for problem in problems_of(text))


def test_secret_in_stray_argument_is_not_repeated(problems_of) -> None:
    (problem,) = problems_of(flags=["--seed", "1", CANARY])
    assert CANARY not in str(problem)


@pytest.mark.parametrize("recipe", ["sft", "ppo"])
@pytest.mark.parametrize("key", ["stop_token", "bos_token", "image_token"])
def test_vocabulary_token_key_is_not_a_secret(problems_of, recipe: str, key: str) -> None:
    (problem,) = problems_of(flags=[f"--{key}", "eos"], recipe=recipe)
    assert "secret" not in problem.found
    assert "not needed" in problem.found or "unknown key" in problem.found


def test_special_tokens_and_commit_hashes_are_not_secrets(problems_of) -> None:
    assert not problems_of(f"eos_token: </s>\npad_token: <pad>\nmodel_revision: {'0123456789' * 4}\n")


@pytest.mark.parametrize(
    "value",
    [
        "sk-lora-r64",
        "the-api-key-of-success",
        "hf_models/llama",
        "runs/2026-11-21_hf_sweep",
        "gh_pages",
        "s3://bucket/path@2",
        "a" * 39,
        "sha256_" + "ab12" * 16,
        "AKIA in capitals",
        "api_build=" + "aB3/" * 10,
        "https://example.com:8080/path",
    ],
)
def test_value_that_resembles_a_token_is_accepted(problems_of, value: str) -> None:
    assert not problems_of(f"run_name: '{value}'\n")


def test_secret_search_takes_linear_time() -> None:
    # A single pattern took minutes.
    assert not has_secret_shape("apikey" * 20_000)
