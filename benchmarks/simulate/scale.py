"""100,000 requests of some 300 output tokens: time and memory of the simulator itself.

`python benchmarks/simulate/scale.py` takes some minutes on one core. The conversations are synthetic
(geometric turns, log-normal lengths) on OPT-13B, A100, both tiers under pressure. Case `scale_100k`.
"""

import argparse
import resource
import time

from results import keep, line
from rich.progress import Progress

from pensieve_jax.simulator import Simulation, make_config, summarize, with_poisson_arrivals
from pensieve_jax.simulator.synthetic import SyntheticWorkload

WALL_BOUND_S, MEMORY_BOUND_BYTES = 300.0, 4e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s")
    arguments = parser.parse_args()
    made = SyntheticWorkload(conversations=round(1.01 * arguments.requests / 5.56)).draw(0)
    timed = with_poisson_arrivals(made, requests_per_s=arguments.rate, think_time_s=60.0, seed=0)
    begin, cpu = time.perf_counter(), time.process_time()
    with Progress() as progress:
        task = progress.add_task("scale", total=None)
        simulation = Simulation(
            timed,
            make_config(),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
        result = simulation.run()
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = summarize(result)
    shapes = {
        "requests": len(result.records),
        "output_tokens": sum(record.output_tokens for record in result.records),
        "steps": result.steps,
        "fast_steps": result.fast_steps,
        "requests_per_s": arguments.rate,
        "chunks_swapped_out": figures["chunks_swapped_out"],
        "chunks_dropped": figures["chunks_dropped"],
        "recomputed_share": round(figures["recomputed_share"], 4),
    }
    case = f"scale_{arguments.requests // 1000}k"
    lines = [
        line(case, metric, value, unit, ceiling=bound, ratio=bound / value, shapes=shapes)
        for metric, value, unit, bound in (
            ("wall_s", wall_s, "s", WALL_BOUND_S),
            ("cpu_s", cpu_s, "s", WALL_BOUND_S),
            ("peak_memory_bytes", memory, "B", MEMORY_BOUND_BYTES),
        )
    ]
    keep(lines, case)


if __name__ == "__main__":
    main()
