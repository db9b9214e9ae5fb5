"""`python -m ssd_jax` is the `ssd-jax` command."""

import sys

from ssd_jax.cli.main import main

sys.exit(main())
