"""Executes step plans: batch arrays, cache transfers, model steps, sampling. Knows nothing of the scheduler."""
