"""Findings on the ranks' machines: network, ports, clocks, cores, memory, disk, versions, devices, precision."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from paceline.analysis.core_sharing import is_over_subscribed
from paceline.analysis.findings.finding import Finding, Level, format_ranks, format_workload, ranks_by
from paceline.formatting import FACTOR, TENTHS, core_count, format_cores, join_names, plural, seconds, size
from paceline.records.examination import Examination, RankInfo, WorkloadNeeds

CLOCK_PROBLEM_S = 1.0
"""Clock offset between hosts that is reported as a problem."""
CLOCK_NOTE_S = 0.05
"""Clock offset that an NTP-synchronised host stays well below."""
BUSY_CORES = 0.25
"""Cores that the system itself may use."""
MEMORY_TIGHT = 0.8
"""Share of the free memory above which the need of a workload is reported as a note."""
DISK_FULL_BYTES, DISK_TIGHT_BYTES = 1e8, 1e9
"""Free disk space below which a problem or a note is reported."""

BF16_FASTER = 1.2
"""Least ratio of the speeds of matrix products at which bf16 is offered."""


def machine_findings(examination: Examination) -> Iterator[Finding]:
    """Yield the findings in the order of the checks."""
    for check in (
        _network,
        _ports,
        _clocks,
        _cores,
        _memory,
        _gpu_memory,
        _gpu_readings,
        _disk,
        _versions,
        _devices,
        _precision,
    ):
        yield from check(examination)


def _network(examination: Examination) -> Iterator[Finding]:
    several = len(examination.hosts) > 1
    for ranks in examination.hosts.values():
        first = ranks[0]
        where = f"{first.interface} ({first.address or 'no address'})"
        if several and (first.address is None or _is_loopback(first.address)):
            message = f"{_host(first, examination)} sends through {where}, which other hosts cannot reach."
            fix = (
                "name the interface that connects the hosts with --iface, and an address on that network with --master"
            )
            yield Finding("problem", "network", message, fix)
        elif several:
            yield Finding("ok", "network", f"{_host(first, examination)} sends through {where}.")
        else:
            yield Finding("ok", "network", f"All ranks are on {first.host_name}; messages stay on {where}.")
    for ranks in ranks_by(examination.ranks, lambda rank: rank.host_name).values():
        yield from _host_name(ranks[0])


def _host_name(rank: RankInfo) -> Iterator[Finding]:
    """Check the addresses of the host name: software that does not choose an interface listens on them."""
    loopback = [address for address in rank.host_name_addresses if _is_loopback(address)]
    if not rank.host_name_addresses:
        message = (
            f"The host name {rank.host_name} does not resolve. Programs that listen on their host name, such as plain "
            f"Gloo, fail; Paceline does not, since it uses the interface {rank.interface}."
        )
        yield Finding("note", "network", message, f"for other programs, add {rank.host_name} to /etc/hosts")
    elif loopback:
        message = (
            f"The host name {rank.host_name} resolves to {loopback[0]}, which other hosts cannot reach. Programs that "
            "listen on their host name, such as plain Gloo, hang on several hosts; Paceline does not, since it uses "
            f"the interface {rank.interface}."
        )
        fix = f"for other programs, set GLOO_SOCKET_IFNAME or give {rank.host_name} its real address in /etc/hosts"
        yield Finding("note", "network", message, fix)


def _ports(examination: Examination) -> Iterator[Finding]:
    closed = [rank for rank in examination.ranks if rank.bind_error is not None]
    for rank in closed:
        message = f"Rank {rank.rank} cannot open a port on {rank.address or rank.interface}: {rank.bind_error}."
        yield Finding("problem", "ports", message, "allow this user to listen there, or name another --iface")
    if not closed and len(examination.hosts) > 1:
        yield Finding(
            "ok", "ports", f"Ranks can open ports on all {len(examination.hosts)} hosts, and other hosts reach them."
        )
    elif not closed:
        yield Finding("ok", "ports", f"Ranks can open ports on {examination.ranks[0].address}.")


def _clocks(examination: Examination) -> Iterator[Finding]:
    if len({rank.boot_id for rank in examination.ranks}) == 1:
        yield Finding("ok", "clocks", "All ranks use the same clock.")
        return
    worst = max(examination.ranks, key=lambda rank: abs(rank.clock_offset_s))
    offset_s, ahead = abs(worst.clock_offset_s), "ahead of" if worst.clock_offset_s > 0 else "behind"
    message = (
        f"The clock of {worst.host_name} is {seconds(offset_s)} {ahead} that of {examination.ranks[0].host_name} "
        f"(± {seconds(worst.clock_error_s)})."
    )
    fix = "synchronise the clocks of all hosts with NTP (chrony, systemd-timesyncd)"
    if offset_s >= CLOCK_PROBLEM_S:
        message += " Timestamps in logs do not match between hosts, and certificate checks may fail."
        yield Finding("problem", "clocks", message, fix)
    elif offset_s >= CLOCK_NOTE_S:
        yield Finding("note", "clocks", message + " Paceline corrects its own times for this offset.", fix)
    else:
        yield Finding("ok", "clocks", message)


def _cores(examination: Examination) -> Iterator[Finding]:
    for ranks in _machines(examination):
        first = ranks[0]
        limit = min(first.cpu_count, sum({rank.host: rank.cores for rank in ranks}.values()))
        asked_for = examination.emulated is not None and examination.emulated.host_cpus is not None
        if not asked_for and not _have_quotas(ranks):
            yield from _core_limits(first)
        if first.device != "cpu":
            continue
        threads = sum(rank.threads for rank in ranks)
        demand = f"{plural(len(ranks), 'rank')} with {plural(first.threads, 'thread')} each"
        where = first.host_name if len({rank.host for rank in ranks}) == 1 else "one machine"
        supply = f"{format_cores(limit, 'usable core')} of {where}"
        if _have_quotas(ranks):
            yield Finding("ok", "cores", f"{demand} run on hosts with {format_cores(first.cores)} each.")
        elif is_over_subscribed(threads, limit):
            message = f"{demand} share {supply}: they take turns, so times do not predict more machines."
            fix = f"{_fewer_threads(ranks, limit, examination)}, or use more cores"
            yield Finding("problem", "cores", message, fix)
        elif int(limit) - threads >= len(ranks):
            spare = int(limit) // len(ranks)
            idle = int(limit) - threads
            message = (
                f"{demand} use {threads} of the {supply}; {plural(idle, 'core')} {'is' if idle == 1 else 'are'} idle."
            )
            yield Finding("note", "cores", message, f"omit --threads, or use --threads {spare}")
        else:
            yield Finding("ok", "cores", f"{demand} run on {supply}.")
        yield from _busy(ranks, min(threads, limit))


def _fewer_threads(ranks: Sequence[RankInfo], limit: float, examination: Examination) -> str:
    """Return options that give each rank of a machine its own cores, and that fit the number of hosts."""
    most, hosts = max(1, int(limit)), len({rank.host for rank in ranks})
    if len(ranks) <= most:
        return f"use --threads {most // len(ranks)}"
    if most >= hosts:
        option = "--ranks" if len(examination.hosts) == 1 else "--ranks-per-host"
        return f"use {option} {most // hosts} --threads 1"
    if examination.emulated is None:
        return f"start at most {plural(most, 'host')} on one machine"
    share = core_count(math.floor(100 * limit / hosts) / 100)
    return f"give each host a fixed share with --host-cpus {share}, emulate at most {plural(most, 'host')}"


def _have_quotas(ranks: Sequence[RankInfo]) -> bool:
    """Return whether each of several emulated hosts has its own CPU quota that is enough for its threads."""
    hosts = {rank.host: rank.cores for rank in ranks}
    fits = all(
        sum(rank.threads for rank in ranks if rank.host == host) <= max(1.0, cores) for host, cores in hosts.items()
    )
    limited = all(rank.cores < rank.affinity for rank in ranks) and sum(hosts.values()) <= ranks[0].cpu_count
    return len(hosts) > 1 and limited and fits


def _busy(ranks: Sequence[RankInfo], wanted: float) -> Iterator[Finding]:
    first, busy = ranks[0], statistics.median(rank.busy_cores for rank in ranks)
    if wanted > first.cpu_count - busy + BUSY_CORES:
        message = (
            f"Other programs use {TENTHS.text(busy)} of the {plural(first.cpu_count, 'core')} of {first.host_name}, "
            f"while the ranks need {core_count(wanted)}. Step times will be too long and vary between runs."
        )
        yield Finding("note", "cores", message, "stop the other programs, or wait until they finish")


def _core_limits(rank: RankInfo) -> Iterator[Finding]:
    if rank.cores < rank.cpu_count:
        quota = math.inf if rank.cpu_quota is None else rank.cpu_quota
        by_quota = quota < rank.affinity
        limit = f"a cgroup quota of {core_count(quota)}" if by_quota else f"a CPU affinity of {rank.affinity}"
        message = (
            f"{rank.host_name} has {plural(rank.cpu_count, 'core')}, but {limit} limits the ranks to "
            f"{core_count(rank.cores)}."
        )
        fix = (
            "raise the CPU limit of the container or job"
            if by_quota
            else "request more cores from the scheduler or taskset"
        )
        yield Finding("note", "cores", message, f"{fix}, unless the limit is intended")


def _memory(examination: Examination) -> Iterator[Finding]:
    needs = examination.workload
    for ranks in _machines(examination):
        first = ranks[0]
        free = min(rank.memory_available_bytes for rank in ranks)
        limits = [rank.memory_limit_bytes for rank in ranks if rank.memory_limit_bytes is not None]
        limit = f" under a cgroup limit of {size(min(limits))}" if limits else ""
        available = f"{size(free)} of memory is free on {first.host_name}{limit}"
        peaks = [(rank, peak) for rank in ranks if (peak := _peak(needs, rank)) is not None]
        if needs is None or first.device != "cpu" or not peaks:
            yield Finding("ok", "memory", f"{available}.")
            continue
        growth = sum(max(0, peak - rank.resident_bytes) for rank, peak in peaks)
        most = max(peak for _, peak in peaks)
        message = (
            f"{format_workload(needs)} needs up to {size(most)} per rank; training adds {size(growth)} over all ranks, "
            f"and {available}."
        )
        yield Finding(*_fits(growth, free, "memory"), message, _memory_fix(growth, free, examination, ranks))


def _gpu_memory(examination: Examination) -> Iterator[Finding]:
    needs = examination.workload
    by_gpu: dict[tuple[int, int, int], list[RankInfo]] = {}
    for rank in examination.ranks:
        if rank.device_index is not None:
            # With NCCL every rank has a separate GPU, which has index 0 on all ranks if the launcher hides the others.
            separate = rank.rank if rank.backend == "nccl" else 0
            by_gpu.setdefault((rank.host, rank.device_index, separate), []).append(rank)
    for ranks in by_gpu.values():
        first = ranks[0]
        free, total = first.device_free_bytes or 0, first.device_memory_bytes or 0
        gpu = f"{first.device} {first.device_index} of {first.host_name}"
        available = f"{size(free)} of {size(total)} is free on {gpu}"
        peak = sum(_peak(needs, rank) or 0 for rank in ranks)
        if needs is None or not peak:
            yield Finding("ok", "memory", f"{available}.")
            continue
        message = f"{format_workload(needs)} needs up to {size(peak)} for tensors; {available}."
        yield Finding(*_fits(peak, free, "memory"), message, _memory_fix(peak, free, examination, ranks))


def _gpu_readings(examination: Examination) -> Iterator[Finding]:
    """Say where utilisation and power of GPUs are not recorded."""
    for reason, ranks in ranks_by(examination.ranks, lambda rank: rank.without_gpu_readings or "").items():
        if reason:
            message = f"Utilisation and power of the GPUs are not recorded on {format_ranks(ranks)}: {reason}."
            fix = "pip install nvidia-ml-py" if "not installed" in reason else ""
            yield Finding("note", "devices", message, fix)


def _fits(need: float, free: float, topic: str) -> tuple[Level, str]:
    return "problem" if need > free else "note" if need > MEMORY_TIGHT * free else "ok", topic


def _memory_fix(need: float, free: float, examination: Examination, ranks: Sequence[RankInfo]) -> str:
    """Return what reduces the memory of ranks that share it; empty if there is enough."""
    if need <= MEMORY_TIGHT * free:
        return ""
    hosts = len({rank.host for rank in ranks})
    fewer = "fewer ranks per host" if len(ranks) > hosts else "fewer hosts on this machine" if hosts > 1 else ""
    ways = [*_smaller_batch(examination.workload), *([fewer] if fewer else [])]
    return f"use {join_names(ways, 'or')}"


def _smaller_batch(needs: WorkloadNeeds | None) -> list[str]:
    """Return settings that reduce the memory of a step; a batch that the workload's data sets has no option."""
    smaller = "smaller batches in the workload" if needs is not None and needs.batch is None else "a smaller --batch"
    return [smaller, "--accumulate 2"]


def _disk(examination: Examination) -> Iterator[Finding]:
    for ranks in examination.hosts.values():
        first = ranks[0]
        free = size(first.disk_free_bytes)
        message = f"{free} of disk space is free on {_host(first, examination)} for records in {first.folder}."
        fix = "free disk space, or write records to another disk with --out"
        if first.disk_free_bytes < DISK_FULL_BYTES:
            yield Finding("problem", "disk", message, fix)
        elif first.disk_free_bytes < DISK_TIGHT_BYTES:
            yield Finding("note", "disk", message, fix)
        else:
            yield Finding("ok", "disk", message)


def _versions(examination: Examination) -> Iterator[Finding]:
    names = list(dict.fromkeys(name for rank in examination.ranks for name in rank.versions))
    same = []
    for name in names:
        by_version = ranks_by(examination.ranks, lambda rank, name=name: rank.versions.get(name) or "missing")  # type: ignore[misc]
        if len(by_version) == 1:
            same.append(f"{name} {next(iter(by_version))}")
            continue
        found = ", ".join(f"{version} on {format_ranks(ranks)}" for version, ranks in by_version.items())
        hosts = " and ".join(sorted({rank.host_name for rank in examination.ranks}))
        message = f"Ranks have different versions of {name}: {found}. They may hang or compute different results."
        yield Finding("problem", "versions", message, f"install the same version of {name} on {hosts}")
    if same:
        yield Finding("ok", "versions", f"All ranks have the same versions: {', '.join(same)}.")


def _devices(examination: Examination) -> Iterator[Finding]:
    backends = ranks_by(examination.ranks, lambda rank: rank.backend)
    if len(backends) > 1:
        found = ", ".join(f"{backend} on {format_ranks(ranks)}" for backend, ranks in backends.items())
        message = f"Ranks use different backends and cannot communicate: {found}."
        yield Finding("problem", "devices", message, "pass the same --backend on all hosts")
    devices = ranks_by(examination.ranks, lambda rank: rank.device)
    if len(devices) > 1:
        found = ", ".join(f"{device} on {format_ranks(ranks)}" for device, ranks in devices.items())
        message = f"Ranks have different devices: {found}. In a synchronous run all ranks wait for the slowest."
        fix = "use hosts with the same device" if len(examination.hosts) > 1 else "use devices of one kind"
        yield Finding("note", "devices", message, fix)
    else:
        (device,) = devices
        yield Finding(
            "ok", "devices", f"{plural(len(examination.ranks), 'rank')} on {device}, backend {next(iter(backends))}."
        )


def _precision(examination: Examination) -> Iterator[Finding]:
    """Offer bf16 where all processors are faster in it and the workload does not use it."""
    rates = [(rank.fp32_flop_per_s, rank.bf16_flop_per_s) for rank in examination.ranks]
    known = [(fp32, bf16) for fp32, bf16 in rates if fp32 is not None and bf16 is not None]
    if all(rank.has_bf16 is None for rank in examination.ranks):
        return
    if len(known) < len(rates):
        yield Finding("ok", "precision", "Not every rank's processor lists instructions for bf16; fp32 is faster.")
        return
    speedup = min(bf16 / fp32 for fp32, bf16 in known)
    message = f"Matrix products in bf16 are {FACTOR.text(speedup)} as fast as in fp32."
    needs = examination.workload
    is_fp32 = needs is not None and needs.precision == "fp32" and not needs.is_precision_chosen
    if speedup >= BF16_FASTER and is_fp32:
        fix = "use --precision auto, which measures this model and takes bf16 if it is faster"
        yield Finding("note", "precision", message, fix)
    else:
        yield Finding("ok", "precision", message)


def _host(rank: RankInfo, examination: Examination) -> str:
    """Return the name of a host, with its number if several hosts share the name, as emulated hosts do."""
    names = [ranks[0].host_name for ranks in examination.hosts.values()]
    return rank.host_name if names.count(rank.host_name) == 1 else f"{rank.host_name} (host {rank.host})"


def _machines(examination: Examination) -> list[list[RankInfo]]:
    """Group ranks by machine: emulated hosts share the cores and the memory of one machine."""
    return list(ranks_by(examination.ranks, lambda rank: rank.boot_id).values())


def _peak(needs: WorkloadNeeds | None, rank: RankInfo) -> int | None:
    return None if needs is None else needs.peak_bytes[rank.rank]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
