"""Commands in fenced blocks of the documentation, each with the test that runs it or the reason why none does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAMS = frozenset(
    {
        "make",
        "kubectl",
        "helm",
        "docker",
        "kind",
        "git",
        "pip",
        "uv",
        "python",
        "python3",
        "torchrun",
        "curl",
        "export",
        "cd",
    }
    | {"rlrun", "rl", "sft", "eval", "synthesize", "trainer", "orchestrator", "inference"}
    | {"ls", "tail", "head", "for", "do", "done"}
)
"""First words of commands."""
_FENCE = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)
_SHELLS = ("sh", "bash", "console", "shell")

AS_PRINTED = "tests/processes/docs/test_commands_as_printed.py::test_printed_command_runs"
"""Test that runs a command with the words of the page."""
TESTS: Mapping[str, str] = {
    r"make demo": "tests/e2e/cluster/test_real_images.py::test_quickstart_learns_on_cluster",
    r"make quickstart": "tests/e2e/local/test_learning.py::test_quickstart_learns",
    r"rlrun validate run\.yaml": AS_PRINTED,
    r"rlrun render run\.yaml": AS_PRINTED,
    r"rlrun local run\.yaml": "tests/e2e/local/test_learning.py::test_quickstart_learns",
    r"rlrun local run\.yaml --resume": "tests/e2e/local/test_resume.py::test_killed_and_resumed_run_equals_undisturbed_run",
    r"rlrun eval run\.yaml --client\.base-url .*": (
        "tests/processes/evaluate/test_eval_served.py::test_eval_of_manifest_uses_server"
    ),
    r"rlrun synthesize @ .*": "tests/processes/evaluate/test_eval_served.py::test_synthesize_of_files_writes_messages",
    r"rlrun eval run\.yaml( (?!--client).*)?": (
        "tests/e2e/local/test_evaluate.py::test_eval_measures_base_and_steps_without_repeated_requests"
    ),
    r"rlrun synthesize run\.yaml .*": "tests/e2e/local/test_evaluate.py::test_synthesized_data_trains_an_sft_run",
    r"rlrun export (FOLDER|runs/NAME) --output DIR": "tests/trainer/test_trainer_layouts.py::test_checkpoint_resumes_with_any_ranks",
    r"rlrun tiny-model DIR": "tests/tensors/trainer/test_tiny_model.py::test_tiny_model_command_writes_loadable_model",
    r"rlrun rows .*": AS_PRINTED,
    r"sft examples/sft\.yaml": "tests/e2e/local/test_sft.py::test_sft_example_learns_with_exact_held_out_loss",
    r"sft @ run\.toml .*": "tests/unit/cli/test_cli_sft.py::test_sft_command_line_overrides_file",
    r"kubectl apply -f run\.yaml|kubectl diff -f run\.yaml": "tests/controlplane/test_gitops.py::test_operator_writes_cause_no_diff",
    r"kubectl -n team-a apply -f examples/gpu-check\.yaml": "tests/controlplane/test_malformed.py::test_examples_are_accepted",
    r"helm test rlrun-operator .*": "tests/e2e/cluster/test_lives.py::test_helm_test_passes",
    r"kubectl -n team-a patch rlr NAME .*accessModes.*": (
        "tests/controlplane/test_resource.py::test_storage_is_editable_until_volume_exists"
    ),
    r"kubectl -n team-a delete pvc NAME-data": (
        "tests/unit/operator/decide/test_claims.py::test_edited_claim_differs_from_existing_claim_until_recreated"
    ),
    r"kubectl patch rlr NAME .*suspend.*|kubectl wait rlr NAME .*Suspended.*": (
        "tests/controlplane/test_operator_suspend.py::test_suspended_and_edited_run_resumes_without_loss"
    ),
    r"kubectl patch rlr NAME .*claimTemplate.*": "tests/controlplane/test_operator_growth.py::test_claim_grows_while_run_trains",
    r"kubectl annotate rlr NAME .*restart-requested-at=.*": (
        "tests/controlplane/test_operator_suspend.py::test_run_created_suspended_starts_and_restarts_by_annotation"
    ),
    r"kubectl annotate rlr NAME .*rotate-key-requested-at=.*": (
        "tests/thorough/operator/decide/test_api_key.py::test_key_rotation_is_an_uncounted_restart"
    ),
    r"kubectl get rlr (-A --field-selector .*|NAME -o wide)": "tests/controlplane/test_resource.py::test_kubectl_get_shows_status_columns",
    r"kubectl -n team-a create rolebinding .*": "tests/controlplane/test_restrictions.py::test_builtin_roles_include_runs",
    r"helm (install|upgrade --install) .*": (
        "tests/processes/chart/test_chart.py::test_each_watched_namespace_gets_role_and_binding"
    ),
    r"rlrun init .*": AS_PRINTED,
    r"(ls|tail|head) .*runs/quickstart-\*/.*": AS_PRINTED,
    r"rlrun convert (run_grpo\.sh|run\.sh|rl\.toml|rl @ base\.toml) .*": AS_PRINTED,
    r"rlrun convert (ppo|gsm8k_grpo)\.yaml .*|rlrun convert run_sft\.sh .*": (
        "tests/unit/convert/test_documented.py::test_documented_example_has_actionable_outcome"
    ),
    r"rlrun validate run\.yaml && rlrun local run\.yaml": "tests/e2e/local/test_learning.py::test_quickstart_learns",
    r"rlrun env install (word-chain.*|\./environments/word_chain)": (
        "tests/processes/cli/test_cli_env_install.py::test_folder_is_installed_and_replaced_only_on_request"
    ),
    r"rlrun env install ann/word-chain@.*": (
        "tests/processes/cli/test_cli_env_install.py::test_hub_environment_comes_only_from_its_owner"
    ),
    r"rlrun env try calculator .*": AS_PRINTED,
    r"rlrun env try my_package\.tools:make .*": "tests/processes/cli/test_cli_env.py::test_tool_call_in_reply_is_executed",
    r"rlrun env try my_package\.tasks:make .*": "tests/processes/cli/test_cli_env.py::test_episode_is_printed",
    r"rlrun env try gsm8k --base-url .*": "tests/processes/cli/test_cli_env.py::test_server_generates_replies",
    r"rlrun fit run\.yaml .*": AS_PRINTED,
    r"rlrun local [ab]\.yaml --output-dir runs/[ab]( &)?": (
        "tests/processes/local/test_gpus.py::test_parallel_runs_have_distinct_gpus"
    ),
    r"rlrun track runs/NAME( .*)?": "tests/processes/tracking/test_whole_curves.py::test_killed_and_resumed_run_has_one_complete_curve",
    r"rlrun (get( --sort reward)?|status NAME|why NAME)|kubectl rlrun why NAME .*": AS_PRINTED,
    r"rlrun (suspend|resume|restart|scale|set) NAME.*": AS_PRINTED,
    r"rlrun pull NAME run --to DIR": AS_PRINTED,
    r"rlrun replay runs/NAME --step 30 --sample 160/3 --no-compute": AS_PRINTED,
    r"rlrun replay runs/NAME --step 30( --sample 3)?|rlrun fork runs/NAME --step .*": (
        "tests/trainer/test_trainer_replay.py::test_replayed_steps_are_equal_and_fork_continues"
    ),
    r"rlrun put rows\.jsonl .*": AS_PRINTED,
    r"rlrun pull NAME model .*": AS_PRINTED,
    r"rlrun ui( runs/a /data/runs)?": "tests/processes/cli/test_cli_ui.py::test_page_and_api_are_served_until_signal",
    r"rlrun plot runs/a runs/b .*": AS_PRINTED,
    r"rlrun cost( NAME -o wide)?": AS_PRINTED,
    r"rlrun debug NAME": AS_PRINTED,
    r"rlrun watch NAME": AS_PRINTED,
    r"rlrun status runs/NAME": AS_PRINTED,
    r"rlrun logs runs/NAME .*": AS_PRINTED,
    r"rlrun rollouts runs/NAME .*": AS_PRINTED,
    r"rlrun compare runs/a runs/b": AS_PRINTED,
    r"rlrun tiny-model tiny .*|(inference|trainer|orchestrator) @ .*|rl .*--engine-url .*": (
        "tests/e2e/local/test_by_hand.py::test_engine_outlives_rl_and_serves_manual_roles"
    ),
    r"torchrun --nnodes .*": "tests/trainer/test_trainer_nodes.py::test_two_plain_torchrun_groups_form_one_trainer",
}
"""Commands, as regular expressions, and the test that runs them or an equivalent."""
REASONS: Mapping[str, str] = {
    r"git clone <this repository> && cd rlrun": "the address is the reader's",
    r"docker build .*": "needs a builder of images and a network; tests/unit/images looks at the files",
    r"(IDENTITY|ISSUER|IMAGE|WHEEL)=.*": "names for the commands below them",
    r"cosign verify.*|gh attestation verify .*|docker buildx imagetools inspect .*": "needs a release, and there is none yet",
    r"kind .*": "needs Docker; the tests' clusters are made without",
    r"kubectl (-n team-a )?(create namespace|create secret|label namespace) .*": "Kubernetes' own: nothing of it is ours",
    r"kubectl -n team-a label pvc NAME-data .*|kubectl -n rlrun-system scale deployment/rlrun-operator .*": (
        "steps of a restore, which no test plays as a whole"
    ),
    r"kubectl -n team-a (apply -f runs?\.(yaml|json)|get rlr -o json .*)": "steps of a restore, which no test plays as a whole",
    r"kubectl -n team-a get rlr NAME -o jsonpath=.*": "reads a field of the status, which the tests of its conditions hold",
    r"kubectl label pvc .*": "undoes what Argo CD has done to claims; needs Argo CD",
    r"kubectl -n team-a get rlr -w": "waits until the reader stops it",
    r"kubectl describe rlr NAME|kubectl -n team-a describe rlr gpu-check": (
        "prints the object as kubectl likes; what is in it is held by the tests of its conditions"
    ),
    r"make (install|unit|lint|test|test-full)|python -m tests\.tiers( --full)?( [a-z]+)+": "runs the tests",
    r"make install ACCELERATOR=gpu": "needs a CUDA compiler; tests/unit/cli looks at its lock",
    r"make images .*": "needs a builder of images and a registry or kind; tests/unit/images looks at what it calls",
    r"FROM .*|COPY .*|ENV .*|EOF": "lines of a Dockerfile within the command before them",
    r"export RLRUN_(API_KEY|ATTEMPT)=.*": "a variable of the commands after it",
    r"kubectl delete (rlr --all|crd) .*|helm uninstall .*": "takes the installation away that all tests of a cluster share",
}
"""Commands, as regular expressions, that no test runs, and the reason."""


def pages() -> Iterator[Path]:
    """Return the pages that contain commands."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))
    yield from (path for path in sorted((ROOT / "docs").rglob("*.md")) if "decisions" not in path.parts)


def commands(text: str) -> list[str]:
    """Return the commands of a page, without comments, prompts, `.venv/bin/` and extra spaces.

    A block without a language is an output if its first word is not a known program; a shell block always contains commands.
    """
    found: list[str] = []
    for block in _FENCE.finditer(text):
        lines = [_command(line) for line in block["text"].replace("\\\n", " ").splitlines()]
        lines = [line for line in lines if line]
        is_shell = block["language"] in _SHELLS
        if is_shell or (not block["language"] and lines and lines[0].split()[0] in PROGRAMS):
            found += lines
    return found


def _command(line: str) -> str:
    line = re.sub(r"(^|\s)#.*", "", line)
    line = re.sub(r"\s+", " ", line).strip().removeprefix("$ ")
    return line.replace(".venv/bin/", "")


def rules(command: str) -> list[str]:
    """Return the rows of both tables that match a command."""
    return [rule for rule in (*TESTS, *REASONS) if re.fullmatch(rule, command)]
