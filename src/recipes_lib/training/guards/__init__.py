"""Guards of a training run: non-finite values, loss spikes and rollback, start checks, preemption, watchdog."""
