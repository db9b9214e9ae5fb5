"""What programs may not have, of any chip."""

from ssd_jax.tools.aot.hlo import Instruction, Module


def loops_of_unknown_length(module: Module) -> list[Instruction]:
    """On a GPU the host waits for the device in every iteration of one."""
    return [loop for loop in module.instructions("while") if module.trips(loop) is None]
