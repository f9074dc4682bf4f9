"""Connection to the API server: credentials, HTTP sessions, and addresses for network policies.

The sessions serve the operator's own requests and kopf's watches.

The NetworkPolicies of orchestrators must allow connections to the API server. In most networks a policy sees the addresses behind the
Service `kubernetes`, which its EndpointSlice has; in others it sees the address of the Service itself. Both objects are in the namespace
`default`. The addresses may change while runs are active, because control planes are replaced.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import aiohttp
from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse
from kubernetes.client import Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

from rlrun_operator.kube.client import ApiError, Client
from rlrun_operator.kube.resources import Resource
from rlrun_operator.state import Json

USER_AGENT = "rlrun-operator"
# The client library has no types.
_load_kube_config: Callable[..., None] = load_kube_config
_load_incluster_config: Callable[..., None] = load_incluster_config


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
            middlewares=(self._add_authorization, *middlewares),
        )

    async def _add_authorization(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        # Each call reads an expired token again. The name of the token depends on the version of the client library.
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
    configuration, source = Configuration(), "the service account of this pod"
    try:
        if file := os.environ.get("KUBECONFIG"):
            source = f"kubeconfig {file}"
            _load_kube_config(client_configuration=configuration)
        else:
            try:
                _load_incluster_config(client_configuration=configuration)
            except ConfigException:
                if not Path("~/.kube/config").expanduser().exists():
                    raise ConnectionSetupError(
                        "cannot find a cluster: not in a pod with a service account, KUBECONFIG is not set, and "
                        "~/.kube/config does not exist; set KUBECONFIG to a kubeconfig file"
                    ) from None
                source = "kubeconfig ~/.kube/config"
                _load_kube_config(client_configuration=configuration)
        return Connection(configuration)
    except (ConfigException, OSError, ssl.SSLError, ValueError, KeyError) as error:
        raise ConnectionSetupError(f"cannot use {source}: {' '.join(str(error).split())}") from error


def _tls_context(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


NAMESPACE, SERVICE = "default", "kubernetes"
ENDPOINT_SLICE = Resource("EndpointSlice", "discovery.k8s.io", "v1", "endpointslices")
_SERVICES = Resource("Service", "", "v1", "services")

Rules = tuple[Json, ...]


async def api_server_rules(client: Client) -> Rules:
    """Return egress rules that allow only the API server.

    Raises:
        LookupError: the addresses cannot be determined; the message has the cause.
        UnavailableError: the API server does not answer.
    """
    try:
        found = await client.get(ENDPOINT_SLICE, NAMESPACE, SERVICE)
        service = await client.get(_SERVICES, NAMESPACE, SERVICE)
    except ApiError as error:
        raise LookupError(str(error)) from error
    rules = (*_endpoint_rules(found or {}), *_service_rules((service or {}).get("spec") or {}))
    # Without the EndpointSlice, the rules lack the addresses that most networks see.
    if found is None or not rules:
        raise LookupError(f"EndpointSlice {NAMESPACE}/{SERVICE} has no address")
    return rules


def _endpoint_rules(endpoint_slice: Json) -> Rules:
    addresses = [a for endpoint in endpoint_slice.get("endpoints") or () for a in endpoint.get("addresses") or ()]
    return _access_rule(addresses, [port["port"] for port in endpoint_slice.get("ports") or () if port.get("port")])


def _service_rules(service: Json) -> Rules:
    return _access_rule(service.get("clusterIPs") or (), [port["port"] for port in service.get("ports") or ()])


def _access_rule(addresses: Iterable[str], ports: list[int]) -> Rules:
    """Return one rule, or no rule without an address or a port."""
    blocks = sorted({str(ipaddress.ip_network(address)) for address in addresses if _is_address(address)})
    if not blocks or not ports:
        return ()
    return (
        {
            "to": [{"ipBlock": {"cidr": block}} for block in blocks],
            "ports": [{"protocol": "TCP", "port": port} for port in sorted(set(ports))],
        },
    )


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address. A headless Service has the text `None`, and an EndpointSlice may have host names."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
