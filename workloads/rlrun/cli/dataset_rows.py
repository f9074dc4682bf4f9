"""`rlrun rows --path FILE --output rows.jsonl`: convert a set of problems into rows of the `dataset` environment, each with a uid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from rlrun.config.loading.parser import Parser
from rlrun.config.models.data import DataSetConfig
from rlrun.environments.dataset_rows import Rows, download_set
from rlrun.environments.layouts import LayoutName
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


def rows_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlrun rows`."""
    p = Parser(
        "rlrun rows",
        "Write the rows of a data set in the format of the dataset environment. A row without a uid gets a uid that is derived from its "
        "question, so the uid stays the same if other rows are added or removed.",
    )
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--path", metavar="FILE", help="a .jsonl, .csv or .parquet file, or a folder with such files")
    where.add_argument("--name", metavar="NAME", help="a data set on the Hugging Face Hub")
    p.add_argument("--revision", metavar="COMMIT", help="branch, tag or commit on the hub (default: the main branch)")
    p.add_argument("--subset", metavar="FOLDER", help="a folder within the data set")
    p.add_argument("--split", metavar="WORD", help="only files with this word in their name, such as train")
    p.add_argument(
        "--layout",
        choices=get_args(LayoutName),
        help="layout of the files (default: the layout of the dataset environment)",
    )
    p.add_argument("--instruction", metavar="TEXT", help="text after each question")
    p.add_argument(
        "--unique",
        action=argparse.BooleanOptionalAction,
        help="skip rows that repeat an earlier question (default: only for dapo)",
    )
    p.add_argument("--output", type=Path, required=True, metavar="FILE", help="rows.jsonl or rows.parquet; a new file")
    return p


def run_rows(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = rows_parser().parse_args(list(argv))

    from rlrun.environments.bundled.row_files import convert_rows
    from rlrun.evaluate.sampled_rows import check_output, write_rows

    try:
        check_output(options.output)
        rows = Rows(_read_place(options), "-")
        found = convert_rows(rows, options.layout, instruction=options.instruction, unique=options.unique)
        write_rows(options.output, found.rows)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "revision"
        print(f"rlrun rows: --{field}: {first['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return exit_codes.USAGE
    except RoleError as error:
        print(f"rlrun rows: {_by_option(str(error))}", file=sys.stderr)
        return error.code
    except ValueError as error:
        print(f"rlrun rows: {error}", file=sys.stderr)
        return exit_codes.DATA
    left_out = f"; {found.left_out} skipped because they repeat an earlier question" if found.left_out else ""
    print(f"{options.output}: {len(found.rows)} rows, {found.made} of them with a new uid{left_out}")
    return exit_codes.OK


def _read_place(options: argparse.Namespace) -> DataSetConfig:
    """Return the location of the rows. Raises ValidationError, RoleError."""
    fields = ("path", "name", "revision", "split")
    place = DataSetConfig.model_validate({name: value for name in fields if (value := getattr(options, name))})
    if options.subset is None:
        return place
    root = Path(place.path) if place.path is not None else download_set(place.name or "", "-", place.revision)
    return DataSetConfig(path=str(root / options.subset), split=place.split)


def _by_option(message: str) -> str:
    """Replace the field of a data set in a message with the command-line option."""
    return message.replace("-.", "--", 1) if message.startswith("-.") else message.removeprefix("-: ")
