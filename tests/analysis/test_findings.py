"""Every problem of a machine has a finding with its measurement and a fix; healthy machines have none."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from examinations import CONTENTION, GB, LINK, MB, NEEDS, all_reduce, examination, on_two_hosts, pair, rank_info
from paceline.analysis.findings import Finding, findings, problems
from paceline.analysis.findings.link import all_reduce_s
from paceline.config import LaunchConfig
from paceline.formatting import seconds, size
from paceline.records.description import RecordedEmulation
from paceline.records.examination import Examination, MeasuredLinks, MeasuringCost


def only(found: Examination, topic: str, level: str) -> Finding:
    """Return the only finding of a topic that is not ok, and check its level."""
    (finding,) = [f for f in findings(found) if f.topic == topic and f.level != "ok"]
    assert finding.level == level, finding
    assert finding.fix
    assert finding.message.endswith((".", "?"))
    return finding


def test_healthy_machines_have_only_ok_findings() -> None:
    for found in (examination(), on_two_hosts()):
        levels = {finding.level for finding in findings(found)}
        assert levels == {"ok"}, [finding for finding in findings(found) if finding.level != "ok"]
        assert not problems(findings(found))


def test_every_topic_is_reported() -> None:
    topics = {finding.topic for finding in findings(on_two_hosts())}
    assert topics >= {
        "network",
        "ports",
        "clocks",
        "cores",
        "memory",
        "disk",
        "versions",
        "devices",
        "link",
        "workload",
    }


def test_too_many_ranks_for_the_cores() -> None:
    found = only(examination(*[rank_info(rank) for rank in range(4)], workload=None), "cores", "problem")
    assert "4 ranks with 1 thread each share 2 usable cores of node0" in found.message
    assert "--ranks 2" in found.fix


def test_too_many_threads_for_the_cores() -> None:
    found = only(
        examination(*[rank_info(rank, threads=8, cores=8.0, cpu_count=8) for rank in range(2)]), "cores", "problem"
    )
    assert "2 ranks with 8 threads each share 8 usable cores" in found.message
    assert "--threads 4" in found.fix


def test_emulated_hosts_share_the_cores_of_their_machine() -> None:
    ranks = [rank_info(rank, host, boot_id="one") for rank, host in enumerate([0, 0, 1, 1])]
    assert "4 ranks" in only(examination(*ranks, workload=None), "cores", "problem").message
    separate = [replace(rank, cores=1.0, affinity=1, threads=1) for rank in (ranks[0], replace(ranks[2], rank=1))]
    assert not problems(findings(examination(*separate)))


@pytest.mark.parametrize(
    ("hosts", "each", "cores", "options"),
    [
        (1, 4, 2, "--ranks 2 --threads 1"),
        (2, 2, 2, "--ranks-per-host 1 --threads 1"),
        (3, 1, 2, "--host-cpus 0.66, emulate at most 2 hosts"),
        (3, 2, 8, None),
    ],
)
def test_advice_on_emulated_hosts_fits_their_number(hosts: int, each: int, cores: int, options: str | None) -> None:
    ranks = [
        rank_info(rank, rank // each, boot_id="one", cpu_count=cores, affinity=cores, cores=float(cores))
        for rank in range(hosts * each)
    ]
    emulated = RecordedEmulation(spec=str(hosts), host_cpus=None)
    found = problems(findings(examination(*ranks, workload=None, emulated=emulated)))
    assert len(found) == (options is not None)
    for finding in found:
        assert options is not None
        assert options in finding.fix
        proposed = re.search(r"--ranks (\d+)", finding.fix)
        LaunchConfig(emulate=str(hosts), ranks=int(proposed[1]) if proposed else None)  # Raises if it does not divide.
        where = "node0" if hosts == 1 else "one machine"
        assert f"{hosts * each} ranks with 1 thread each share {cores} usable cores of {where}" in finding.message


def test_the_cpu_quota_of_an_emulated_host_is_no_limit_to_raise() -> None:
    halves = [rank_info(rank, rank // 2, boot_id="one", cores=0.5, cpu_quota=0.5) for rank in range(4)]
    emulated = RecordedEmulation(spec="2", host_cpus=0.5)
    found = only(examination(*halves, workload=None, emulated=emulated), "cores", "problem")
    assert "4 ranks" in found.message
    assert "container" not in found.fix


def test_emulated_hosts_with_a_cpu_quota_do_not_share_cores() -> None:
    halves = [
        rank_info(rank, rank, boot_id="one", cores=0.5, cpu_quota=0.5, affinity=2, threads=1) for rank in range(4)
    ]
    found = [f for f in findings(examination(*halves, workload=None)) if f.topic == "cores"]
    assert [f.message for f in found] == ["4 ranks with 1 thread each run on hosts with 0.5 cores each."]
    too_much = [replace(rank, cores=1.0, cpu_quota=1.0) for rank in halves]
    assert "4 ranks" in problems(findings(examination(*too_much, workload=None)))[0].message


def test_on_gpus_threads_do_not_count() -> None:
    gpu = {"device": "H200", "device_memory_bytes": 140 * GB, "device_free_bytes": 139 * GB}
    ranks = [rank_info(rank, device_index=rank, threads=16, **gpu) for rank in range(2)]
    assert not problems(findings(examination(*ranks)))


def test_a_machine_that_is_busy_with_other_things() -> None:
    found = only(examination(*[rank_info(rank, busy_cores=1.9) for rank in range(2)]), "cores", "note")
    assert found.message == (
        "Other programs use 1.9 of the 2 cores of node0, while the ranks need 2. "
        "Step times will be too long and vary between runs."
    )
    large = [rank_info(rank, busy_cores=1.9, cpu_count=8, affinity=2) for rank in range(2)]
    assert not [f for f in findings(examination(*large)) if f.message.startswith("Other programs")]


def test_idle_cores() -> None:
    found = only(examination(*[rank_info(rank, cores=8.0, cpu_count=8) for rank in range(2)]), "cores", "note")
    assert "2 ranks with 1 thread each use 2 of the 8 usable cores of node0; 6 cores are idle." in found.message
    assert "--threads 4" in found.fix


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"cpu_quota": 2.0, "affinity": 64}, "a cgroup quota of 2"),
        ({"cpu_quota": None, "affinity": 2}, "a CPU affinity of 2"),
    ],
)
def test_a_limit_below_the_cores_of_the_machine(changes: dict[str, Any], limit: str) -> None:
    found = only(examination(*[rank_info(rank, cpu_count=64, **changes) for rank in range(2)]), "cores", "note")
    assert found.message == f"node0 has 64 cores, but {limit} limits the ranks to 2."


def test_a_memory_that_is_too_small() -> None:
    small = [rank_info(rank, memory_available_bytes=150 * MB, memory_limit_bytes=512 * MB) for rank in range(2)]
    found = only(examination(*small), "memory", "problem")
    assert "needs up to 400.00 MB per rank; training adds 200.00 MB over all ranks, and" in found.message
    assert "150.00 MB of memory is free on node0 under a cgroup limit of 512.00 MB" in found.message
    assert "--batch" in found.fix
    tight = [replace(rank, memory_available_bytes=220 * MB) for rank in small]
    assert only(examination(*tight), "memory", "note")


def test_emulated_hosts_share_the_memory_of_their_machine() -> None:
    ranks = [rank_info(0, 0, boot_id="one"), rank_info(1, 1, boot_id="one", memory_available_bytes=150 * MB)]
    assert only(examination(*ranks, link=on_two_hosts().link), "memory", "problem")


def test_gpus_without_readings_are_named_with_the_reason() -> None:
    gpu = {"device": "H200", "device_memory_bytes": 140 * GB, "device_free_bytes": 139 * GB}
    missing = "the package nvidia-ml-py is not installed"
    ranks = [rank_info(rank, device_index=rank, without_gpu_readings=missing, **gpu) for rank in range(2)]
    (found,) = [one for one in findings(examination(*ranks)) if "Utilisation and power" in one.message]
    assert (found.level, found.fix) == ("note", "pip install nvidia-ml-py")
    assert found.message.endswith(f"are not recorded on ranks 0–1: {missing}.")


def test_a_gpu_that_is_too_small() -> None:
    gpu = {"device": "T4", "device_memory_bytes": 16 * GB, "device_free_bytes": 15 * GB}
    ranks = [rank_info(rank, device_index=0, **gpu) for rank in range(2)]
    needs = replace(NEEDS, peak_bytes=[8 * GB, 8 * GB])
    found = only(examination(*ranks, workload=needs), "memory", "problem")
    assert "needs up to 16.00 GB for tensors" in found.message
    assert "15.00 GB of 16.00 GB is free on T4 0 of node0" in found.message
    own = [replace(rank, backend="nccl") for rank in ranks]  # Each rank sees only its own GPU.
    assert not [f for f in findings(examination(*own, workload=needs)) if (f.topic, f.level) == ("memory", "problem")]


def test_versions_that_differ_name_the_ranks() -> None:
    other = rank_info(0).versions | {"torch": "2.11.0"}
    found = only(on_two_hosts(versions=other), "versions", "problem")
    assert found.message == (
        "Ranks have different versions of torch: 2.13.0 on ranks 0–1, 2.11.0 on ranks 2–3. "
        "They may hang or compute different results."
    )
    assert "install the same version of torch on node0 and node1" in found.fix
    missing = examination(rank_info(0), rank_info(1, versions=rank_info(0).versions | {"numpy": None}))
    assert "missing on rank 1 (node0)" in only(missing, "versions", "problem").message


def test_a_host_name_on_the_loopback_address() -> None:
    found = only(on_two_hosts(host_name_addresses=["127.0.1.1"]), "network", "note")
    assert "The host name node1 resolves to 127.0.1.1, which other hosts cannot reach." in found.message
    assert "GLOO_SOCKET_IFNAME" in found.fix
    assert "does not resolve" in only(on_two_hosts(host_name_addresses=[]), "network", "note").message


def test_an_interface_that_peers_cannot_reach() -> None:
    found = only(on_two_hosts(interface="lo", address="127.0.0.1"), "network", "problem")
    assert found.message == "node1 sends through lo (127.0.0.1), which other hosts cannot reach."
    assert "--iface" in found.fix


def test_hosts_of_the_same_name_are_numbered_and_their_name_is_reported_once() -> None:
    found = findings(on_two_hosts(host_name="node0", host_name_addresses=["127.0.1.1"]))
    network = [f.message for f in found if f.topic == "network"]
    assert network[:2] == [
        "node0 (host 0) sends through eth0 (198.18.0.1).",
        "node0 (host 1) sends through eth0 (198.18.0.2).",
    ]
    assert len(network) <= 3


def test_on_one_host_the_loopback_interface_is_the_right_one() -> None:
    alone = {"interface": "lo", "address": "127.0.0.1"}
    assert not problems(findings(examination(rank_info(0, **alone), rank_info(1, **alone))))


def test_a_port_that_cannot_be_opened() -> None:
    closed = examination(rank_info(0), rank_info(1, bind_error="Permission denied"))
    assert only(closed, "ports", "problem").message == "Rank 1 cannot open a port on 198.18.0.1: Permission denied."


@pytest.mark.parametrize(("apart_s", "level"), [(5.0, "problem"), (-5.0, "problem"), (0.2, "note")])
def test_clocks_that_are_apart(apart_s: float, level: str) -> None:
    found = only(on_two_hosts(clock_offset_s=apart_s, clock_error_s=2e-4), "clocks", level)
    ahead = "ahead of" if apart_s > 0 else "behind"
    assert f"The clock of node1 is {seconds(abs(apart_s))} {ahead} that of node0 (± 200 µs)" in found.message
    assert "NTP" in found.fix


def test_clocks_that_agree() -> None:
    (found,) = [f for f in findings(on_two_hosts(clock_offset_s=3e-4, clock_error_s=2e-4)) if f.topic == "clocks"]
    assert found.level == "ok"
    assert "300 µs" in found.message


@pytest.mark.parametrize(("free", "level"), [(5 * MB, "problem"), (500 * MB, "note")])
def test_a_full_disk(free: int, level: str) -> None:
    found = only(on_two_hosts(disk_free_bytes=free), "disk", level)
    assert found.message == f"{size(free)} of disk space is free on node1 for records in /data/runs."
    assert "--out" in found.fix


def test_devices_and_backends_that_differ() -> None:
    found = [f for f in findings(on_two_hosts(device="H200", backend="nccl")) if f.topic == "devices"]
    assert [f.level for f in found] == ["problem", "note"]
    assert "gloo on ranks 0–1, nccl on ranks 2–3" in found[0].message
    assert "cpu on ranks 0–1, H200 on ranks 2–3" in found[1].message


def test_one_rank_has_no_link() -> None:
    needs = replace(NEEDS, workers=1, peak_bytes=[400 * MB])
    alone = examination(rank_info(0, threads=2), link=None, contention=None, workload=needs)
    assert "one rank" in only(alone, "link", "note").message
    assert not problems(findings(alone))


def test_a_slow_network() -> None:
    slow = pair(0, 2, (0, 1), rate=1.2e7)
    link = replace(on_two_hosts().link or LINK, pairs=[pair(0, 1), slow])
    found = only(replace(on_two_hosts(), link=link), "link", "note")
    assert "Between hosts, latency is 50 µs and bandwidth is 12.00 MB/s from rank 0 to rank 2." in found.message
    assert "slower than a 1 Gbit/s network" in found.message


def emulated_links(spec: str, rates: dict[tuple[int, int], float]) -> list[Finding]:
    """Return the findings on links between emulated hosts with one rank each."""
    hosts = max(map(max, rates)) + 1
    link = MeasuredLinks(
        [pair(*ranks, ranks, rate=rate) for ranks, rate in rates.items()],
        [all_reduce([*range(hosts)], [*range(hosts)], 1e7)],
    )
    ranks = [rank_info(rank, rank, boot_id="one", cores=8.0, cpu_count=8, threads=2) for rank in range(hosts)]
    emulated = RecordedEmulation(spec=spec, host_cpus=None)
    found = findings(examination(*ranks, link=link, workload=None, emulated=emulated))
    return [finding for finding in found if finding.topic == "link" and not finding.message.startswith("An all-reduce")]


def test_a_rate_that_was_asked_for_is_as_expected() -> None:
    (found,) = emulated_links("3@500mbit", {(0, 1): 59e6, (0, 2): 58e6, (1, 2): 59e6})
    assert (found.level, found.fix) == ("ok", "")
    asked = "500 Mbit/s (59.78 MB/s without headers) that --emulate sets."
    assert found.message.endswith(f"58.00 MB/s from rank 0 to rank 2, which is 97% of the {asked}")
    different = emulated_links("2@1gbit,1@100mbit", {(0, 1): 118e6, (0, 2): 11.8e6, (1, 2): 11.9e6})
    assert [finding.level for finding in different] == ["ok", "ok"], "neither slow nor uneven"


def test_a_rate_that_is_clearly_missed() -> None:
    (found,) = emulated_links("2@500mbit", {(0, 1): 29.9e6})
    assert found.level == "note"
    assert found.message.endswith("only 50% of the 500 Mbit/s (59.78 MB/s without headers) that --emulate sets.")
    assert "--iface" not in found.fix, "--emulate does not accept it"
    assert "set a lower rate" in found.fix
    (unlimited,) = emulated_links("2", {(0, 1): 29.9e6})
    assert (unlimited.level, "--iface" in unlimited.fix) == ("note", False)


def test_links_that_differ() -> None:
    link = MeasuredLinks([pair(0, 1, rate=2e9), pair(0, 2, rate=5e8)], [all_reduce([0, 1, 2], [0])])
    ranks = [rank_info(rank, cores=4.0, cpu_count=4) for rank in range(3)]
    found = only(examination(*ranks, link=link, workload=None), "link", "note")
    assert found.message == (
        "Within a host, the fastest link has 4.00× the bandwidth of the slowest: 2.00 GB/s from rank 0 to rank 1, "
        "but 500.00 MB/s from rank 0 to rank 2. The slowest link limits every all-reduce."
    )


def test_an_all_reduce_is_compared_with_the_slowest_link() -> None:
    (found,) = [f for f in findings(on_two_hosts()) if f.message.startswith("An all-reduce of 64 MiB over 4 ranks")]
    assert (
        "a bus bandwidth of 499.75 MB/s: 50% of the bandwidth of the slowest link, 1.00 GB/s from rank 0 to rank 2."
    ) in found.message


def test_small_sizes_that_buffers_speed_up_do_not_count_as_bandwidth() -> None:
    measured = all_reduce([0, 1], [0], rate=1e8)
    buffered = replace(measured.points[2], busbw_bytes_per_s=1e9)
    points = [*measured.points[:2], buffered, *measured.points[3:]]
    assert replace(measured, points=points).best == measured.points[-1]
    assert replace(measured, points=points[:4]).best == points[3]


def test_contention() -> None:
    slowed = replace(CONTENTION, matmul_contended_s=0.004)
    found = only(examination(contention=slowed), "contention", "note")
    assert "compute takes 2.00× as long as alone, and an all-reduce 1.50× as long" in found.message
    assert found.fix == "leave a core free for communication: use fewer ranks per host"
    threads = [rank_info(rank, threads=2, cores=4.0, cpu_count=4) for rank in range(2)]
    assert (
        "use fewer --threads or fewer ranks per host"
        in only(examination(*threads, contention=slowed), "contention", "note").fix
    )
    alone = examination(rank_info(0, cores=1.0), rank_info(1, 1, cores=1.0), contention=slowed)
    assert "use hosts with more cores" in only(alone, "contention", "note").fix
    shared = examination(rank_info(0, boot_id="one"), rank_info(1, 1, boot_id="one"), contention=slowed)
    assert "use fewer hosts on one machine" in only(shared, "contention", "note").fix


def test_a_workload_limited_by_communication() -> None:
    heavy = replace(NEEDS, gradient_bytes=64 << 20, step_s=0.1)
    found = only(examination(workload=heavy), "workload", "note")
    assert "takes 67.21 ms, which is 67% of a step if nothing overlaps." in found.message
    assert "--batch" in found.fix


def test_a_workload_that_failed() -> None:
    failed = examination(workload=None, failure="rank 1 was ended by SIGKILL.", failure_hint="it may be out of memory")
    found = only(failed, "workload", "problem")
    assert found.message == "Training the workload failed: rank 1 was ended by SIGKILL."
    assert found.fix == "it may be out of memory"


def test_all_reduce_times_between_and_beyond_measured_sizes() -> None:
    measured = all_reduce([0, 1], [0], rate=1e9)
    small, large = measured.points[0], measured.points[-1]
    assert all_reduce_s(measured, 1) == small.time_s
    assert all_reduce_s(measured, large.bytes) == large.time_s
    assert all_reduce_s(measured, 10 * MB) == pytest.approx(1e-4 + 10 * MB / 1e9)
    assert all_reduce_s(measured, 2 * large.bytes) == 2 * large.time_s


def cost(low: float, high: float) -> Examination:
    middle = (low + high) / 2
    values = {"workload": "cnn", "strategy": "ddp", "pairs": 20, "steps": 4, "step_cpu_s": 0.02}
    return examination(measuring_cost=MeasuringCost(share=middle, low=low, high=high, **values))


@pytest.mark.parametrize(("low", "high"), [(-0.01, 0.01), (0.029, 0.06)])
def test_a_measuring_cost_that_may_be_low_is_ok(low: float, high: float) -> None:
    (found,) = [finding for finding in findings(cost(low, high)) if finding.topic == "measuring"]
    assert found.level == "ok"
    assert "The interval is wide" not in found.message


def test_a_measuring_cost_whose_interval_contains_zero_is_not_measurable() -> None:
    (found,) = [finding for finding in findings(cost(-0.014, 0.01)) if finding.topic == "measuring"]
    assert found.message == (
        "Collecting events has no measurable cost: −0.2% (−1.4 to 1.0%) of the CPU time of a step (20.00 ms per rank)."
    )


def test_a_high_measuring_cost() -> None:
    found = only(cost(0.031, 0.06), "measuring", "note")
    assert "Collecting events adds 4.5% (3.1 to 6.0%) to the CPU time of a step, which is 20.00 ms" in found.message
    assert "--no-events" in found.fix


@pytest.mark.parametrize(("low", "high", "level"), [(-0.06, 0.05, "ok"), (0.04, 0.15, "note")])
def test_an_imprecise_measuring_cost(low: float, high: float, level: str) -> None:
    (found,) = [finding for finding in findings(cost(low, high)) if finding.topic == "measuring"]
    assert found.level == level
    assert "The interval is wide" in found.message


@pytest.mark.parametrize(
    ("rates", "precision", "is_chosen", "level"),
    [
        ([2e11, 3e11], "fp32", False, "note"),
        ([2e11, 3e11], "fp32", True, "ok"),
        ([2e11, 3e11], "bf16", False, "ok"),
        ([2e11, 1.1e11], "fp32", False, "ok"),
        ([2e11, None], "fp32", False, "ok"),
    ],
)
def test_bf16_is_offered_where_every_rank_is_faster_in_it(
    rates: list[float | None], precision: str, is_chosen: bool, level: str
) -> None:
    ranks = [
        rank_info(number, has_bf16=rate is not None, fp32_flop_per_s=1e11, bf16_flop_per_s=rate)
        for number, rate in enumerate(rates)
    ]
    needs = replace(NEEDS, precision=precision, is_precision_chosen=is_chosen)
    (found,) = [one for one in findings(examination(*ranks, workload=needs)) if one.topic == "precision"]
    assert (found.level, "--precision auto" in found.fix) == (level, level == "note")
    assert ("2.00×" in found.message) == (rates == [2e11, 3e11])
