"""Writes the dashboard for Grafana: `python deploy/generate.py`.

Decides which figures an operator watches. A test compares the file with this script, and every name and label of its
expressions, and of the alerts in prometheus/alerts.yaml, with the metrics of a running server, so that a metric that is
renamed breaks a test and not a dashboard.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

DASHBOARD: Final = Path(__file__).parent / "grafana/flowserve.json"
_BY: Final = 'model=~"$model"'
# Row: title, unit and expressions of its panels, each expression with its legend.
PANELS: Final[dict[str, list[tuple[str, str, list[tuple[str, str]]]]]] = {
    "Traffic": [
        ("Requests", "reqps", [(f"sum by (model) (rate(nv_inference_request_success{{{_BY}}}[1m]))", "{{model}}")]),
        (
            "Failed requests",
            "reqps",
            [
                (
                    f"sum by (model, reason) (rate(nv_inference_request_failure{{{_BY}}}[1m]))",
                    "{{model}} {{reason}}",
                )
            ],
        ),
        ("Load", "none", [(f"max by (model) (flowserve_load_ratio{{{_BY}}})", "{{model}}")]),
        ("Waiting requests", "none", [(f"sum by (model) (nv_inference_pending_request_count{{{_BY}}})", "{{model}}")]),
    ],
    "Time of a request": [
        (
            "Mean time",
            "µs",
            [
                (
                    (
                        f"sum by (model) (rate(nv_inference_request_duration_us{{{_BY}}}[1m])) / "
                        f"sum by (model) (rate(nv_inference_request_success{{{_BY}}}[1m]))"
                    ),
                    "{{model}}",
                )
            ],
        ),
        (
            "Share of time in queues",
            "percentunit",
            [
                (
                    (
                        f"sum by (model) (rate(nv_inference_queue_duration_us{{{_BY}}}[1m])) / "
                        f"sum by (model) (rate(nv_inference_request_duration_us{{{_BY}}}[1m]))"
                    ),
                    "{{model}}",
                )
            ],
        ),
    ],
    "Batches": [
        (
            "Mean rows of a batch",
            "none",
            [
                (
                    (
                        f"sum by (model) (rate(nv_inference_count{{{_BY}}}[1m])) / "
                        f"sum by (model) (rate(nv_inference_exec_count{{{_BY}}}[1m]))"
                    ),
                    "{{model}}",
                )
            ],
        ),
        (
            "Rows of a graph's nodes",
            "none",
            [("sum by (graph, node) (rate(flowserve_node_batch_rows_total[1m]))", "{{graph}}.{{node}}")],
        ),
    ],
    "Machine": [
        ("CPU", "percentunit", [("nv_cpu_utilization", "CPU")]),
        ("Memory", "bytes", [("nv_cpu_memory_used_bytes", "used"), ("nv_cpu_memory_total_bytes", "there")]),
        ("Connections", "none", [("flowserve_http_connections", "HTTP")]),
        ("Refused", "reqps", [("sum by (reason) (rate(flowserve_http_refused_total[1m]))", "{{reason}}")]),
    ],
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, charts in PANELS.items():
        panels.append(
            {"type": "row", "title": row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "id": len(panels) + 1}
        )
        width = 24 // len(charts)
        for i, (title, unit, targets) in enumerate(charts):
            panels.append(
                {
                    "type": "timeseries",
                    "title": title,
                    "id": len(panels) + 1,
                    "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
                    "gridPos": {"h": 8, "w": width, "x": i * width, "y": y + 1},
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "targets": [
                        {"refId": chr(65 + n), "expr": expression, "legendFormat": legend}
                        for n, (expression, legend) in enumerate(targets)
                    ],
                }
            )
        y += 9
    source = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    model = {
        "name": "model",
        "label": "model",
        "type": "query",
        "query": "label_values(nv_inference_request_success, model)",
        "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
    }
    return {
        "__inputs": [source],
        "title": "flowserve",
        "uid": "flowserve",
        "description": "Written by deploy/generate.py; not loaded into a Grafana yet.",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [model]},
        "panels": panels,
    }


if __name__ == "__main__":
    DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n")
