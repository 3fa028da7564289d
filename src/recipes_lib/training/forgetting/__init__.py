"""Methods against catastrophic forgetting: Fisher information, weight penalties, KL divergence to the base."""
