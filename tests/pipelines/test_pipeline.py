"""Parser of pipeline files: commands, needs, rounds, sweeps, references, and all problems at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import ROOT

from recipes_lib.config.command_flags import holds
from recipes_lib.errors import ConfigError
from recipes_lib.pipelines.pipeline import Pipeline, load_pipeline


def read(folder: Path, text: str) -> Pipeline:
    path = folder / "p.yaml"
    path.write_text(text)
    return load_pipeline(path, str(folder / "out"))


def test_recipe_stage_command_line(tmp_path: Path) -> None:
    (stage,) = read(
        tmp_path,
        "stages: {sft: {recipe: sft, config: a.yaml, set: {max_steps: 3, bf16: false, lora_target_modules: [q, v]}}}",
    ).stages
    assert stage.output == tmp_path / "out" / "sft"
    assert stage.words[:2] == [sys.executable, str(ROOT / "recipes" / "sft.py")]
    expected = {"--config": "a.yaml", "--max_steps": "3", "--bf16": "false", "--lora_target_modules": '["q", "v"]'}
    assert dict(zip(stage.argv[::2], stage.argv[1::2], strict=True)) == {**expected, "--output_dir": str(stage.output)}
    assert stage.files == (Path("a.yaml"),)
    (stage,) = read(tmp_path, "stages: {sft: {recipe: sft, config: a.yaml, launch: fsdp2}}").stages
    assert stage.words[1:9] == ["-P", "-m", "recipes_lib.cli", "launch", "--recipe", "sft", "--hardware", "fsdp2"]


def test_script_in_working_directory_replaces_no_module(tmp_path: Path) -> None:
    (tmp_path / "tokenize.py").write_text("raise SystemExit('the module of a user')")
    (stage,) = read(tmp_path, "stages: {a: {command: --version}}").stages
    subprocess.run(stage.words, cwd=tmp_path, check=True)


def test_references_become_needs(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        """
stages:
  base: {recipe: pretrain, config: a.yaml}
  sft: {recipe: sft, config: b.yaml, set: {model_name_or_path: "${base.output}"}}
  other: {run: [echo, "${sft.output}/x"], needs: [base], output: "${output_dir}/o.txt"}
  scores: {command: eval, set: {model_name_or_path: "${sft.output}", tasks: [core]}}
""",
    )
    assert {stage.name: tuple(stage.needs) for stage in pipeline.stages} == {
        "base": (),
        "sft": ("base",),
        "other": ("sft", "base"),
        "scores": ("sft",),
    }
    other, scores = pipeline.stages[2:]
    assert other.words == ["echo", f"{tmp_path}/out/sft/x"]
    assert other.output == tmp_path / "out" / "o.txt"
    assert scores.words[1:5] == ["-P", "-m", "recipes_lib.cli", "eval"]


def test_rounds_pass_previous_output(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        """
stages:
  loop:
    rounds: 2
    start: {policy: first/model}
    stages:
      pairs: {run: "sample ${policy.previous} ${round}"}
      policy: {run: "dpo ${policy.previous} ${pairs.output}"}
  last: {run: "show ${policy.output}"}
""",
    )
    out = tmp_path / "out"
    assert [(stage.name, stage.words[1:], tuple(stage.needs)) for stage in pipeline.stages] == [
        ("pairs-1", ["first/model", "1"], ()),
        ("policy-1", ["first/model", f"{out}/pairs-1"], ("pairs-1",)),
        ("pairs-2", [f"{out}/policy-1", "2"], ("policy-1",)),
        ("policy-2", [f"{out}/policy-1", f"{out}/pairs-2"], ("policy-1", "pairs-2")),
        ("last", [f"{out}/policy-2"], ("policy-2",)),
    ]


def test_sweep_in_rounds_has_no_previous_output(tmp_path: Path) -> None:
    """All of its stages would start each round from the value of ``start``."""
    text = """
stages:
  loop:
    rounds: 2
    start: {policy: first/model}
    stages:
      policy: {run: "dpo ${policy.previous}", matrix: {seed: [0, 1]}}
"""
    with pytest.raises(ConfigError, match=r"loop.policy: there is no 'policy.previous' here"):
        read(tmp_path, text)


def test_matrix_expands_to_one_stage_per_combination(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        """
stages:
  sft: {recipe: sft, config: a.yaml, matrix: {learning_rate: [1.0e-5, 3.0e-5], seed: [0, 1]}}
  best: {run: "cp ${sft-3.output}"}
""",
    )
    *sweep, best = pipeline.stages
    assert [stage.name for stage in sweep] == ["sft-1", "sft-2", "sft-3", "sft-4"]
    assert [(s.argv[s.argv.index("--learning_rate") + 1], s.argv[s.argv.index("--seed") + 1]) for s in sweep] == [
        ("1e-05", "0"), ("1e-05", "1"), ("3e-05", "0"), ("3e-05", "1"),
    ]  # fmt: skip
    assert best.needs == ("sft-3",)
    assert [stage.swept for stage in sweep][1] == {"learning_rate": "1e-05", "seed": "1"}
    with pytest.raises(ConfigError, match=r"there is no 'sft.output' here\n.*one of sft-1.output, sft-2.output"):
        read(tmp_path, 'stages: {sft: {run: "true", matrix: {seed: [0, 1]}}, b: {run: "cp ${sft.output}"}}')


@pytest.mark.parametrize("text", ["matrix: {seed: [0], config: [x.yaml]}", "config: no.yaml, set: {config: x.yaml}"])
def test_config_of_sweep_or_set_is_hashed_as_that_of_the_stage(tmp_path: Path, text: str) -> None:
    (stage,) = read(tmp_path, f"stages: {{a: {{recipe: sft, {text}}}}}").stages
    assert stage.files == (Path("x.yaml"),)
    assert stage.argv[:2] == ["--config", "x.yaml"]
    assert stage.argv.count("--config") == 1
    assert stage.has_given_config


def test_keys_without_value_are_unset_and_a_sweep_may_have_one_value(tmp_path: Path) -> None:
    text = "output_dir: null\nstages: {a: {run: x, config: null, output: null, needs: null, matrix: {seed: 0}}}"
    (stage,) = read(tmp_path, text).stages
    assert (stage.words, stage.output) == (["x", "--seed", "0"], tmp_path / "out" / "a-1")
    assert load_pipeline(tmp_path / "p.yaml").output_dir == Path("runs/p")  # Two files do not share a folder.


def test_names_are_read_as_written(tmp_path: Path) -> None:
    """YAML 1.1 would read all of these names as one key, ``True``."""
    stages = read(tmp_path, "stages: {yes: {run: a}, on: {run: b, needs: ['yes']}, 1: {run: c}}").stages
    assert [stage.name for stage in stages] == ["yes", "on", "1"]


def test_config_next_to_pipeline_suggests_here_reference(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=r"a.config: there is no mine.yaml here\n    write \$\{here\}/mine.yaml"):
        read(tmp_path, "stages: {a: {recipe: sft, config: mine.yaml}}")
    assert read(tmp_path, "stages: {a: {recipe: sft, config: '${here}/mine.yaml'}}").stages[0].files[0].is_file()


def test_values_are_passed_as_yaml(tmp_path: Path) -> None:
    text = (
        "stages: {a: {recipe: sft, set: {dataset_config: 2024-01-31, seed: 1}}}\nenvironment: {DAY: 2024-01-31, N: 1}"
    )
    pipeline = read(tmp_path, text)
    assert pipeline.stages[0].argv[:4] == ["--dataset_config", "2024-01-31", "--seed", "1"]
    assert pipeline.environment == {"DAY": "2024-01-31", "N": "1"}
    (stage,) = read(tmp_path, "stages: {a: {run: [x, true, null, -1, 2024-01-31, 2024_01_31, 010, 12:30:00]}}").stages
    assert stage.words == ["x", "true", "null", "-1", "2024-01-31", "2024_01_31", "010", "12:30:00"]
    (stage,) = read(tmp_path, "stages: {a: {recipe: sft, set: {seed: 1e-5, a: {b: [1e-5, 1.5e3, 1e, e5]}}}}").stages
    assert stage.argv[1:4] == ["1e-5", "--a", '{"b": [1e-5, 1.5e3, "1e", "e5"]}']


def test_home_folder_is_expanded_as_in_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a stage are hashed, and its output is verified, where the recipe reads and writes them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    stages = "{a: {recipe: sft, config: ~/sft.yaml}, b: {run: [show, '${a.output}'], output: ~/b}}"
    (tmp_path / "p.yaml").write_text(f"output_dir: ~/runs\nstages: {stages}")
    first, second = load_pipeline(tmp_path / "p.yaml").stages
    assert first.files == (tmp_path / "sft.yaml",)
    assert first.output == tmp_path / "runs" / "a"
    assert second.words == ["show", str(first.output)]
    assert second.output == tmp_path / "b"


@pytest.mark.parametrize("folder", ["$SCRATCH/runs", "${HOME}/runs", "${here}/runs"])
def test_variable_in_output_dir_is_refused(tmp_path: Path, folder: str) -> None:
    """It would be a folder of that name."""
    (tmp_path / "p.yaml").write_text(f"output_dir: {folder}\nstages: {{a: {{run: x}}}}")
    with pytest.raises(ConfigError, match=r"p.yaml: output_dir: is '.*runs'\n    variables are not expanded"):
        load_pipeline(tmp_path / "p.yaml")


def test_output_dir_of_set_is_output_of_recipe(tmp_path: Path) -> None:
    text = "stages: {a: {recipe: sft, set: {output_dir: '${output_dir}/x'}}, b: {run: 'show ${a.output}'}}"
    first, second = read(tmp_path, text).stages
    assert first.output == tmp_path / "out" / "x"
    assert first.argv == ["--output_dir", str(first.output)]
    assert second.words == ["show", str(first.output)]


def test_need_of_sweep_or_loop_includes_all_stages(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        """
stages:
  sweep: {run: "true", matrix: {seed: [0, 1]}}
  loop: {rounds: 2, stages: {policy: {run: "true"}}}
  last: {run: "true", needs: [sweep, loop]}
  one: {run: "true", needs: [sweep-2, policy]}
""",
    )
    assert [tuple(stage.needs) for stage in pipeline.stages[-2:]] == [
        ("sweep-1", "sweep-2", "policy-1", "policy-2"),
        ("sweep-2", "policy-2"),
    ]


def test_stage_identity_does_not_depend_on_paths(tmp_path: Path) -> None:
    text = (
        'stages: {a: {run: "train ${here}/x ${output_dir}/y"}, b: {run: "show ${a.output}", output: "${output_dir}/z"}}'
    )
    (folder := tmp_path / "two" / "deeper").mkdir(parents=True)
    here, there = (read(place, text).stages for place in (tmp_path, folder))
    assert [stage.identity for stage in here] == [stage.identity for stage in there]
    assert there[0].words == ["train", f"{folder}/x", f"{folder}/out/y"]
    assert read(tmp_path, text.replace("/x", "/other")).stages[0].identity != here[0].identity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.yaml"),
        ("stage: {}", "has no mapping `stages`"),
        ("stages: {a: {recipe: sft}, a: {recipe: sft}}", "p.yaml:1"),
        ("stages: {a: {recip: sft}}", "did you mean `recipe`"),
        ("stages: {a: {recipe: sfd}}", "did you mean sft"),
        ("stages: {a: {recipe: sft, run: x}}", "has 2 of recipe, command, run"),
        ("stages: {a: [1]}", "is not a stage"),
        ('stages: {b: {run: "${a.output}"}, a: {run: x}}', "there is no 'a.output' here"),
        ('stages: {bases: {run: x}, b: {run: "${base.output}"}}', "did you mean bases.output"),
        ("stages: {a: {run: x, needs: [b]}}", "there is no 'b' here"),
        ('stages: {a: {run: x, require: {loss: "small"}}}', "a.require.loss: is 'small'"),
        ("stages: {a: {rounds: 0, stages: {b: {run: x}}}}", "is not a number of rounds"),
        ("stages: {a: {rounds: 2, stages: {}}}", "is not a number of rounds"),
        (
            "stages: {a: {rounds: 2, start: {polic: m}, stages: {policy: {run: 'x ${polic.previous}'}}}}",
            "a: `start` has 'polic', which is no stage of the loop",
        ),
        ("stages: {a: {rounds: 2, stages: {b: {run: x}}}, c: {run: 'x ${round}'}}", "c: there is no 'round' here"),
        ("outputdir: x\nstages: {a: {run: x}}", "did you mean `output_dir`"),
        ("stages: {a: {rounds: true, stages: {b: {run: x}}}}", "a.rounds: is True"),
        ("stages: {a: {run: x, matrix: [1]}}", "a.matrix: is [1]"),
        ("stages: {a: {run: x, matrix: {seed: []}}}", "a.matrix: has a key without values"),
        ("stages: {a: {run: x}}\nenvironment: [1]", "environment: is [1]"),
        ("stages: {a: {run: x}}\nenvironment: {HF_TOKEN: hf_" + "a1" * 17 + "}", "TOKEN: looks like an access token"),
        ("stages: {a: {run: x}}\nenvironment: {WANDB_API_KEY: " + "b" * 40 + "}", "KEY: looks like an access token"),
        ("stages: {a: {run: x, needs: b}}", "a.needs: is 'b'"),
        ("stages: {a: {run: x, set: [b]}}", "a.set: is ['b']"),
        ("stages: {a: {recipe: sft, set: {help: true}}}", "a.help: prints a text in place of the work of the stage"),
        ('stages: {a: {command: ""}}', "a: has 0 of recipe, command, run"),
        ('stages: {a: {run: ""}}', "a: has 0 of recipe, command, run"),
        ('stages: {a: {run: "echo \'x"}}', "a.run: cannot be read"),
        ("stages: {a: {recipe: sft, launch: nosuch}}", "a.launch: there is no launch file"),
        ("stages: {a: {recipe: eval, launch: ddp}}", "a.launch: eval does not train"),
        ("stages: {a: {run: x, launch: ddp}}", "a.launch: this stage does not train"),
        ("stages: {a/b: {run: x}}", "is not a folder name"),
        ("stages: {l: {rounds: 1, stages: {a: {run: x}}}, m: {rounds: 1, stages: {a: {run: x}}}}", "called 'a-1' too"),
        ("stages: {sft-1: {run: x}, sft: {run: x, matrix: {seed: [0]}}}", "called 'sft-1' too"),
        ("stages: {a: {run: x, output: o}, b: {run: x, output: c/../o}}", "writes c/../o, as a does"),
        (
            "stages: {a: {run: x}, b: {run: x, require: {a.accuracy: '> 1'}}}",
            'write it at a: require: {accuracy: "> 1"}',
        ),
        ("stages: {}", "has no mapping `stages`"),
        ("stages: {a: {run: x, matrix: {seed: [1, 0, 1]}}}", "a.matrix.seed: has a value twice: 1, 0, 1"),
        ("stages: {a: {run: 'x ${b.output}'}, b: {run: 'x ${a.output}'}}", "move that one up, or remove the cycle"),
        ("stages: {a: {run: x, needs: [a]}}", "move that one up, or remove the cycle"),
        ("stages: {a: {run: 'x ${here'}}", "has a `${` without its `}`"),
        ("stages: {a: {run: x, output: '${output_dir}'}}", "a.output: is"),
        ("stages: {a: {run: x, output: ''}}", "a.output: is '.'"),
        ("stages: {a: {run: x}}\nenvironment: {A B: 1}", "environment.A B: is not a name of an environment variable"),
        ("stages: {a: {run: 'make && ls'}}", "a.run: has &&, and is not run by a shell"),
        ("stages: {pipeline.json: {run: x}}", "pipeline.json, which belongs to the pipeline"),
        ("stages: {a: {run: x, output: '${output_dir}/b/../jobs'}}", "jobs, which belongs to the pipeline"),
        ("stages: {a: {run: x, output: '${output_dir}/index.html'}}", "index.html, which belongs to the pipeline"),
        ("stages: {a: {run: x}}\nenvironment: {DATA: '${here}/data'}", "environment.DATA: is '${here}/data'"),
        ("stages: {a: {run: !!python/none x}}", "p.yaml:1: the value has the YAML tag !!python/none"),
        ("stages: {a: {run: 2026-99-99}}", "is not plain YAML"),
        ("stages: {[a]: {run: x}}", "a key is a list"),
    ],
)
def test_invalid_file_is_rejected_with_location(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "num_problems"),
    [
        ("stages: {a: {recip: sft}, b: {recipe: no}, c: {run: '${d.output}'}}", 3),
        ("stages: {a: {run: x, matrix: {seed: []}}, b: {run: 'y ${a.output}'}}", 1),
        ("stages: {a: {recip: sft}, b: {run: 'y ${a.output}', needs: [a]}}", 1),
        ("stages: {a: {rounds: 0, stages: {b: {run: x}}}, c: {run: 'y ${b.output}', needs: [a]}}", 1),
        ("output: x\noutput_dir: 5\nenvironment: [A]\nstages: {a: {recip: sft}}", 4),
    ],
    ids=[
        "independent",
        "empty sweep and its dependent",
        "invalid stage and its dependent",
        "loop and its dependent",
        "file and stage",
    ],
)
def test_problems_are_reported_together_and_once(tmp_path: Path, text: str, num_problems: int) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert len(caught.value.problems) == num_problems


def test_gate_may_name_a_dotted_metric_that_is_no_stage(tmp_path: Path) -> None:
    (stage,) = read(tmp_path, "stages: {scores: {run: x, require: {arc_easy.acc: '> 0.4'}}}").stages
    assert stage.require == {"arc_easy.acc": "> 0.4"}


@pytest.mark.parametrize(
    ("requirement", "value", "is_met"),
    [
        ("> 0.65", 0.7, True),
        (">0.65", 0.65, False),
        ("<= 1e-3", 1e-3, True),
        ("< -2", -3, True),
        ("== 1", 1, True),
        ("< 2", 2, False),
        ("> .5", 0.7, True),
        ("< 1.0e+3", 1000, False),
        (">= +2.", 2, True),
        ("== 0", float("nan"), False),
    ],
)
def test_requirement_comparisons(requirement: str, value: float, is_met: bool) -> None:
    assert holds(requirement, value) is is_met
