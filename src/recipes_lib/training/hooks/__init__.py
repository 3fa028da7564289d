"""What happens beside training: held-out loss, samples, user metrics."""
