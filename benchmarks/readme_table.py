"""Write the README's table of measured results from `benchmarks/results/*.jsonl`.

python benchmarks/readme_table.py
"""

from pensieve_jax.records import ROOT, read_records

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

PLANNING = "plan_20000x1000000_512running_retention-value"
LATE_TURNS = """Time to first token at turn 5 and later of real conversations: share of what the same
engine takes without kept state (bar: a third)"""
COMPUTED = "Context tokens computed for all turns of these conversations (beside it: without kept state)"
PLAN = """Planning a step with 20,000 conversations and a million chunks known, 512 turns running,
evictions at every step: median (bar: 2 ms)"""
DECODE = "Attention of 64 decode rows over 4,096 tokens, Triton kernel: KV read (beside it: the copy rate)"
MIXED = "The same with the Hopper kernel, which mixed batches go to"
PREFILL = "Hopper kernel, prefill of 8,192 tokens over pages (beside it: cuDNN, contiguous)"
SERVED = """Requests/s at 120 ms per output token, ShareGPT, Llama-2-13B with 10 KV heads (beside it: vLLM
without kept state)"""
STEP = """A decode step of 64 rows over 1,024 tokens, Llama-2-13B with 10 KV heads (beside it: weights and KV
at the copy rate)"""
PROMPTS = """A prefill step of 16 prompts of 1,024 tokens, the same model (beside it: its products at the
matrix rate)"""
STATELESS = """64 conversations of 5 turns, 200 new and 200 output tokens each, without kept state (beside
it: with state kept)"""
ROWS = (
    ("serving", "fig10_llama-2-13b-kv10_sharegpt_at120ms_pensieve", "served_requests_per_s", SERVED),
    ("turns", "sharegpt_turn5on", "time_to_first_token_share", LATE_TURNS),
    ("turns", "sharegpt_all", "tokens_computed", COMPUTED),
    ("cache", PLANNING, "plan_median_ms", PLAN),
    ("cache", PLANNING, "plan_p99_ms", "The same, 99th percentile (bar: 6 ms)"),
    ("cache", PLANNING, "bytes_per_chunk", "Memory of the cache's books, per chunk (bar: 200)"),
    ("step", "decode_b64_ctx1024", "time", STEP),
    ("step", "prefill_16x1024", "time", PROMPTS),
    ("serving", "closed_64x5_stateless", "time", STATELESS),
    ("kernels", "triton_decode_64x4096_h32kv8", "kv_bandwidth", DECODE),
    ("kernels", "decode_64x4096_h32kv8", "kv_bandwidth", MIXED),
    ("kernels", "prefill_1x8192_h40kv10", "rate", PREFILL),
)
"""(bench, case, metric, what it is)."""


def table() -> str:
    """The table as Markdown; rows without a result are left out."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    known = {(r["bench"], r["case"], r["metric"]): r for path in paths for r in read_records(path)}
    lines = ["| what | measured | beside it | on |", "|---|---|---|---|"]
    for bench, case, metric, what in ROWS:
        result = known.get((bench, case, metric))
        if result is not None:
            unit = "" if result["unit"] == "1" else f" {result['unit']}"
            beside = "" if result["ceiling"] is None else f"{_figure(result['ceiling'])}{unit}"
            cells = (" ".join(what.split()), _figure(result["value"]) + unit, beside, result["device"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Replace what stands between the markers."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
