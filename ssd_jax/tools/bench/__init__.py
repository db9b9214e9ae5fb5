"""Measuring speed: prompt sets, paired runs, statistics, reports, and the cost of a forward."""
