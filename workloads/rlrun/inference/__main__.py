"""`python -m rlrun.inference --config run.json`: start the server of one engine. `--settings FILE` reads only the server's settings."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import InferenceConfig
from rlrun.diagnostics import stacks
from rlrun.inference.engine_server import serve_engine
from rlrun.inference.engine_settings import (
    InferenceSettings,
    SettingsError,
    settings_from_config,
    settings_from_file,
    with_local_model,
)
from rlrun.model_class import ModelClassError, served_class_problem
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.protocol.files.identity import claim_identity, complete_role_file
from rlrun.runtime import exit_codes


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, serve, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlrun.inference", description="Serve one model for a run.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="resolved configuration of the run, run.json")
    source.add_argument("--settings", type=Path, help="JSON file with the settings of the server")
    arguments = parser.parse_args(argv)
    stacks.answer_requests()
    try:
        settings = _engine_settings(arguments.config, arguments.settings)
    except (SettingsError, ConfigError) as error:
        print(f"inference: {error}", file=sys.stderr)
        message = " / ".join(str(error).splitlines())
        write_error(None, "inference", RoleError(message, exit_codes.CONFIGURATION))
        return exit_codes.CONFIGURATION
    except RoleError as error:
        print(f"inference: {error}", file=sys.stderr)
        write_error(None, "inference", error)
        return error.code
    return serve_engine(settings)


def _engine_settings(config: Path | None, settings: Path | None) -> InferenceSettings:
    if config is not None:
        role = with_local_model(
            claim_identity(load_file(InferenceConfig, config, section="inference", complete=complete_role_file))
        )
        _check_model_class(role)
        return settings_from_config(role, api_key=os.environ.get("RLRUN_API_KEY", ""))
    assert settings is not None
    return settings_from_file(settings)


def _check_model_class(role: InferenceConfig) -> None:
    """Raise `SettingsError` for a model class of the run that no engine can serve, before vLLM starts."""
    if (path := role.model.class_) is None:
        return
    try:
        problem = served_class_problem(path)
    except ModelClassError as error:
        raise SettingsError(str(error)) from error
    if problem is not None:
        raise SettingsError(problem)


if __name__ == "__main__":
    sys.exit(main())
