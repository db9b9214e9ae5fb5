"""One target over several processes' devices: a leader, whose engine makes calls, and followers."""
