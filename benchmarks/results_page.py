"""Command line of a benchmark whose result is one page in `benchmarks/results`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def run_page(description: str | None, results: Path, page: Callable[..., str], **defaults: int) -> None:
    """Print the page of a benchmark; with `--write` also keep it.

    Args:
        description: text for `--help`, the docstring of the benchmark.
        results: file of the page.
        page: function that measures and returns the page; its arguments are the options.
        defaults: names of the options, which are whole numbers, with their defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--write", action="store_true", help=f"keep the page in benchmarks/results/{results.name}")
    options = vars(parser.parse_args())
    write = options.pop("write")
    text = page(**options)
    print(text)
    if write:
        results.write_text(text)
