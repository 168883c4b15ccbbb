"""What the facts of the ranks' machines mean: network, ports, clocks, cores, memory, disk, versions, devices."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from paceline.analysis.findings.finding import Finding, Level, count, duration, ranks_by, ranks_in_words, size, trained
from paceline.records.examination import Examination, RankInfo, WorkloadNeeds

CLOCKS_APART_S = 1.0
CLOCKS_DRIFTING_S = 0.05
"""What a host that keeps time by NTP stays well below."""
BUSY_CORES = 0.25
"""What the system itself may take."""
MEMORY_TIGHT = 0.8
DISK_FULL_BYTES, DISK_TIGHT_BYTES = 1e8, 1e9


def machine_findings(examination: Examination) -> Iterator[Finding]:
    """In the order of the checks."""
    for check in (_network, _ports, _clocks, _cores, _memory, _gpu_memory, _disk, _versions, _devices):
        yield from check(examination)


def _network(examination: Examination) -> Iterator[Finding]:
    several = len(examination.hosts) > 1
    for ranks in examination.hosts.values():
        first = ranks[0]
        where = f"{first.interface} ({first.address or 'no address'})"
        if several and (first.address is None or _is_loopback(first.address)):
            fix = "name the interface that leads to the other hosts with --iface, and a real address with --master"
            yield Finding(
                "problem", "network", f"{_host(first, examination)} sends by {where}, which others cannot reach.", fix
            )
        elif several:
            yield Finding("ok", "network", f"{_host(first, examination)} sends by {where}.")
        else:
            yield Finding("ok", "network", f"All ranks are on {first.host_name}: messages stay on {where}.")
    for ranks in ranks_by(examination.ranks, lambda rank: rank.host_name).values():
        yield from _host_name(ranks[0])


def _host_name(rank: RankInfo) -> Iterator[Finding]:
    """Software that does not choose an interface listens where the host's name leads to."""
    loopback = [address for address in rank.name_addresses if _is_loopback(address)]
    if not rank.name_addresses:
        what = f"The name {rank.host_name} does not resolve: programs that listen on it, as plain Gloo does, fail."
        yield Finding("note", "network", what, f"give {rank.host_name} its address in /etc/hosts")
    elif loopback:
        what = (
            f"The name {rank.host_name} resolves to {loopback[0]}, where no other host can reach it: programs that "
            "listen on their host's name, as plain Gloo does, hang on several hosts. "
            f"Paceline chooses the interface itself: {rank.interface}."
        )
        fix = f"for other programs set GLOO_SOCKET_IFNAME, or give {rank.host_name} its real address in /etc/hosts"
        yield Finding("note", "network", what, fix)


def _ports(examination: Examination) -> Iterator[Finding]:
    closed = [rank for rank in examination.ranks if rank.bind_error is not None]
    for rank in closed:
        what = f"Rank {rank.rank} can have no port on {rank.address or rank.interface}: {rank.bind_error}."
        yield Finding("problem", "ports", what, "allow this user to listen there, or name another --iface")
    if not closed and len(examination.hosts) > 1:
        yield Finding(
            "ok", "ports", f"Ports can be had on all {len(examination.hosts)} hosts, and reached from others."
        )
    elif not closed:
        yield Finding("ok", "ports", f"Ports can be had on {examination.ranks[0].address}.")


def _clocks(examination: Examination) -> Iterator[Finding]:
    if len({rank.boot_id for rank in examination.ranks}) == 1:
        yield Finding("ok", "clocks", "All ranks read the same clock.")
        return
    worst = max(examination.ranks, key=lambda rank: abs(rank.clock_offset_s))
    apart, ahead = abs(worst.clock_offset_s), "ahead of" if worst.clock_offset_s > 0 else "behind"
    what = (
        f"The clock of {worst.host_name} is {duration(apart)} {ahead} that of {examination.ranks[0].host_name} "
        f"(± {duration(worst.clock_error_s)})."
    )
    fix = "have all hosts keep time by NTP (chrony, systemd-timesyncd)"
    if apart >= CLOCKS_APART_S:
        yield Finding("problem", "clocks", what + " Logs and certificates of the hosts do not agree on the time.", fix)
    elif apart >= CLOCKS_DRIFTING_S:
        yield Finding("note", "clocks", what + " Paceline's own times are corrected for it.", fix)
    else:
        yield Finding("ok", "clocks", what)


def _cores(examination: Examination) -> Iterator[Finding]:
    for ranks in _machines(examination):
        first = ranks[0]
        limit = min(first.cpu_count, sum({rank.host: rank.cores for rank in ranks}.values()))
        if not _have_shares(ranks):
            yield from _core_limits(first)
        if first.device != "cpu":
            continue
        threads = sum(rank.threads for rank in ranks)
        taken = f"{count(len(ranks), 'rank')} with {count(first.threads, 'thread')} each"
        where = f"on {limit:g} usable core{'' if limit == 1 else 's'} of {first.host_name}"
        if _have_shares(ranks):
            yield Finding("ok", "cores", f"{taken}, on hosts that have {first.cores:g} cores each for themselves.")
        elif threads > limit:
            what = f"{taken} {where}: they wait for each other's turn, and times say nothing about more machines."
            most = max(1, int(limit))
            fewer = f"use --ranks {most} --threads 1" if len(ranks) >= most else f"use --threads {most // len(ranks)}"
            yield Finding("problem", "cores", what, f"{fewer}, or more cores")
        elif int(limit) - threads >= len(ranks):
            spare = int(limit) // len(ranks)
            what = f"{taken} {where}: {count(int(limit) - threads, 'core')} stay idle."
            yield Finding("note", "cores", what, f"leave --threads out, or use --threads {spare}")
        else:
            yield Finding("ok", "cores", f"{taken} {where}.")
        yield from _busy(ranks, min(threads, limit))


def _have_shares(ranks: Sequence[RankInfo]) -> bool:
    """Whether each of several hosts on one machine has cores for itself, if only a part of one, and a thread on it."""
    hosts = {rank.host: rank.cores for rank in ranks}
    fits = all(sum(rank.threads for rank in ranks if rank.host == host) <= max(1.0, own) for host, own in hosts.items())
    shared_out = all(rank.cores < rank.affinity for rank in ranks) and sum(hosts.values()) <= ranks[0].cpu_count
    return len(hosts) > 1 and shared_out and fits


def _busy(ranks: Sequence[RankInfo], wanted: float) -> Iterator[Finding]:
    first, busy = ranks[0], statistics.median(rank.busy_cores for rank in ranks)
    if wanted > first.cpu_count - busy + BUSY_CORES:
        what = f"Other programs take {busy:.1f} of the {count(first.cpu_count, 'core')} of {first.host_name}"
        fix = "end them or wait, else times are too long and differ from run to run"
        yield Finding("note", "cores", f"{what}, where the ranks want {wanted:g}.", fix)


def _core_limits(rank: RankInfo) -> Iterator[Finding]:
    if rank.cores < rank.cpu_count:
        by_quota = rank.cpu_quota is not None and rank.cpu_quota < rank.affinity
        why = f"its cgroup allows {rank.cpu_quota:g}" if by_quota else f"its affinity leaves {rank.affinity}"
        what = f"{rank.host_name} has {count(rank.cpu_count, 'core')}, but {why}."
        fix = "raise the container's or job's limit" if by_quota else "ask the scheduler, or taskset, for more"
        yield Finding("note", "cores", what, f"{fix}, if that was not meant")


def _memory(examination: Examination) -> Iterator[Finding]:
    needs = examination.workload
    for ranks in _machines(examination):
        first = ranks[0]
        free = min(rank.memory_available_bytes for rank in ranks)
        limits = [rank.memory_limit_bytes for rank in ranks if rank.memory_limit_bytes is not None]
        limit = f" under a cgroup limit of {size(min(limits))}" if limits else ""
        have = f"{size(free)} of memory are free on {first.host_name}{limit}"
        peaks = [(rank, peak) for rank in ranks if (peak := _peak(needs, rank)) is not None]
        if needs is None or first.device != "cpu" or not peaks:
            yield Finding("ok", "memory", f"{have}.")
            continue
        growth = sum(max(0, peak - rank.resident_bytes) for rank, peak in peaks)
        most = max(peak for _, peak in peaks)
        more = f"over all ranks {size(growth)} more than before"
        what = f"{trained(needs)} takes {size(most)} per rank at its peak, {more}; {have}."
        yield Finding(*_fits(growth, free, "memory"), what, _less_memory(growth, free))


def _gpu_memory(examination: Examination) -> Iterator[Finding]:
    needs = examination.workload
    by_gpu: dict[tuple[int, int, int], list[RankInfo]] = {}
    for rank in examination.ranks:
        if rank.device_index is not None:
            # With NCCL each has its own, and calls it 0 where a launcher shows it no other.
            own = rank.rank if rank.backend == "nccl" else 0
            by_gpu.setdefault((rank.host, rank.device_index, own), []).append(rank)
    for ranks in by_gpu.values():
        first = ranks[0]
        free, total = first.device_free_bytes or 0, first.device_memory_bytes or 0
        gpu = f"{first.device} {first.device_index} of {first.host_name}"
        have = f"{size(free)} of {size(total)} are free on {gpu}"
        peak = sum(_peak(needs, rank) or 0 for rank in ranks)
        if needs is None or not peak:
            yield Finding("ok", "memory", f"{have}.")
            continue
        what = f"{trained(needs)} takes {size(peak)} of tensors at its peak; {have}."
        yield Finding(*_fits(peak, free, "memory"), what, _less_memory(peak, free))


def _fits(need: float, free: float, topic: str) -> tuple[Level, str]:
    return "problem" if need > free else "note" if need > MEMORY_TIGHT * free else "ok", topic


def _less_memory(need: float, free: float) -> str:
    return "use a smaller --batch, --accumulate 2, or fewer ranks per host" if need > MEMORY_TIGHT * free else ""


def _disk(examination: Examination) -> Iterator[Finding]:
    for ranks in examination.hosts.values():
        first = ranks[0]
        what = (
            f"{size(first.disk_free_bytes)} are free on {_host(first, examination)} where records go, {first.folder}."
        )
        fix = "make room, or put records elsewhere with --out"
        if first.disk_free_bytes < DISK_FULL_BYTES:
            yield Finding("problem", "disk", what, fix)
        elif first.disk_free_bytes < DISK_TIGHT_BYTES:
            yield Finding("note", "disk", what, fix)
        else:
            yield Finding("ok", "disk", what)


def _versions(examination: Examination) -> Iterator[Finding]:
    names = list(dict.fromkeys(name for rank in examination.ranks for name in rank.versions))
    same = []
    for name in names:
        by_version = ranks_by(examination.ranks, lambda rank, name=name: rank.versions.get(name) or "missing")  # type: ignore[misc]
        if len(by_version) == 1:
            same.append(f"{name} {next(iter(by_version))}")
            continue
        found = ", ".join(f"{version} on {ranks_in_words(ranks)}" for version, ranks in by_version.items())
        hosts = " and ".join(sorted({rank.host_name for rank in examination.ranks}))
        fix = f"install the same {name} on {hosts}: ranks of different versions may hang, or compute something else"
        yield Finding("problem", "versions", f"{name} is not the same on all ranks: {found}.", fix)
    if same:
        yield Finding("ok", "versions", f"The same on all ranks: {', '.join(same)}.")


def _devices(examination: Examination) -> Iterator[Finding]:
    backends = ranks_by(examination.ranks, lambda rank: rank.backend)
    if len(backends) > 1:
        found = ", ".join(f"{backend} on {ranks_in_words(ranks)}" for backend, ranks in backends.items())
        yield Finding(
            "problem", "devices", f"Ranks would not understand each other: {found}.", "give the same --backend"
        )
    devices = ranks_by(examination.ranks, lambda rank: rank.device)
    if len(devices) > 1:
        found = ", ".join(f"{device} on {ranks_in_words(ranks)}" for device, ranks in devices.items())
        fix = "in a synchronous run all ranks go at the pace of the slowest: use equal devices"
        yield Finding("note", "devices", f"Devices differ: {found}.", fix)
    else:
        (device,) = devices
        yield Finding(
            "ok", "devices", f"{count(len(examination.ranks), 'rank')} on {device}, by {next(iter(backends))}."
        )


def _host(rank: RankInfo, examination: Examination) -> str:
    """A host by name, and by number where hosts are called the same: emulated ones are."""
    names = [ranks[0].host_name for ranks in examination.hosts.values()]
    return rank.host_name if names.count(rank.host_name) == 1 else f"{rank.host_name} (host {rank.host})"


def _machines(examination: Examination) -> list[list[RankInfo]]:
    """The ranks by machine: emulated hosts share the cores and the memory of one."""
    return list(ranks_by(examination.ranks, lambda rank: rank.boot_id).values())


def _peak(needs: WorkloadNeeds | None, rank: RankInfo) -> int | None:
    return None if needs is None else needs.peak_bytes[rank.rank]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
