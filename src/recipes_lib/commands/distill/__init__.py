"""Subcommands of distillation: store teacher probabilities, chain teacher assistants."""
