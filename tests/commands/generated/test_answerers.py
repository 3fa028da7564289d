"""Models built from keys of `recipes synthesize` and from flags of `recipes eval compare`."""

from __future__ import annotations

import pytest

from recipes_lib.commands.generated.answerers import load_answerer, load_judge, verify_judge
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import ModelConfig
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.errors import ConfigError

KEYS = {"max_new_tokens": 3, "temperature": 0.5, "seed": 4, "num_concurrent": 2, "requests_per_minute": 6.0}
URL = "http://h/v1#j"


def test_keys_and_flags_build_same_models() -> None:
    config = SynthesisConfig(
        **KEYS, request_timeout=5.0, request_fields={"top_p": 1}, judge_max_new_tokens=9, judge_fields={}, judge=URL
    )
    words = [f"--{name}={value}" for name, value in KEYS.items()]
    words += ["--timeout=5", '--request={"top_p": 1}', "--judge_tokens=9", f"--judge={URL}", "--prompts=f"]
    flags = CommandParser("eval compare --judge").parse_args(["A", *words, "--output_dir=o"])
    one, other = (load_answerer(settings, ("http://h/v1", "m"), ModelConfig()) for settings in (config, flags))
    assert one == other
    assert (one.timeout, one.request, one.seed) == (5.0, {"top_p": 1}, 4)
    description, same = (load_judge(settings, "grade").describe() for settings in (config, flags))
    assert description == same
    assert [description["judge"][name] for name in ("max_new_tokens", "temperature", "seed")] == [9, 0.0, 4]


def test_unavailable_judge_is_rejected() -> None:
    verify_judge(SynthesisConfig(), "grade")
    for wrong in ({"judge": "http://h/v1"}, {"judge": "no/such-model"}, {"judge": URL, "judge_prompt": "none.yaml"}):
        with pytest.raises(ConfigError):
            verify_judge(SynthesisConfig(**wrong), "grade")
