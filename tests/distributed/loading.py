"""Host memory of each process from loading a checkpoint to the first step: the table of ``docs/results.md``.

On CPUs, the part of the model that a GPU would hold is in host memory too.

python -m tests.distributed.loading FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.distributed import matrix, sharding
from tests.distributed.matrix import Layout
from tests.faults import recipe_runs

from recipes_lib.errors import EXIT_DONE
from recipes_lib.training.layouts.launch_environment import name_pipeline, read_launch

SHAPE: Final = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
LAYOUTS: Final[Mapping[str, tuple[Layout, Mapping[str, str]]]] = {
    "DDP": (matrix.LAYOUTS["DDP, 2"], {}),
    "FSDP2": (matrix.LAYOUTS["FSDP2, 2"], {}),
    "ZeRO-3": (matrix.LAYOUTS["ZeRO-3, 2"], {}),
    "TP": (matrix.LAYOUTS["TP, 2"], {}),
    "pipeline": (matrix.LAYOUTS["DDP, 2"], name_pipeline(2, "gpipe")),
}
"""Layouts of two processes, with further environment variables."""


def write_inputs(folder: Path, shape: Mapping[str, int] = SHAPE) -> int:
    """Write documents and a checkpoint of several files; return the bytes of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe_runs.write_inputs(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32_000, **shape))
    model.save_pretrained(folder / "large", max_shard_size="100MB")
    return sum(file.stat().st_size for file in (folder / "large").glob("*.safetensors"))


def measure(folder: Path, layout: str) -> list[tuple[int, int]]:
    """Return the peak increase of anonymous memory of each process: (while loading the model, until the first step).

    Args:
        folder: Folder of ``write_inputs``.
        layout: Key of ``LAYOUTS``.
    """
    how, variables = LAYOUTS[layout]
    model = {"model_name_or_path": folder / "large", "model_config": None}
    keys = recipe_runs.make_keys(folder, "pretrain", **model, num_sample_prompts=0)
    job = json.dumps({"keys": keys, "variables": variables}, default=str)
    (folder / layout).mkdir()
    how.launch("tests.distributed.loading", str(folder / layout), "--job", job)
    return [json.loads((folder / layout / f"peaks-{rank}").read_text()) for rank in range(2)]


def read_memory() -> int:
    """Return the anonymous resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


@contextlib.contextmanager
def watching() -> Iterator[list[int]]:
    """Yield a list whose single value is the peak increase of this process's memory during the block, in bytes."""
    before, is_over = read_memory(), threading.Event()
    peak = [0]

    def look() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], read_memory() - before)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()
        peak[0] = max(peak[0], read_memory() - before)


def load(folder: Path, job: Mapping[str, Any]) -> None:
    """Run a recipe in this process, one rank of several, until training begins."""
    os.environ.update(job["variables"])
    if read_launch().engine:
        sharding.take_cpus_for_gpus()
    from torch import distributed
    from transformers.trainer_callback import CallbackHandler

    from recipes_lib.training.trainers import trained_model as policy

    watch = contextlib.ExitStack()
    peaks: list[list[int]] = []
    start = policy.load_language_model

    def begin(*args: Any) -> Any:
        peaks.append(watch.enter_context(watching()))
        with watching() as of_loading:
            model = start(*args)
        peaks.append(of_loading)
        return model

    def leave(*_: Any) -> None:
        watch.close()
        (begun,), (loaded,) = peaks
        (folder / f"peaks-{os.environ['RANK']}").write_text(json.dumps([loaded, begun]))
        distributed.barrier()
        raise SystemExit(EXIT_DONE)

    with (
        mock.patch.object(policy, "load_language_model", begin),
        mock.patch.object(CallbackHandler, "on_train_begin", leave),
    ):
        assert sharding.run_recipe("pretrain", {**job["keys"], "output_dir": folder}) == EXIT_DONE
    distributed.destroy_process_group()


def main() -> None:
    """Measure every layout and print the table; with ``--job``, run one rank of a layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", type=json.loads)
    options = parser.parse_args()
    if options.job:
        load(options.folder, options.job)
        return
    num_bytes = write_inputs(options.folder)
    lines = [
        "| layout | process 0, loading | by the first step | process 1, loading | by the first step |",
        "|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        peaks = itertools.chain(*measure(options.folder, layout))
        lines.append(f"| {layout} | {' | '.join(f'{peak / num_bytes:.2f}' for peak in peaks)} |")
    sys.stdout.write(f"{num_bytes / 1e9:.2f} GB of weights; of these:\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
