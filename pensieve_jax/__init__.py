"""Stateful LLM serving in JAX: every conversation keeps its KV state between turns."""
