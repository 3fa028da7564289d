"""Subcommands of distillation: store a teacher's answers and probabilities, build a student, chain assistants."""
