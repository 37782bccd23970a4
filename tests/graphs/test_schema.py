"""The examples as programs see them that read configurations and statistics with Triton's own messages."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from google.protobuf import json_format

from flowserve.testing.serve import Served

# Files with fields that Triton does not have: `when` and `each`.
OWN = {"detect_language_cascade": "when", "read_text": "each"}


def got(served: Served, path: str) -> Any:
    return httpx.get(f"{served.base_url}/{path}", verify=False).json()


def test_configurations_and_statistics_are_of_tritons_schema(served_graphs: Served) -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    statistics = got(served_graphs, "v2/models/stats")
    rows = json_format.ParseDict(statistics, service_pb2.ModelStatisticsResponse()).model_stats
    assert len(rows) > 20
    for row in rows:
        config = got(served_graphs, f"v2/models/{row.name}/config")
        if row.name in OWN:
            with pytest.raises(json_format.ParseError, match=f'no field named "{OWN[row.name]}"'):
                json_format.ParseDict(config, model_config_pb2.ModelConfig())
        else:
            assert json_format.ParseDict(config, model_config_pb2.ModelConfig()).name == row.name
    own = got(served_graphs, "flowserve/stats")["graph_stats"]
    assert [(row["name"], row["version"]) for row in own] == [(row.name, row.version) for row in rows]
