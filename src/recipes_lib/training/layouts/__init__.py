"""Distributed layouts: launch, FSDP2, context and pipeline parallelism, incompatible options."""
