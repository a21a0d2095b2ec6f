"""What programs share that compile for H200s without one.

They import it before JAX: the compiler's plugin and the settings must be there when JAX starts.

The first argument of such a program is the folder that `make compiler` makes.
"""

import functools
import os
import re
import sys
import tempfile
from pathlib import Path

PARTS = sys.argv[1]
DUMP = Path(tempfile.mkdtemp())
"""Where compilers leave their reports."""
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache leaves no report
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={PARTS}/nvidia/cu13",
    "MOSAIC_GPU_DUMP_TO": str(DUMP),
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "JAX_TRITON_DUMP_DIR": str(DUMP),
}
sys.path.append(PARTS)

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402


@functools.cache
def devices(count):
    """As many H200s of one host, to compile for."""
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=target, topology=f"1x1x{count}"
    )
    return topology.devices


def abstract(shape, dtype):
    """An array on one H200 that is only a shape."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(devices(1)[0]))


def mosaic_report(lowered):
    """Compile a program; what its Mosaic kernels spill, whether products were serialized, and temporaries."""
    for old in DUMP.iterdir():
        old.unlink()
    memory = lowered.compile().memory_analysis()
    reports = "".join(path.read_text() for path in sorted(DUMP.glob("*.ptxas")))
    return {
        "spilled_bytes": [int(x) for x in re.findall(r"stack frame, (\d+) bytes spill stores", reports)],
        "serialized": "serialized" in reports,
        "temp_bytes": memory.temp_size_in_bytes,
    }
