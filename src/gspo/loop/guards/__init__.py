"""What watches a run: alarms, bad numbers, signals, the watchdog."""
