"""The page of results: every section, from lines as they are kept."""

import json

from benchmarks.records import record
from benchmarks.report import NOTHING, SECTIONS, Report, main, page
from benchmarks.serving.study import RESULTS


def line(case, metric, value, ceiling=None, ratio=None, **shapes):
    return record(
        bench="serving",
        case=case,
        metric=metric,
        value=value,
        unit="s",
        ceiling=ceiling,
        ratio=ratio,
        shapes=shapes,
    )


def point(case, latency, served):
    figures = {
        "normalized_latency_s_mean": latency,
        "served_requests_per_s": served,
        "ttft_s_p50": None,
        "hit_rate_device": 0.5,
    }
    return line(case, "normalized_latency_s_mean", latency, figures=figures)


def lines():
    curve = [
        point(f"fig10_llama-2-13b-kv10_sharegpt_{system}_rate{rate:g}", latency, rate)
        for system, rate, latency in (
            ("pensieve", 4.0, 0.05),
            ("pensieve", 8.5, 0.2),
            ("vllm-stateless", 2.0, 0.06),
        )
    ]
    at = line(
        "fig10_llama-2-13b-kv10_sharegpt_at120ms_pensieve",
        "served_requests_per_s",
        6.1,
        3.0,
        2.03,
        peer="vllm-stateless",
    )
    simulated = line(
        "fig15_llama_think30_pensieve_rate4_simulator", "hit_rate", 0.91, 0.93, 0.98, peer="simulator"
    )
    prompt = line("fig3_llama_history512", "prompt_s", 0.1, 0.3, 3.0, batch=16, new=200)
    chunk = line("fig4_llama_context64", "attention_s", 1e-5, 2e-4, model={"name": "llama"})
    skip = line("compression_skip", "hit_rate_device", 0.32, 0.33)
    return [*curve, at, simulated, prompt, chunk, skip]


def test_page_has_the_papers_numbers_and_ours(tmp_path):
    loop = line("closed_64x5_stateless", "time", 23.9, 13.8, 1.08)
    kept = "".join(json.dumps(line) + "\n" for line in [*lines(), loop])
    (tmp_path / "serving-h200.jsonl").write_text(kept)
    sizes = {"num_heads": 40, "num_kv_heads": 10, "copy_out_us": 434.4, "multi_round_us": 766.3}
    attention = line("paper_32x8_over_2048_h40kv10", "time", 111.3, 434.4, 3.9, **sizes)
    (tmp_path / "kernels-h200.jsonl").write_text(json.dumps(attention | {"bench": "kernels"}) + "\n")
    text = page(Report(tmp_path, tmp_path / "images"))
    for section in SECTIONS:
        assert section.title in text and section.paper in text
    assert "| pensieve | - | 8.5 | - | 0.2 |" in text
    assert "| fig10_llama-2-13b-kv10_sharegpt_at120ms_pensieve | 6.1 | 3 (vllm-stateless) | 2.03 x |" in text
    assert "| fig15_llama_think30_pensieve_rate4 | hit_rate | 0.91 | 0.93 | -2.0 points |" in text
    assert "| 512 | 0.1 | 0.3 | 3.00 x |" in text
    assert "| 64 | 10.0 | 200.0 |" in text
    assert "| 2048 | 111 | 434 | 766 |" in text and (tmp_path / "images" / "fig12_h40kv10.svg").exists()
    assert "| compression_skip | hit_rate_device | 0.32 | 0.33 | -1.0 points |" in text
    assert (tmp_path / "images" / "fig10_llama-2-13b-kv10_sharegpt.svg").is_file()
    assert "| closed_64x5_stateless | 23.9 s | 13.8 s | 1.08 |" in text
    assert text.count(NOTHING) == 5  # 11, 13, 14, 15's curves, and steps


def test_kept_results_make_a_page(tmp_path):
    main(["--page", str(tmp_path / "results.md")])
    text = (tmp_path / "results.md").read_text()
    assert "decode_64x4096_h40kv10" in text
    assert "fig14_rate1" in text


def test_lines_have_no_numbers_that_json_lacks():
    for text in (text for path in RESULTS.glob("*.jsonl") for text in path.read_text().splitlines()):
        json.loads(text, parse_constant=lambda name: 1 / 0)
