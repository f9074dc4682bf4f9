"""Groups on one machine: their store and their connections stay on its loopback interface.

torch's store listens on every address of the machine, whatever address it is given, and knows no key: its clients can read and write
what the ranks agree on.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

import torch.distributed as dist

ADDRESS, INTERFACE = "127.0.0.1", "lo"


def is_loopback(host: str) -> bool:
    """True if an address, or `localhost`, is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_store(
    host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *args: object, **options: object
) -> dist.TCPStore:
    """`torch.distributed.TCPStore` whose server, where this process has it, listens on loopback.

    Args:
        host_name, port, world_size, is_master, args, options: the store's own. Port 0: a free one.

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
    """Have torchrun's static rendezvous of this process listen on loopback, for which it has no option, and the ranks connect there.

    Args:
        env: variables that the ranks inherit; an interface that is set stays.
    """
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env.setdefault(name, INTERFACE)
    static_tcp_rendezvous.TCPStore = loopback_store
