"""Process groups of one machine, restricted to its loopback interface.

torch's store listens on every address of the machine, whatever address it is given, and has no authentication: any client can read and
write the values that the ranks exchange.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

import torch.distributed as dist

ADDRESS, INTERFACE = "127.0.0.1", "lo"


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_store(
    host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *args: object, **options: object
) -> dist.TCPStore:
    """`torch.distributed.TCPStore` whose server listens on loopback only.

    Args:
        host_name, port, world_size, is_master, args, options: arguments of `TCPStore`. Port 0 selects a free port.

    Raises:
        OSError: the port is taken.
    """
    if is_master:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, port))
            listener.listen(socket.SOMAXCONN)
            port = listener.getsockname()[1]
        except OSError:
            listener.close()
            raise
        options["master_listen_fd"] = listener.detach()  # the store closes it
    return dist.TCPStore(ADDRESS, port, world_size, is_master, *args, **options)


def stay_on_loopback(env: MutableMapping[str, str]) -> None:
    """Restrict torchrun's static rendezvous of this process, and the ranks' connections to it, to loopback. torchrun has no option for it.

    Args:
        env: environment variables that the ranks inherit; existing interface names are kept.
    """
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env.setdefault(name, INTERFACE)
    static_tcp_rendezvous.TCPStore = loopback_store
