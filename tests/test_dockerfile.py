"""Dockerfile, compose file and entrypoint, tested without a container engine.

The rules are functions from the text of a Dockerfile to violations; planted violations show that they can fail. A slow
test executes the instructions of the CPU target in a folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.forked import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = ROOT / "docker" / "compose.yaml"
INSTRUCTIONS = {
    *("FROM", "ENV", "RUN", "WORKDIR", "COPY", "ARG", "VOLUME", "USER", "ENTRYPOINT", "CMD", "HEALTHCHECK", "LABEL")
}


def read_instructions(text: str) -> list[tuple[str, str]]:
    """Return ``(instruction, arguments)`` in order, with continued lines joined and comments removed."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def read_stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each build stage; the first one is its FROM."""
    stages: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in read_instructions(text):
        if name == "FROM":
            stages[arguments.split()[-1]] = []
        stages[list(stages)[-1]].append((name, arguments))
    return stages


def find_violations(text: str) -> Iterator[str]:
    instructions = read_instructions(text)
    yield from (f"unknown instruction {name}" for name, _ in instructions if name not in INSTRUCTIONS)
    yield from _find_image_violations(text)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, arguments in instructions:
        words = [word for word in shlex.split(arguments) if not word.startswith("--")]
        if name == "COPY" and "--from" not in arguments:
            yield from (f"{path} does not exist" for path in words[:-1] if not (ROOT / path).exists())
            yield from (f"{path} is excluded by .dockerignore" for path in words[:-1] if f"!{path}" not in allowed)
        if name == "RUN" and "pip install" in arguments:
            if "-c constraints.txt" not in arguments or "type=cache" not in arguments:
                yield f"not locked or not cached: {arguments}"
            named = {extra for found in re.findall(r"\.\[([\w,]+)\]", arguments) for extra in found.split(",")}
            yield from (f"unknown extra {extra}" for extra in named - set(extras))
        is_lean = "--no-install-recommends" in arguments and "target=/var/lib/apt" in arguments
        if name == "RUN" and "apt-get install" in arguments and not is_lean:
            yield f"keeps package lists or installs recommended packages: {arguments}"
        if name in ("ARG", "ENV") and re.search(r"TOKEN|SECRET|PASSWORD|KEY", arguments):
            yield f"a secret would be stored in the image: {arguments}"


def _find_image_violations(text: str) -> Iterator[str]:
    stages = read_stages(text)
    for name, instructions in stages.items():
        base = instructions[0][1].split()[0]
        if base not in stages and not re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", base):
            yield f"{name} is built from {base}, which is not a fixed version"
    inherited = [name for stage in ("runtime", "cpu") for name, _ in stages.get(stage, ())]
    for needed in ("USER", "HEALTHCHECK", "ENTRYPOINT", "LABEL"):
        if needed not in inherited:
            yield f"missing {needed}"
    users = [arguments for name, arguments in stages.get("runtime", ()) if name == "USER"]
    if not all(user.isdigit() and int(user) > 0 for user in users):
        yield "runs as root, or as a user name, which Kubernetes cannot verify as non-root"


def test_dockerfile_keeps_rules():
    assert list(find_violations(DOCKERFILE)) == []
    assert list(read_stages(DOCKERFILE))[-2:] == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("original", "planted", "message"),
    [
        ("python:3.11.14-slim-bookworm AS build", "python:latest AS build", "not a fixed version"),
        ("python:3.11.14-slim-bookworm AS build", "python:3.11-slim AS build", "not a fixed version"),
        ("USER 1000", "USER root", "runs as root"),
        ("USER 1000\n", "", "missing USER"),
        ("COPY src src", "COPY sources src", "sources does not exist"),
        ("COPY src src", "COPY tests tests", "tests is excluded"),
        ("[track,corpus,eval,gpu,deepspeed]", "[track,gpus]", "unknown extra gpus"),
        ("-c constraints.txt ", "", "not locked"),
        ("ARG VERSION=unknown", "ARG HF_TOKEN", "a secret would be stored"),
        ("--no-install-recommends ", "", "recommended packages"),
        ("VOLUME", "VOLUMES", "unknown instruction"),
    ],
)
def test_planted_violation_is_found(original, planted, message):
    assert original in DOCKERFILE
    assert any(message in violation for violation in find_violations(DOCKERFILE.replace(original, planted)))


def test_compose_file_matches_dockerfile():
    compose = yaml.safe_load(COMPOSE.read_text())
    service = compose["services"]["train"]
    assert service["build"]["target"] in read_stages(DOCKERFILE)
    assert (COMPOSE.parent / service["build"]["context"]).resolve() == ROOT
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
    assert named == set(compose["volumes"])
    assert set(service["secrets"]) == set(compose["secrets"])
    assert service["environment"]["HF_TOKEN_PATH"] == f"/run/secrets/{service['secrets'][0]}"
    secret = (COMPOSE.parent / compose["secrets"]["hf_token"]["file"]).resolve().relative_to(ROOT)
    assert f"/{secret}" in (ROOT / ".gitignore").read_text().splitlines()
    assert (ROOT / "recipes" / f"{service['command'][0]}.py").exists()


def test_launcher_lets_processes_save_as_long_as_compose_does():
    (environment,) = [arguments for name, arguments in read_stages(DOCKERFILE)["runtime"] if name == "ENV"]
    values = dict(word.split("=", 1) for word in environment.split())
    grace = yaml.safe_load(COMPOSE.read_text())["services"]["train"]["stop_grace_period"]
    assert f"{int(values['TORCH_ELASTIC_SHUTDOWN_TIMEOUT']) // 60}m" == grace


STUB = '#!/bin/sh\necho "$(basename "$0") $*"\n'


@pytest.mark.parametrize(
    ("arguments", "launch", "expected"),
    [
        (["sft", "--config", "my file.yaml"], {}, "python {app}/recipes/sft.py --config my file.yaml"),
        (["dpo", "--beta=1"], {"LAUNCH": "fsdp2"}, "recipes launch --recipe dpo --hardware fsdp2 --beta=1"),
        (
            ["dpo"],
            {"LAUNCH": "fsdp2", "NUM_PROCESSES": "4"},
            "recipes launch --recipe dpo --hardware fsdp2 --num_processes 4",
        ),
        (
            ["eval"],
            {"LAUNCH": "ddp", "NUM_PROCESSES": "4"},
            "accelerate launch --config_file {app}/accelerate_configs/ddp.yaml --num_processes 4 {app}/recipes/eval.py",
        ),
        (["doctor"], {}, "recipes doctor"),
        (["check", "--config", "sft.yaml"], {"LAUNCH": "ddp"}, "recipes check --config sft.yaml"),
        (["--help"], {}, "recipes --help"),
        (["../../etc/sft"], {}, "recipes ../../etc/sft"),
        ([], {}, "recipes "),
    ],
)
def test_entrypoint_runs_recipe_or_command(install, tmp_path, arguments, launch, expected):
    install(dict.fromkeys(("python", "accelerate", "recipes"), STUB))
    script = tmp_path / "entrypoint.sh"
    script.write_text((ROOT / "docker" / "entrypoint.sh").read_text().replace("/app/", f"{ROOT}/"))
    environment = os.environ | launch
    done = subprocess.run(["sh", script, *arguments], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.rstrip("\n") == expected.format(app=ROOT).rstrip("\n")


@pytest.mark.slow
def test_instructions_of_cpu_target_build_working_image(install, tmp_path):
    """``/`` is a folder, commands that need root are stubs, and the installed packages replace the package index."""
    image, context = tmp_path / "image", tmp_path / "context"
    shutil.copytree(ROOT, context, ignore=shutil.ignore_patterns(".git", ".venv*", "*_cache", "build", "runs"))
    tools = install(dict.fromkeys(("apt-get", "useradd", "chown"), STUB))
    (tools / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PIP_NO_BUILD_ISOLATION": "0"}
    environment.pop("PYTHONPATH", None)
    stages = read_stages(DOCKERFILE)
    place = image
    for name, arguments in [*stages["build"], *stages["runtime"], *stages["cpu"]]:
        place = run_instruction(name, arguments, place, image, context, environment)
        if "venv /opt" in arguments:
            # A package that is not installed here in the locked version would need an index, and fails.
            found = next((image / "opt" / "venv" / "lib").glob("python*/site-packages"))
            (found / "here.pth").write_text("\n".join(site.getsitepackages()))
            # The interpreter's setuptools is too old to build with.
            shutil.rmtree(found / "setuptools", ignore_errors=True)
            for old in found.glob("setuptools-*"):
                shutil.rmtree(old)
            environment["PIP_NO_INDEX"] = "1"
    venv = image / "opt" / "venv" / "bin"
    entry = (image / "usr" / "local" / "bin" / "recipes-entrypoint").read_text().replace("/app/", f"{image}/app/")
    for words, expected in ((["doctor"], "packages"), (["sft", "--help"], "--config"), (["plan", "--help"], "usage")):
        environment["PATH"] = f"{venv}{os.pathsep}/usr/bin{os.pathsep}/bin"
        command = ["sh", "-c", entry, "recipes-entrypoint", *words]
        done = subprocess.run(command, cwd=image / "data", capture_output=True, text=True, check=False, env=environment)
        assert expected in done.stdout, (words, done.stdout, done.stderr)
    where = [str(venv / "python"), "-c", "import recipes_lib; print(recipes_lib.__file__)"]
    done = subprocess.run(where, cwd=image, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith(str(image))


def run_instruction(name, arguments, place, image, context, environment):
    """Execute an instruction with ``image`` as ``/``, and return the working directory."""
    inside = re.sub(r"(?<![\w.:/])/(opt|build|app|cache|data|tmp/pip|usr/local/bin)\b", rf"{image}/\1", arguments)
    words = [word for word in shlex.split(inside) if not word.startswith("--")]
    if name == "WORKDIR":
        Path(inside).mkdir(parents=True, exist_ok=True)
        return Path(inside)
    if name == "ENV":
        environment |= dict(word.split("=", 1) for word in words if not word.startswith("PATH="))
    elif name == "COPY" and "--from" not in arguments:
        *sources, target = words
        for source in sources:
            to = place / target
            to = to / Path(source).name if target.endswith("/") else to
            to.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (context / source).is_dir() else shutil.copy2
            copy(context / source, to)
    elif name == "RUN":
        script = re.sub(r"--mount=\S+\s*", "", inside)
        image.mkdir(exist_ok=True)
        cwd = place if place.exists() else image
        done = subprocess.run(["sh", "-e", "-c", script], cwd=cwd, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, (script, done.stdout, done.stderr)
    return place
