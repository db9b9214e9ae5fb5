"""Measuring speed: prompt sets, paired runs, statistics, reports, and the cost of a forward.

No module here knows about models or engines: what is measured comes in as plain callables.
"""
