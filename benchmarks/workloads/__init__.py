"""What users say to a server, and when: one workload for every system that is compared."""

from benchmarks.workloads.make import SOURCES, WorkloadSettings, make_workload, tokenise
from benchmarks.workloads.workload import TokenConversation, Workload, read_workload_file

__all__ = [
    "SOURCES",
    "TokenConversation",
    "Workload",
    "WorkloadSettings",
    "make_workload",
    "read_workload_file",
    "tokenise",
]
