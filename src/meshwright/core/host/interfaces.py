"""Find the network interfaces of this host, and those that gloo and NCCL would choose; import no torch.

gloo takes the names of GLOO_SOCKET_IFNAME, else the interface with the address of the host's own name, else the
loopback (torch's ``ProcessGroupGloo``). NCCL takes NCCL_SOCKET_IFNAME (beginnings of names, ``=`` whole names, ``^``
all others), else "ib…", else any but docker's and the loopback (NCCL's ``ncclFindInterfaces``).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.errors import ConfigError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Choice:
    """The interfaces that a library would take, and why; ``problem``: why there is none that ranks can meet on.

    ``suggestion``: an interface to name in ``variable`` instead.
    """

    names: tuple[str, ...]
    reason: str
    problem: str = ""
    variable: str = ""
    suggestion: str = ""


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface that is up and has one, in the kernel's order."""
    import psutil

    usable, up = psutil.net_if_addrs(), psutil.net_if_stats()
    found = {}
    for _, name in sorted(socket.if_nameindex()):
        addresses = usable.get(name, ())
        words = tuple(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        if words and (name not in up or up[name].isup):
            found[name] = words
    return found


def addresses_of_host(name: str | None = None) -> tuple[str, ...]:
    """Return the addresses that a look-up of this host's name (or another) gives; none where it fails."""
    try:
        found = socket.getaddrinfo(name or socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def gloo_choice(here: Mapping[str, tuple[str, ...]], env: Mapping[str, str] = os.environ) -> Choice:
    """Return the interface that gloo takes in ranks of a launcher; those that meshwright starts take the loopback."""
    outward = next((name for name in here if name != LOOPBACK), next(iter(here), ""))
    if wanted := env.get(GLOO, ""):
        names = tuple(wanted.split(","))
        absent = [name for name in names if name not in here]
        problem = f"{GLOO} = {wanted}: {_no_interface(absent[0], here)}" if absent else ""
        return Choice(names, f"{GLOO} names it", problem, GLOO, outward)
    if not here:
        return Choice((), "", "no interface of this host is up and has an address: gloo cannot connect ranks", GLOO)
    own, name = addresses_of_host(), socket.gethostname()
    by_name = tuple(name for name, addresses in here.items() if set(own) & {_bare(word) for word in addresses})
    if by_name and by_name[0] != LOOPBACK:
        return Choice(by_name[:1], f"the name of this host, {name}, is {own[0]}", "", GLOO, outward)
    why = f"is {own[0]}" if own else "has no address"
    return Choice((LOOPBACK,), f"the name of this host, {name}, {why}", "", GLOO, outward)


def nccl_choice(here: Mapping[str, tuple[str, ...]], env: Mapping[str, str] = os.environ) -> Choice:
    """Return the interfaces that NCCL takes for its first messages between hosts."""
    if wanted := env.get(NCCL, ""):
        excluding, exact = wanted.startswith("^"), "=" in wanted[:2]
        words = wanted.lstrip("^=").split(",")
        is_named = {name: any(name == w if exact else name.startswith(w) for w in words) for name in here}
        names = tuple(name for name, named in is_named.items() if named is not excluding)
        problem = "" if names else f"{NCCL} = {wanted}: {_no_interface(wanted, here)}"
        outward = next((name for name in here if name != LOOPBACK), "")
        return Choice(names, f"{NCCL} names it", problem, NCCL, outward)
    kinds = (
        [name for name in here if name.startswith("ib")],
        [name for name in here if not name.startswith(("docker", LOOPBACK))],
        [name for name in here if name.startswith("docker")],
        [name for name in here if name == LOOPBACK],
    )
    names = tuple(next(filter(None, kinds), ()))
    problem = "" if names else "no interface of this host is up and has an address: NCCL cannot connect ranks"
    return Choice(names, "NCCL's own order", problem, NCCL)


def refuse_absent_interfaces() -> None:
    """Refuse an interface for gloo that this host does not have, before the connection fails or hangs.

    Raises:
        ConfigError: the name, those that there are, and the command to type.
    """
    wanted = os.environ.get(GLOO)
    if not wanted:
        return
    choice = gloo_choice(interfaces())
    if choice.problem:
        repair = f"export {GLOO}={choice.suggestion}" if choice.suggestion else f"ip link set {LOOPBACK} up"
        raise ConfigError(f"{choice.problem}. Type: {repair}")


def _no_interface(name: str, here: Mapping[str, tuple[str, ...]]) -> str:
    return f"{name} is no interface of this host that is up and has an address ({', '.join(here) or 'none is'})"


def _bare(address: str) -> str:
    return address.partition("%")[0]
