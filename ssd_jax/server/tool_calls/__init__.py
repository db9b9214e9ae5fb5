"""Tool calls: what a request says of them, how models write them, and how responses do."""
