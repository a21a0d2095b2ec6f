"""Real conversations served twice, with their state kept and without, and what that changes."""

from pensieve_jax.demo.comparison import Comparison, compare
from pensieve_jax.demo.play import DemoSizes, ModeRun, PlayedTurn, serve
from pensieve_jax.demo.report import report_tables, summary_lines, to_json
from pensieve_jax.demo.workload import Workload, random_workload, sharegpt_workload

__all__ = [
    "Comparison",
    "DemoSizes",
    "ModeRun",
    "PlayedTurn",
    "Workload",
    "compare",
    "random_workload",
    "report_tables",
    "serve",
    "sharegpt_workload",
    "summary_lines",
    "to_json",
]
