"""A Prometheus of this machine, and what is asked of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge, start_http_server

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "monitoring" / "prometheus.yml"
INSTALL = "there is no Prometheus; on Debian: apt-get install prometheus"


def promtool(*words: str) -> None:
    """Raises what it says."""
    program = shutil.which("promtool")
    if not program:
        pytest.skip(f"ALERTS ARE NOT TESTED: {INSTALL}")
    ran = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert not ran.returncode, ran.stdout + ran.stderr


class Prometheus:
    """Its HTTP API."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=f"http://{address}/api/v1", timeout=120, trust_env=False)

    def get(self, path: str, **params: Any) -> Any:
        """What is asked for.

        Raises:
            ValueError: Prometheus' own words on what is wrong with the query.
        """
        answer = self._client.get(path, params=params).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']}: {params}")
        return answer["data"]

    def num_scrapes(self) -> dict[str, int]:
        """How often each process has answered a scrape, by pod."""
        answer = self.get("/query", query='sum by (pod) (sum_over_time(up{rolemesh_job!=""}[1h]))')
        return {one["metric"]["pod"]: int(one["value"][1]) for one in answer["result"]}

    def series(self, selector: str) -> list[dict[str, str]]:
        """The labels of each series."""
        found: list[dict[str, str]] = self.get("/series", **{"match[]": selector})
        return found

    def over_time(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Each series' `metric` and `values`."""
        answer = self.get("/query_range", query=expr, start=start, end=end, step=step)
        result: list[dict[str, Any]] = answer["result"]
        return result


GPU_LABELS = ("gpu", "UUID", "Hostname", "namespace", "pod", "container")
GPU_VALUES = {"DCGM_FI_DEV_FB_USED": 1024.0, "DCGM_FI_DEV_GPU_UTIL": 50.0, "DCGM_FI_DEV_XID_ERRORS": 0.0}


class GpuExporter:
    """Metrics of DCGM's exporter that dashboards and alerts ask for: there is no GPU that it could watch."""

    def __init__(self, registry: CollectorRegistry, address: str) -> None:
        self._gauges = {name: Gauge(name, "of a GPU", GPU_LABELS, registry=registry) for name in GPU_VALUES}
        self.address = address

    def show(self, pods: Iterable[str]) -> None:
        """Show a GPU of each of the pods."""
        for number, pod in enumerate(sorted(pods)):
            labels = (str(number), f"GPU-{number}", "here", "local", pod, "roles")
            for name, value in GPU_VALUES.items():
                self._gauges[name].labels(*labels).set(value)


@contextmanager
def gpu_exporter() -> Iterator[GpuExporter]:
    """Serve a GpuExporter."""
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield GpuExporter(registry, f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def prometheus(directory: Path, targets: str, interval: str, gpus: str) -> Iterator[Prometheus]:
    """Prometheus with the project's own configuration.

    Args:
        directory: for its data and its log.
        targets: pattern of the targets files, in place of the configuration's.
        interval: between scrapes, and between evaluations of rules.
        gpus: address of an exporter of GPUs, which is scraped as a pod of its own.
    """
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {
        "scrape_interval": interval,
        "scrape_timeout": interval,
        "evaluation_interval": interval,
    }
    config["rule_files"] = [str((CONFIG.parent / file).resolve()) for file in config["rule_files"]]
    (scraped,) = config["scrape_configs"]
    scraped["file_sd_configs"][0] |= {"files": [targets], "refresh_interval": interval}
    own = {"namespace": "gpu-operator", "pod": "dcgm-exporter"}  # and its pods' become exported_…
    static = [{"targets": [gpus], "labels": own}]
    config["scrape_configs"].append({"job_name": "dcgm", "static_configs": static})
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    program = shutil.which("prometheus")
    assert program, INSTALL
    process = subprocess.Popen(
        [
            *(program, f"--config.file={directory / 'prometheus.yml'}"),
            *(f"--storage.tsdb.path={directory / 'data'}", "--web.listen-address=127.0.0.1:0"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = _address(process)
        assert process.stderr
        Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(timeout=120)


def _address(process: subprocess.Popen[str]) -> str:
    """Where it listens, once it is ready. It says both from threads of its own, in any order."""
    address, is_ready, said = "", False, []
    assert process.stderr
    for line in process.stderr:
        said.append(line)
        if found := re.search(r'"Listening on" address=(\S+)', line):
            address = found[1]
        is_ready = is_ready or "Server is ready to receive web requests" in line
        if address and is_ready:
            return address
    raise AssertionError("".join(said))
