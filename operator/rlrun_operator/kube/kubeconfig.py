"""Address and credentials of the API server, and HTTP sessions for the operator's requests and for kopf's watches."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse
from kubernetes.client import Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

CONNECT_SECONDS = 5.0
USER_AGENT = "rlrun-operator"


class ConnectionSetupError(Exception):
    """Error for missing credentials; the message names the searched places."""


class Connection:
    """Credentials of one API server. Expiring tokens (service accounts, exec plugins) are read again when they expire."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.server = str(configuration.host).rstrip("/")
        self._ssl = _tls_context(configuration)

    def session(self, middlewares: Sequence[ClientMiddlewareType] = ()) -> aiohttp.ClientSession:
        """Return a new HTTP session; the caller closes it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl, keepalive_timeout=30),
            headers={"User-Agent": USER_AGENT},
            middlewares=(self._authorize, *middlewares),
        )

    async def _authorize(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        value = self._configuration.get_api_key_with_prefix("BearerToken")
        value = value or self._configuration.get_api_key_with_prefix("authorization")
        if value is None and self._configuration.username:
            value = self._configuration.get_basic_auth_token()
        if value:
            request.headers["Authorization"] = value
        return await handler(request)


def load_credentials() -> Connection:
    """Return the credentials from `KUBECONFIG`, else of the pod's service account, else from `~/.kube/config`.

    Raises:
        ConnectionSetupError: no source has usable credentials.
    """
    configuration = Configuration()
    try:
        if os.environ.get("KUBECONFIG"):
            load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            try:
                load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except ConfigException:
                if not Path("~/.kube/config").expanduser().exists():
                    raise ConnectionSetupError(
                        "cannot find a cluster: not in a pod with a service account, KUBECONFIG is not set, and "
                        "~/.kube/config does not exist; set KUBECONFIG to a kubeconfig file"
                    ) from None
                load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return Connection(configuration)
    except (ConfigException, OSError, ssl.SSLError, ValueError, KeyError) as error:
        where = os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ConnectionSetupError(f"cannot use kubeconfig {where}: {' '.join(str(error).split())}") from error


def _tls_context(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
