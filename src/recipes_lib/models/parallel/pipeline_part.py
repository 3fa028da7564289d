"""Layers of a pipeline stage: chunks of a model by stage. Imports no torch, because launches use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes_lib.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """Part of a model on one pipeline stage.

    The layers are split into ``num_stages * num_chunks`` chunks of the same size; stage ``s`` holds the chunks ``s``,
    ``s + num_stages``, and so on. The first chunk has the embedding, the last one the final norm and the projection.

    Attributes:
        stage: Index of this pipeline stage, from 0.
        num_stages: Pipeline stages.
        num_chunks: Chunks per stage; more than 1 for interleaved schedules.
        tensor_size: Tensor-parallel ranks over which each matrix of the stage is sharded.
    """

    stage: int
    num_stages: int
    num_chunks: int = 1
    tensor_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first chunk."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last chunk."""
        return self.stage == self.num_stages - 1

    @property
    def total_chunks(self) -> int:
        """Number of chunks of the whole pipeline."""
        return self.num_stages * self.num_chunks

    @property
    def chunks(self) -> range:
        """Numbers of this stage's chunks."""
        return range(self.stage, self.total_chunks, self.num_stages)

    def share_layers(self, num_layers: int) -> Sequence[range]:
        """Return the layer numbers of each chunk of this stage.

        Raises:
            ConfigError: The number of layers is no multiple of the number of chunks: stages would be unbalanced.
        """
        size, rest = divmod(num_layers, self.total_chunks)
        if rest or not size:
            fitting = [
                str(number) for number in range(1, num_layers + 1) if not num_layers % (number * self.num_chunks)
            ]
            found = f"{num_layers} layers cannot be split into {self.total_chunks} equal chunks"
            in_turns = f" of {self.num_chunks} chunks each" if self.num_chunks > 1 else ""
            remedy = f"launch {' or '.join(fitting)} stages{in_turns}" if fitting else "choose another schedule"
            raise ConfigError(Problem("pipeline stages", found, remedy))
        return [range(chunk * size, (chunk + 1) * size) for chunk in self.chunks]
