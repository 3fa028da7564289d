"""Training that remembers: Fisher information, penalties on changed weights, KL divergence to the base."""
