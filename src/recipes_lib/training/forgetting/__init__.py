"""Methods against catastrophic forgetting: Fisher information and weight penalties."""
