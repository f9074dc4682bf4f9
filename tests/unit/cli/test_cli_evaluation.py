"""Options of `eval` are checked before any file is read."""

from __future__ import annotations

import pytest

from rlrun.cli.evaluation import eval_parser
from rlrun.runtime import exit_codes


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--temperature=-1", "--temperature: got '-1', expected a number from 0 to 10; see eval --help"),
        ("--temperature=null", "--temperature: got 'null', expected a number from 0 to 10"),
        ("--top-k=1.5", "--top-k: got '1.5', expected a whole number from 0"),
        ("--max-tokens=0", "--max-tokens: got '0', expected a whole number"),
        ("--top-p=nan", "--top-p: got 'nan', expected a number greater than 0 and at most 1"),
        ("--chat-template-arguments=[]", "expected a JSON object"),
    ],
)
def test_number_out_of_bounds_is_refused_with_range(
    word: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        eval_parser().parse_args(["run.yaml", word])
    assert ended.value.code == exit_codes.USAGE
    assert expected in capsys.readouterr().err


def test_numbers_within_them() -> None:
    options = eval_parser().parse_args(["run.yaml", "--temperature", "0.5", "--top-k=20", "--stop", "a", "--stop", "b"])
    assert (options.temperature, options.top_k, options.stop) == (0.5, 20, ["a", "b"])
