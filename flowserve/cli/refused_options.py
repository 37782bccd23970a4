"""Options of tritonserver that `flowserve run` does not take, and what is said to whoever gives one.

Decided here: which feature each of them stands for, and where the same thing has another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Options of tritonserver whose feature this server does not have. Naming the feature beats "unknown option", and both
# beat silence.
NOT_YET: Final[Mapping[str, str]] = {
    "--allow-http": "serving without HTTP",
    "--allow-sagemaker": "SageMaker's endpoints",
    "--allow-vertex-ai": "Vertex AI's endpoints",
    "--backend-directory": "a directory of backends (third-party backends are Python packages with an entry point)",
    "--buffer-manager-thread-count": "copying threads (what has to be copied is copied where it is used)",
    "--cache-directory": "other caches than the local one",
    "--cuda-virtual-address-size": "CUDA memory pools",
    "--disable-auto-complete-config": "serving without completing configurations",
    "--enable-peer-access": "CUDA peer access",
    "--grpc-infer-allocation-pool-size": "gRPC message pools (messages are not kept)",
    "--grpc-infer-thread-count": "gRPC threads (one serves all connections)",
    "--grpc-max-response-pool-size": "gRPC message pools (messages are not kept)",
    "--host-policy": "host policies",
    "--http-thread-count": "HTTP threads (one event loop serves all connections)",
    "--id": "naming the server",
    "--min-supported-compute-capability": "choosing GPUs by what they can compute",
    "--model-load-gpu-limit": "GPU memory limits",
    "--model-load-retry-count": "retrying loads",
    "--model-load-thread-count": "choosing the number of loading threads",
    "--model-namespacing": "model namespacing",
    "--repoagent-directory": "repository agents",
    "--reuse-grpc-port": "sharing a port between servers",
    "--reuse-http-port": "sharing a port between servers",
    "--sagemaker-port": "SageMaker's endpoints",
    "--sagemaker-safe-port-range": "SageMaker's endpoints",
    "--sagemaker-thread-count": "SageMaker's endpoints",
    "--strict-model-config": "serving without completing configurations",
    "--vertex-ai-default-model": "Vertex AI's endpoints",
    "--vertex-ai-port": "Vertex AI's endpoints",
    "--vertex-ai-thread-count": "Vertex AI's endpoints",
}

# Said instead of "not supported", where the thing exists under another name.
INSTEAD: Final[Mapping[str, str]] = {
    "--model-repository": "the repository is named without an option: flowserve run REPO",
    "--model-store": "the repository is named without an option: flowserve run REPO",
    "--port": "the option is --http-port",
    "--host": "the option is --http-address",
    "--trace-file": "the option is --trace-config triton,file=PATH",
    "--trace-level": "the option is --trace-config level=LEVEL",
    "--trace-rate": "the option is --trace-config rate=N",
    "--trace-count": "the option is --trace-config count=N",
    "--trace-log-frequency": "the option is --trace-config triton,log-frequency=N",
    "--response-cache-byte-size": "the option is --cache-config local,size=BYTES",
}
