raise RuntimeError("not this version")
