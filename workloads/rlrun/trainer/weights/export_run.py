"""Export of a run's checkpoint. The folders are checked before the import of torch, which takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlrun.config.models.checkpoint import ResumeConfig
from rlrun.config.models.language_models import DType
from rlrun.config.named_code import code_of_model
from rlrun.hub.fetch import policy_source
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.protocol.files.run_folder import recorded_run
from rlrun.protocol.files.shared_trainer_files import model_folder
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.resume import choose_base

if TYPE_CHECKING:
    from rlrun.trainer.weights.export import Exported


def export_run(
    root: Path, output: Path, *, step: int | None = None, dtype: DType | None = None, trusts_code: bool = False
) -> Exported:
    """Export a run's checkpoint; the run may still be training.

    Args:
        root: folder of the run.
        output: new or empty folder for the export.
        step: step of the checkpoint. Default: the newest intact checkpoint.
        dtype: number format of the exported weights. Default: the published format.
        trusts_code: true if the caller trusts code that the run's configuration names.

    Raises:
        RoleError: the run or checkpoint does not exist, or cannot be read or written; the message contains a fix.
    """
    paths = RunPaths(root)
    config = recorded_run(paths)
    if config is None:
        raise RoleError(
            f"{root} is not the folder of a run: it has no run.json; name one such as runs/NAME",
            exit_codes.USAGE,
        )
    check_recorded_code(root, [*code_of_model(config.model)], trusted=trusts_code)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RoleError(f"--output {output} is not empty; choose a new folder or empty this one", exit_codes.USAGE)
    resume = ResumeConfig() if step is None else ResumeConfig(policy="Step", step=step)
    problems: list[str] = []
    try:
        base = choose_base(paths, resume, with_orchestrator=False, log=problems.append)
    except RoleError as error:
        told = str(error).replace("checkpoint.resume.step is", "--step is")
        raise RoleError(told, exit_codes.USAGE) from None
    if base is None:
        why = "; ".join(problems) or "no checkpoint was completed"
        raise RoleError(f"{root} has no checkpoint to export: {why}", exit_codes.DATA)

    from rlrun.trainer.weights.export import export_checkpoint

    return export_checkpoint(
        base.checkpoint.path,
        output,
        config.model,
        policy_source(config.model, model_folder(paths.root, config.shared_with)),
        step=base.checkpoint.step,
        dtype=dtype,
        adapters=config.lora,
    )
