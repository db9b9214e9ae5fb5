"""Which request has which slot and pages, and which waits."""
