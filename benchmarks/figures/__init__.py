"""One script for each figure of the paper: `python -m benchmarks.figures.fig10`, or with `--quick`."""
