"""Subcommands of distillation: store teacher probabilities, build a student, chain teacher assistants."""
