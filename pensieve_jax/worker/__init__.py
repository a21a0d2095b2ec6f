"""Executes step plans: batch arrays, transfers, model steps, sampling. Knows nothing of the scheduler."""
