"""Serves a workload with any system and measures what its users would see."""
