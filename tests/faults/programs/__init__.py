"""Programs the sandbox is tried on: honest ones that must run, hostile ones that must gain nothing."""
