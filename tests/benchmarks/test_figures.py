"""Every figure's script in its quick form: it runs, says what it runs, and keeps its results."""

import importlib

import pytest

from pensieve_jax.records import read_records

CASES = {
    "fig03": ["fig3_tiny_history0", "fig3_tiny_history64"],
    "fig04": ["fig4_tiny_context32", "fig4_tiny_context64", "fig4_tiny_context128"],
    "fig10": ["fig10_tiny_sharegpt_pensieve_rate20", "fig10_tiny_sharegpt_stateless_rate20"],
    "fig11": ["fig11_tiny_x2_pensieve_rate20"],
    "fig13": ["fig13_tiny_pensieve_rate20", "fig13_tiny_separate_rate20"],
    "fig14": [
        "fig14_tiny_pensieve_rate20",
        "fig14_tiny_lru_rate20",
        "fig14_tiny_pensieve_rate20_policy",
        "fig14_tiny_pensieve_rate20_simulator",
        "fig14_tiny_lru_rate20_simulator",
    ],
    "fig15": [
        f"fig15_tiny_think{think}_pensieve_rate20{end}" for end in ("", "_simulator") for think in ("1", "8")
    ],
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Results are filed by the machine's GPU, which these runs don't use."""
    monkeypatch.setattr("benchmarks.serving.study.gpu", lambda: None)


def kept(folder):
    lines = read_records(folder / "serving-cpu.jsonl")
    return {(line["case"], line["metric"]): line for line in lines}


@pytest.mark.parametrize("name", CASES)
def test_quick_form(name, tmp_path, capsys):
    script = importlib.import_module(f"benchmarks.figures.{name}")
    script.main(["--quick", "--out", str(tmp_path), "--seed", "3"])
    printed = capsys.readouterr().out
    assert "command: " in printed and "seeds: [3]" in printed
    lines = kept(tmp_path)
    cases = list(dict.fromkeys(case for case, _ in lines if "_at120ms_" not in case))
    assert cases == CASES[name]
    served = [line for (_, metric), line in lines.items() if metric == "normalized_latency_s_mean"]
    for line in served:
        figures = line["shapes"]["figures"]
        # However fast this machine is, every turn of the workload is served: nothing is left out.
        assert figures["requests"] == served[0]["shapes"]["figures"]["requests"] > 4
        assert figures["unfinished"] == figures["refused"] == 0
    digests = {line["shapes"]["digest"] for line in served}
    assert len(digests) == (2 if name == "fig15" else min(1, len(served)))


def test_kernel_figure_shows_kept_results(capsys):
    script = importlib.import_module("benchmarks.figures.fig12")
    script.main(["--quick"])
    printed = capsys.readouterr().out
    assert "decode_64x4096_h40kv10" in printed and "NVIDIA H200" in printed


def test_bad_input_ends_with_one_line(tmp_path):
    script = importlib.import_module("benchmarks.figures.fig10")
    with pytest.raises(
        SystemExit, match=r"running_bytes: got 5e\+10, expected less than the device tier, 4e\+10"
    ):
        script.main(["--running-gb", "50", "--systems", "pensieve", "--out", str(tmp_path)])
