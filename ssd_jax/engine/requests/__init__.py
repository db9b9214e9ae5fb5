"""A request by itself: its text, where it ends, its log-probabilities and figures."""
