"""Guards of a run: alarms, bad numbers, signals, the watchdog."""
