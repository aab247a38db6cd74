"""Trackers: where else the steps of a run go, each in a process of its own."""
