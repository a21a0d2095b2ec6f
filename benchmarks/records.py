"""Results as lines of JSON. Their form is `pensieve_jax.records`, since `pensieve bench` writes it, too."""

from pensieve_jax.records import ROOT, command_line, commit, gpu, read_records, record, replace_records

__all__ = ["ROOT", "command_line", "commit", "gpu", "read_records", "record", "replace_records"]
