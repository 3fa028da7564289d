"""Knowledge distillation: teacher models, stored top-k probabilities, on-policy and hidden-state distillation."""
