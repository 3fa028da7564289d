"""Commands that answer before a run: what it takes, how to run it best, and what a model of some size would learn."""
