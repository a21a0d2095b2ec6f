"""What `pensieve bench step` shows and keeps."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from pensieve_jax.bench.cases import Kind
from pensieve_jax.bench.step import StepBench, StepTime
from pensieve_jax.bench.trace import DeviceTrace
from pensieve_jax.records import record

BARS_MODEL = "llama-2-13b-kv10"
"""The model of the project's bars: its cases have their plain names."""
SHORT_NAMES = {BARS_MODEL: "13b", "llama-2-70b": "llama70b", "opt-13b": "opt13b", "opt-66b": "opt66b"}
"""Models in the names of sharded cases."""
KERNELS_SHOWN = 12
"""Of a traced step, those that take most time."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def beside(result: StepTime) -> tuple[str, float]:
    """What a case is held against, and its time in seconds."""
    match result.case.kind:
        case Kind.SWAP_IN:
            return max(result.beside_s.items(), key=lambda item: item[1])
        case Kind.HIT | Kind.SWAP_OUT | Kind.HOST | Kind.MIXED:
            return next(iter(result.beside_s.items()))
        case _:
            return "floor", result.floor.seconds


def remark(result: StepTime) -> str:
    """The rest of what was measured, for people."""
    case, parts = result.case, []
    if case.kind in (Kind.STEP, Kind.HIT) and not case.is_decode:
        parts.append(f"{result.tokens_per_s:,.0f} tokens/s")
    if result.moved_bytes:
        transfer_s = result.beside_s.get("transfer alone", result.seconds)
        parts.append(f"{result.moved_bytes / transfer_s / 1e9:.1f} GB/s")
    parts += [f"{name} {_ms(seconds)}" for name, seconds in result.beside_s.items()]
    if result.dispatch_s is not None:
        parts.append(f"dispatch {_ms(result.dispatch_s)}")
    if result.peak_bytes is not None:
        parts.append(f"peak {result.peak_bytes / 1e9:.1f} GB")
    return ", ".join(parts)


def ceilings_line(bench: StepBench) -> str:
    """The rates that floors are made of."""
    rates = bench.ceilings
    return f"copy {rates.copy_bytes_per_s / 1e9:,.0f} GB/s, products {rates.matmul_flops / 1e12:,.1f} TFLOP/s"


def results_table(results: list[StepTime]) -> Table:
    """A line for each case."""
    table = Table()
    for name in ("case", "step", "beside it", "ratio", "more"):
        table.add_column(name, justify="left" if name in ("case", "more") else "right")
    for result in results:
        name, seconds = beside(result)
        ratio = f"{result.seconds / seconds:.2f} x" if seconds else ""
        table.add_row(result.case.name, _ms(result.seconds), f"{name} {_ms(seconds)}", ratio, remark(result))
    return table


def trace_table(case: str, trace: DeviceTrace) -> Table:
    """The kernels of one traced step."""
    table = Table(
        title=f"{case}: the GPU was idle for {trace.idle_share:.1%} of the step", title_justify="left"
    )
    for name in ("kernel", "launches", "time", "each"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for kernel in trace.kernels[:KERNELS_SHOWN]:
        each = f"{kernel.seconds / kernel.launches * 1e6:.1f} us"
        table.add_row(kernel.name[:60], str(kernel.launches), _ms(kernel.seconds), each)
    return table


def case_id(model: str, num_shards: int, case: str) -> str:
    """What a case is called in the results, as the project's bars call it."""
    if num_shards > 1:
        return f"tp{num_shards}_{SHORT_NAMES.get(model, model)}_{case.removesuffix('_ctx1024')}"
    return case if model == BARS_MODEL else f"{model}/{case}"


def records(
    bench: StepBench, results: list[StepTime], *, model: str, device: str | None, driver: str | None
) -> Iterator[dict[str, Any]]:
    """A line of JSON for each case, and two for the ceilings."""
    common: Mapping[str, Any] = {
        "bench": "step",
        "device": device,
        "driver": driver,
        "packages": PACKAGES,
    }

    kv_dtype = bench.model_shape.kv_dtype

    def named(case: str) -> str:
        return case_id(model, bench.mesh.size, case if kv_dtype is None else f"{kv_dtype}/{case}")

    rates = bench.ceilings
    shards: dict[str, Any] = {"model": model, "num_shards": bench.mesh.size}
    if kv_dtype is not None:
        shards["kv_dtype"] = kv_dtype
    for case, metric, value, unit in (
        ("ceiling_copy", "bandwidth", rates.copy_bytes_per_s / 1e9, "GB/s"),
        ("ceiling_matmul", "rate", rates.matmul_flops / 1e12, "TFLOP/s"),
    ):
        yield record(
            case=named(case), metric=metric, value=round(value, 3), unit=unit, shapes=shards, **common
        )
    for result in results:
        case, (name, seconds) = result.case, beside(result)
        shapes = shards | {
            "rows": case.rows,
            "new_tokens": case.new_tokens,
            "past_tokens": case.past_tokens,
            "step_tokens": bench.step_tokens,
            "beside": name,
            "first_call_s": round(result.first_call_s, 2),
        }
        if result.case.kind in (Kind.STEP, Kind.HIT):
            shapes["flops"], shapes["bytes"] = result.floor.flops, result.floor.bytes
        if not case.is_decode:
            shapes["tokens_per_s"] = round(result.tokens_per_s)
        if result.moved_bytes:
            shapes["moved_bytes"] = result.moved_bytes
        if result.dispatch_s is not None:
            shapes["dispatch_ms"] = round(result.dispatch_s * 1e3, 3)
        if result.peak_bytes is not None:
            shapes["peak_bytes"] = result.peak_bytes
        shapes |= {f"{key.replace(' ', '_')}_ms": round(s * 1e3, 3) for key, s in result.beside_s.items()}
        yield record(
            case=named(case.name),
            metric="time",
            value=round(result.seconds * 1e3, 5),
            unit="ms",
            ceiling=round(seconds * 1e3, 5),
            ratio=round(seconds / result.seconds, 4),
            shapes=shapes,
            **common,
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
