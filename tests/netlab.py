"""An emulated internet: a network namespace for each host, joined by a "fabric", a process that adds delay, loss and
rate limits to every IPv4 packet. Needs root, iproute2, nft and /dev/net/tun, but neither netem nor a Python package.

    why = netlab.unavailable()                                     # None, or the reason why it cannot run here
    with netlab.Net() as net:
        net.host("public", rtt_ms=50, up=20, down=20, loss=0.01)   # Mbit/s; two hosts' rtt_ms add up to a path's
        net.host("office", firewall=True)                          # drops connections from outside
        net.host("home", nat="router")                             # behind a router that masquerades
        net.start()                                                # after all hosts are declared
        process = net.popen("public", [sys.executable, "peer.py"])
        net.ip("public")                                           # its address
        net.set("office", up=2)                                    # changes a running link
        net.partition(["public"]), net.heal()
        net.renumber("home")                                       # its router gets another address
        net.bytes("public")                                        # (sent, received)

Leaving the block ends every process of the hosts and removes the namespaces.
"""

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 2048  # more than the links' MTU of 1500
BITS_PER_MEGABIT, BYTE_BITS = 1e6, 8


def run(*words: str) -> str:
    """Return the output of a command, or raise an OSError with its message if it fails."""
    result = subprocess.run(" ".join(words).split(), capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(words)}: {result.stderr.strip()}")
    return result.stdout


def unavailable() -> str | None:
    """Return the reason why no network can be emulated here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    missing = [tool for tool in ("ip", "nft", "sysctl") if not shutil.which(tool)]
    missing += [path for path in ("/dev/net/tun",) if not os.path.exists(path)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with Net() as net:
            net.host("host", nat="router")
    except OSError as e:
        return f"cannot emulate a network here: {e}"


class Net:
    """Hosts by name, each with a network namespace, and the fabric between them."""

    def __init__(self, congestion: str | None = "reno"):
        """:param congestion: the algorithm of TCP on all hosts, one of tcp_allowed_congestion_control"""
        # names of devices have at most 15 characters; a process id may be that of a killed run, whose namespaces remain
        self.tag, self.congestion = f"n{uuid.uuid4().hex[:5]}", congestion
        self.fabric: subprocess.Popen | None = None
        self.hosts: dict[str, dict] = {}  # name -> namespace, ip, and the link that leads to the fabric
        self.links: dict[str, dict] = {}  # name of a host or router -> its link's properties
        self.namespaces: list[str] = []
        self.numbers = itertools.count(1)  # of addresses
        self.processes: list[subprocess.Popen] = []

    def make_namespace(self, name: str) -> str:
        namespace = f"{self.tag}-{name}"
        run("ip netns add", namespace)
        self.namespaces.append(namespace)
        run("ip -n", namespace, "link set lo up")
        if self.congestion:
            run("ip netns exec", namespace, "sysctl -qw net.ipv4.tcp_congestion_control=" + self.congestion)
        return namespace

    def make_link(self, namespace: str, name: str, properties: dict) -> str:
        """Make a tun device in the namespace, whose other end the fabric reads and writes; return its address."""
        ip, device = self.choose_address(), f"{self.tag}w{len(self.links) + 1}"
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        defaults = dict(rtt_ms=0, up=1000, down=1000, loss=0, queue_ms=200, group=0)
        self.links[name] = {**defaults, **properties, "descriptor": descriptor, "ip": ip}
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        run("ip link set", device, "netns", namespace, "name wan")
        # only the fabric drops packets, by queue_ms; tun's own queue of 500 would drop bursts of a fast TCP
        run("ip -n", namespace, "link set wan up mtu 1500 txqueuelen 20000")
        self.add_address(namespace, ip)
        return ip

    def choose_address(self) -> str:
        """Return an address that no link has had."""
        number = next(self.numbers)
        # libp2p takes 11.99/16 for a public range; its AutoNAT and relays ignore private ones
        return f"11.99.{number // 250}.{number % 250}"

    def add_address(self, namespace: str, ip: str) -> None:
        for command in (f"addr add {ip}/8 dev wan", "route add default dev wan"):
            run("ip -n", namespace, command)

    def add_nft_rules(self, namespace: str, *rules: str) -> None:
        for rule in rules:
            run("ip netns exec", namespace, "nft add", rule)

    def host(
        self, name: str, nat: str | None = None, firewall: bool = False, blocked: str = "", **properties: float
    ) -> str:
        """Declare a host; return its address.

        :param nat: name of the router in front of the host; hosts of the same router share its link
        :param firewall: drop connections from outside
        :param blocked: tcp or udp, to drop all packets of that protocol from outside
        :param properties: of the link: rtt_ms, up and down (Mbit/s), loss (share of packets), queue_ms
        """
        namespace = self.make_namespace(name)
        if nat:
            router, number = f"{self.tag}-{nat}", 1 + sum(host["link"] == nat for host in self.hosts.values())
            if nat not in self.links:
                self.make_link(self.make_namespace(nat), nat, properties)
                run("ip netns exec", router, "sysctl -qw net.ipv4.ip_forward=1")
                self.add_nft_rules(
                    router,
                    "table ip nat",
                    "chain ip nat post { type nat hook postrouting priority 100 ; }",
                    "rule ip nat post oifname wan masquerade",
                    "chain ip nat forward { type filter hook forward priority 0 ; }",
                    "rule ip nat forward iifname wan ct state new drop",
                )
            ip, gateway = f"192.168.{number}.2", f"192.168.{number}.1"
            run(f"ip -n {router} link add lan{number} type veth peer name eth0 netns {namespace}")
            for command in (
                f"{router} addr add {gateway}/24 dev lan{number}",
                f"{router} link set lan{number} up",
                f"{namespace} addr add {ip}/24 dev eth0",
                f"{namespace} link set eth0 up",
                f"{namespace} route add default via {gateway}",
            ):
                run("ip -n", command)
        else:
            ip = self.make_link(namespace, name, properties)
        if firewall or blocked:
            accepted = f"meta l4proto != {blocked}" if blocked else "ct state established,related"
            self.add_nft_rules(
                namespace,
                "table inet firewall",
                "chain inet firewall in { type filter hook input priority 0 ; policy drop ; }",
                "rule inet firewall in iif lo accept",
                f"rule inet firewall in {accepted} accept",
            )
        self.hosts[name] = dict(namespace=namespace, ip=ip, link=nat or name)
        return ip

    def ip(self, name: str) -> str:
        return self.hosts[name]["ip"]

    def start(self) -> None:
        """Let packets flow."""
        self.fabric = subprocess.Popen(
            [sys.executable, "-S", os.path.abspath(__file__), "fabric"],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=[link["descriptor"] for link in self.links.values()],
            # Ctrl-C must not end the fabric before the block ends
            start_new_session=True,
        )
        with contextlib.suppress(PermissionError):  # links keep their rates on busy cores
            os.setpriority(os.PRIO_PROCESS, self.fabric.pid, -20)
        self.heal()

    def update_links(self, names, **change: float) -> None:
        """Change these hosts' links; raise a BrokenPipeError if the fabric has died."""
        for name in names:
            self.links[self.hosts[name]["link"]].update(change)
        self.fabric.stdin.write(json.dumps(list(self.links.values())).encode() + b"\n")

    def set(self, name: str, **change: float) -> None:
        """Change a host's link while it runs."""
        self.update_links([name], **change)

    def partition(self, names) -> None:
        """Separate these hosts from all others from now on."""
        self.update_links(names, group=1)

    def heal(self) -> None:
        """End a partition."""
        self.update_links(self.hosts, group=0)

    def renumber(self, name: str) -> None:
        """Give the router in front of a host another address while it runs, as providers do."""
        router = self.hosts[name]["link"]
        link, namespace = self.links[router], f"{self.tag}-{router}"
        run(f"ip -n {namespace} addr del {link['ip']}/8 dev wan")  # the default route goes with the last address
        self.add_address(namespace, ip := self.choose_address())
        self.update_links([name], ip=ip)

    def prefix(self, name: str) -> list[str]:
        """Return the words before a command that run it on the host; the command keeps the process id."""
        return ["ip", "netns", "exec", self.hosts[name]["namespace"]]

    def popen(self, name: str, command: list[str], **options) -> subprocess.Popen:
        """Run a command on a host; options are subprocess.Popen's."""
        self.processes.append(subprocess.Popen([*self.prefix(name), *command], **options))
        return self.processes[-1]

    def bytes(self, name: str) -> tuple[int, int]:
        """Return the bytes that the host has sent and received."""
        device = "wan" if self.hosts[name]["link"] == name else "eth0"
        shown = json.loads(run("ip -j -s -n", self.hosts[name]["namespace"], "link show", device))
        return shown[0]["stats64"]["tx"]["bytes"], shown[0]["stats64"]["rx"]["bytes"]

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        if self.fabric:  # ends first, because its descriptors become invalid with the namespaces
            self.fabric.kill()
            self.fabric.wait()
        for namespace in self.namespaces:
            # daemons and grandchildren too
            pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    # torch's manager frees the shared memory of dead processes, and then ends by itself
                    if "torch_shm_manag" not in Path(f"/proc/{pid}/comm").read_text():
                        os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", namespace])
        for process in self.processes:
            process.wait()
        for link in self.links.values():
            os.close(link["descriptor"])


def run_fabric() -> None:
    """Carry packets between the links until stdin is closed. Lines of JSON on stdin change the links.

    A packet waits in its sender's queue for the sender's rate, then for half of both round-trip times, then in the
    receiver's queue for the receiver's rate. A queue longer than queue_ms drops it.
    """
    links: dict[bytes, dict] = {}  # by address, in the form of a packet's header
    by_descriptor: dict[int, dict] = {}
    # (time, number, packet, receiving link, whether it still has to enter the receiver's queue)
    waiting: list[tuple[float, int, bytes, dict, bool]] = []
    number, unread = 0, b""
    while True:
        timeout = min(1.0, max(0.0, waiting[0][0] - time.perf_counter())) if waiting else 1.0
        for descriptor in select.select([0, *by_descriptor], [], [], timeout)[0]:
            if descriptor == 0:
                if not (data := os.read(0, 1 << 16)):
                    return
                *lines, unread = (unread + data).split(b"\n")
                for properties in (properties for line in lines for properties in json.loads(line)):
                    link = by_descriptor.setdefault(properties["descriptor"], {"free": 0.0, "free_in": 0.0})
                    link.update(properties)
                links = {bytes(map(int, link["ip"].split("."))): link for link in by_descriptor.values()}
                continue
            source = by_descriptor[descriptor]
            for _ in range(64):  # then the next link has its turn
                try:
                    packet = os.read(descriptor, PACKET_BYTES)
                except BlockingIOError:
                    break
                now, target = time.perf_counter(), links.get(packet[16:20])
                queued = max(0.0, source["free"] - now)
                is_ipv4 = packet[0] >> 4 == 4
                if not is_ipv4 or not target or target["group"] != source["group"] or queued > source["queue_ms"] / 1e3:
                    continue
                source["free"] = now + queued + len(packet) * BYTE_BITS / BITS_PER_MEGABIT / source["up"]
                if random.random() >= source["loss"] and random.random() >= target["loss"]:
                    number += 1
                    arrival = source["free"] + (source["rtt_ms"] + target["rtt_ms"]) / 2e3
                    heapq.heappush(waiting, (arrival, number, packet, target, True))
        while waiting and waiting[0][0] <= time.perf_counter():
            arrival, _, packet, target, is_entering = heapq.heappop(waiting)
            queued = max(0.0, target["free_in"] - arrival)
            if not is_entering:
                with contextlib.suppress(OSError):
                    os.write(target["descriptor"], packet)
            elif queued <= target["queue_ms"] / 1e3:
                number += 1
                target["free_in"] = arrival + queued + len(packet) * BYTE_BITS / BITS_PER_MEGABIT / target["down"]
                heapq.heappush(waiting, (target["free_in"], number, packet, target, False))


if __name__ == "__main__" and sys.argv[1:] == ["fabric"]:
    run_fabric()
