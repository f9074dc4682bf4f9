"""Certificates of one cluster: an authority, a certificate for each server, a client certificate for each user."""

import base64
import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .plan import CONTROL_PLANE, Plan

VALID_FOR = datetime.timedelta(days=30)
CLOCK_SKEW = datetime.timedelta(minutes=5)
ADMIN_GROUP = "system:masters"
READER_GROUP = "testcluster:readers"  # CoreDNS and the policy enforcer: `objects.reader_role`
USAGES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
# Users in addition to the nodes: file name, common name, group.
USERS = (
    ("admin", "admin", ADMIN_GROUP),
    ("kubelet-client", "apiserver-kubelet-client", ADMIN_GROUP),
    ("controller-manager", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
    ("proxy", "system:kube-proxy", ""),
    ("reader", "testcluster:reader", READER_GROUP),
)


class Authority:
    """Signs certificates and writes them, with their keys, as `NAME.crt` and `NAME.key` into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("rlrun-test-ca")
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = _builder(self._name, self._name, self._key).add_extension(usage, critical=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._write("ca", builder, self._key)

    def sign(self, file: str, common_name: str, usage: str, *, group: str = "", names: tuple[str, ...] = ()) -> None:
        """Make a key and a certificate for it.

        Args:
            usage: "server" or "client".
            group: the organization, which Kubernetes reads as a client's group.
            names: DNS names and addresses of a server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(common_name, group), self._name, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage([USAGES[usage]]), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), False)
        self._write(file, builder, key)

    def _write(self, file: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        (self._folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_key(self._folder / f"{file}.key", key)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )


def write_credentials(plan: Plan, folder: Path) -> None:
    """Write all certificates, the key of service-account tokens, and a kubeconfig for each user of the API."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority(folder)
    service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    addresses = ("localhost", "127.0.0.1", plan.api_service, plan.address(CONTROL_PLANE))
    authority.sign("apiserver", "kube-apiserver", "server", names=(*service, *addresses))
    for file, common_name, group in USERS:
        authority.sign(file, common_name, "client", group=group)
        write_kubeconfig(plan, folder, file)
    for node in plan.nodes:
        authority.sign(f"node-{node}", f"system:node:{node}", "client", group="system:nodes")
        authority.sign(f"kubelet-{node}", node, "server", names=(node, plan.address(node)))
        write_kubeconfig(plan, folder, f"node-{node}")
    token_key = ec.generate_private_key(ec.SECP256R1())
    write_key(folder / "service-account.key", token_key)
    public = token_key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / "service-account.pub").write_bytes(public)


def write_kubeconfig(plan: Plan, folder: Path, user: str) -> None:
    """Write `USER.kubeconfig`, complete in itself (JSON is YAML)."""
    context = f"rlrun-{plan.name}"

    def data(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": plan.api_url, "certificate-authority-data": data("ca.crt")}
    client = {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": user, "user": client}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": user}}],
    }
    path = folder / f"{user}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))


def _name(common_name: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALID_FOR)
    )
