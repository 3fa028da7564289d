"""Subcommands that write a model folder out of another: a checkpoint, an adapter with its base, a teacher."""
