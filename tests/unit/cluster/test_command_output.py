"""Progress of a long command, read from its output."""

import pytest

from tests.cluster.preparation.golang import advice
from tests.cluster.preparation.output import (
    build_state,
    download_state,
    image_state,
    last_line,
    packages,
    without_packages,
)

PROGRAM = ["errors", "internal/abi", "k8s.io/client-go/util", "rlrun.io/testcluster/kube"]


def test_download_counts_modules_as_they_start() -> None:
    text = "go: downloading k8s.io/api v0.34.3\ngo: downloading github.com/spf13/cobra v1.9.1\nerrors\n"
    assert download_state("", 215) == "reads the list of packages"
    assert download_state(text, 215) == "2 of at most 215 modules downloaded"


def test_build_counts_packages_as_they_start() -> None:
    text = "internal/abi\nk8s.io/client-go/util\n# k8s.io/client-go/util\nutil.go:3:4: undefined: x\n"
    assert build_state("", PROGRAM) == "0 of at most 4 packages compiled"
    assert build_state(text, PROGRAM) == "2 of at most 4 packages compiled"
    assert build_state("errors\nrlrun.io/testcluster/kube\n", PROGRAM) == "2 packages compiled, links"


def test_partial_line_is_counted_once() -> None:
    assert build_state("errors\ninternal/a", PROGRAM) == build_state("errors\ninternal/abi\n", PROGRAM)


def test_build_messages_exclude_packages_and_downloads() -> None:
    text = "go: downloading a.b/c v1.0.0\nerrors\n# k8s.io/x\n\nx.go:3:4: undefined: y\ngo: a.b/c: EOF\n"
    assert packages(text) == ["errors"]
    assert without_packages(text) == ["# k8s.io/x", "x.go:3:4: undefined: y", "go: a.b/c: EOF"]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", ""),
        ("[2/4] STEP 3/9: RUN apt-get update\n", "stage 2 of 4, step 3 of 9"),
        ("STEP 1/2: FROM x\nSTEP 2/2: RUN y\nResolved 9 packages\n", "step 2 of 2: Resolved 9 packages"),
        ("[1/2] STEP 4/4: COPY a b\n--> 1234\n[2/2] STEP 1/7: FROM x\nx\n", "stage 2 of 2, step 1 of 7: x"),
        ("#7 [wheel 2/5] RUN uv build\n#7 0.3 Downloading torch\n", "step 2 of 5: #7 0.3 Downloading torch"),
    ],
)
def test_image_state_shows_last_step_and_last_line(text: str, state: str) -> None:
    assert image_state(text) == state


def test_last_line_is_short_and_without_escapes() -> None:
    assert last_line("one\n 10%\r\x1b[1m 20%\x1b[0m\n\n") == "20%"
    assert len(last_line("x" * 500)) <= 80
    assert last_line("") == ""


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('go: x.y/z@v1.0.0: Get "https://proxy/x": dial tcp: lookup proxy: no such host', "set GOPROXY"),
        ("main.go:4:2: module lookup disabled by GOPROXY=off", "set GOPROXY"),
        ("write $WORK/b001/_pkg_.a: no space left on device", "set RLRUN_CACHE"),
        ("k8s.io/kubernetes: /usr/local/go/pkg/tool/link: signal: killed", "memory ran out"),
    ],
)
def test_go_failure_is_reported_with_fix(text: str, fix: str) -> None:
    assert fix in advice(text)
