"""Where the draft runs: on the target's devices, on others of this process, or in a worker."""
