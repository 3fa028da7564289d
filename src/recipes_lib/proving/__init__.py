"""``recipes prove``: correctness, speed and memory of this machine, compared with references."""
