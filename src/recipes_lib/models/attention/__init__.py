"""Attention kernels: choice, variable-length attention, shared prompts, isolation of packed documents."""
