"""Model parallelism: tensor, context and pipeline parallelism, ZeRO-3."""
