"""What a model's own files say about it, asked of its backend: the bridge between repository/ and backends/.

The two rooms stand on one floor and do not import each other; whoever reads a repository is handed this function.
"""

from __future__ import annotations

from dataclasses import replace

from flowserve.backends import registry
from flowserve.backends.base import ModelFiles
from flowserve.config.types import Completion, ModelConfig
from flowserve.repository.layout import ModelFolder


def complete(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    """Blocks while files are read. Raises Invalid or Unsupported where the backend cannot make sense of them."""
    files = ModelFiles(folder.repository, folder.path, version)
    backend = registry.find(config.backend)
    return replace(backend.complete(config, files), instance_count=backend.default_instance_count)
