"""Errors of the operator's credentials name their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun_operator.kube import connection


def test_damaged_certificate_of_the_service_account_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (certificate := tmp_path / "ca.crt").write_text("damaged")
    monkeypatch.delenv("KUBECONFIG", raising=False)

    def load(client_configuration: object) -> None:
        client_configuration.ssl_ca_cert = str(certificate)

    monkeypatch.setattr(connection, "_load_incluster_config", load)
    with pytest.raises(connection.ConnectionSetupError, match="cannot use the service account of this pod: "):
        connection.load_credentials()


def test_damaged_kubeconfig_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "config").write_text("contexts: none")
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(connection.ConnectionSetupError, match=f"cannot use kubeconfig {file}: "):
        connection.load_credentials()
