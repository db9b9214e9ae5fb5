"""How programs are specified, packed, compiled and found again, over pages and batch sizes."""
