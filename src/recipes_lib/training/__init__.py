"""Training: trainers, checkpoints, layouts, guards, evaluation and monitoring of a run."""
