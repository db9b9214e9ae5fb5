"""One target over the devices of several processes: a leader, whose engine calls, and followers."""
