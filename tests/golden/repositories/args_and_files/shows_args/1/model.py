import json
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from .helpers import NAME


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        labels = json.loads((Path(args["model_repository"]) / "labels.json").read_text())
        self.info = json.dumps(
            {
                "keys": sorted(args),
                "types": sorted({type(value).__name__ for value in args.values()}),
                "kind": args["model_instance_kind"],
                "device": args["model_instance_device_id"],
                "name": args["model_name"],
                "version": args["model_version"],
                "repository": os.path.basename(args["model_repository"].rstrip("/")),
                "labels": labels,
                "parameters": config["parameters"],
                "config": sorted(config),
                "group": config["instance_group"],
                "input": config["input"],
                "helpers": NAME,
                "module": __name__.split(".")[-1],
                "file": os.path.basename(__file__),
                "cwd": os.path.basename(os.getcwd()) == "1",
                "directory": os.path.basename(pb_utils.get_model_dir()),
            },
            sort_keys=True,
        )

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("INFO", np.array([[self.info]] * len(one.inputs()[0].as_numpy()), object))]
            )
            for one in requests
        ]
