"""Reinforcement learning from rewards: rollouts, rewards, the mathematics of PPO, and its loop."""
