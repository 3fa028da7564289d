"""Reinforcement learning from rewards: rollouts, rewards, losses, and the training loop of PPO, RLOO and GRPO."""
