"""What runs in the next step: one queue, one batch for prefill, decode and gaps. No jax."""
